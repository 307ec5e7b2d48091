"""Builds the program of a config. No arrays are allocated before `Program.initial_state` is called."""

import dataclasses
import functools
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.pipeline import DataPipeline, open_pipeline
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config, TrainConfig
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.trackers import TRACKERS
from smallgpt_jax.training.learning_rate import learning_rate_schedule
from smallgpt_jax.training.objectives import Objective, make_objective
from smallgpt_jax.training.optimizer import make_optimizer
from smallgpt_jax.training.step import eval_step, init_state, train_step
from smallgpt_jax.training.teacher import Teacher, open_teacher
from smallgpt_jax.training.transfer import base_config, multipliers, scale_initial


@dataclasses.dataclass(frozen=True)
class Program:
    config: Config
    model: models.LanguageModel
    objective: Objective
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    shardings: TrainState
    teacher: Teacher | None  # also a term of the objective
    multipliers: Any  # see `transfer.multipliers`; None: all are 1

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                            self._traced_initialization.out_info, self.shardings)

    @property
    def is_simulated(self) -> bool:
        """Simulated devices share the threads of one CPU."""
        return self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"

    def initial_state(self) -> TrainState:
        """Each device initializes its own shards."""
        # On CPUs, optimizing this program takes longer than running it, and it runs only once.
        options = {"xla_backend_optimization_level": 1} if self.mesh.devices.flat[0].platform == "cpu" else None
        return self._traced_initialization.lower().compile(options)()

    @functools.cached_property
    def _traced_initialization(self) -> jax.stages.Traced:
        initialize = functools.partial(
            init_state, self.model, self.objective, self.optimizer, self.config.train.seed, self.multipliers,
            self.config.train.ema)
        return jax.jit(initialize, out_shardings=self.shardings).trace()

    def initial_opt_state(self, trained) -> optax.OptState:
        return jax.jit(self.optimizer.init, out_shardings=self.shardings.opt_state)(trained)

    def restore_or_initialize(self, checkpoints) -> TrainState:
        """The checkpoint of an imported model has neither heads, optimizer state nor average; they are initialized."""
        state = checkpoints.restore_latest(self.abstract_state) or self.initial_state()
        if state.opt_state is None:
            def initialize():
                return scale_initial(self.objective.init_heads(self.config.train.seed), self.multipliers)

            state = state._replace(heads=jax.jit(initialize, out_shardings=self.shardings.heads)())
            state = state._replace(opt_state=self.initial_opt_state(state.trained))
            if self.config.train.ema:
                state = state._replace(ema=jax.tree.map(jnp.copy, state.params))
        return state

    def start_compilation(self) -> tuple[Future, Future]:
        """Compiles in threads. The train step takes longest, so it is traced before others slow the tracing."""
        self._lowered_train_step  # noqa: B018 — traced here, not in the thread
        pool = ThreadPoolExecutor(2)
        steps = pool.submit(self.compile_train_step), pool.submit(self.compile_eval_step)
        pool.shutdown(wait=False)
        if self.is_simulated:  # otherwise a program that runs during compilation could lack threads
            wait(steps)
        return steps

    def compile_train_step(self, compiler_options: dict | None = None) -> jax.stages.Compiled:
        """Returns (state, batch[, constants]) → (state, metrics); the input state is donated."""
        return self._lowered_train_step.compile(compiler_options)

    @functools.cached_property
    def _lowered_train_step(self) -> jax.stages.Lowered:
        c, constants = self.config, self.objective.abstract_constants
        step = functools.partial(
            train_step, model=self.model, objective=self.objective, optimizer=self.optimizer,
            schedule=learning_rate_schedule(c.optimizer), microbatches=c.train.microbatches, seed=c.train.seed,
            ema=c.train.ema)
        arguments = (self.abstract_state, self.abstract_batch(), *([constants] if constants else []))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, sharding.replicated(self.mesh)))
        with sharding.use_mesh(self.mesh):
            return jitted.lower(*arguments)

    def compile_eval_step(self, compiler_options: dict | None = None) -> jax.stages.Compiled:
        """Returns (params, model_state, batch) → sums; see `eval_step`."""
        evaluation = functools.partial(
            eval_step, model=self.model, objective=self.objective, microbatches=self.config.train.microbatches,
            counts_answers=is_synthetic(self.config.data))
        jitted = jax.jit(evaluation, out_shardings=sharding.replicated(self.mesh))
        state = self.abstract_state
        with sharding.use_mesh(self.mesh):
            lowered = jitted.lower(state.params, state.model_state, self.abstract_batch(evaluates=True))
        return lowered.compile(compiler_options)

    def abstract_batch(self, evaluates: bool = False) -> Batch:
        """Fields that this config does not use are None."""
        c, time = self.config, self.config.model.context_length

        def shape(length: int, dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((c.train.batch_size, length), dtype,
                                        sharding=sharding.batch_sharding(self.mesh))

        has_targets = c.data.packing == "best_fit" or is_synthetic(c.data)
        return Batch(
            shape(time + 1, "int32"), shape(time, "int32") if c.data.separate_documents else None,
            shape(time, "bool") if evaluates or has_targets else None, shape(time, "int32") if has_targets else None)

    def open_pipeline(self) -> DataPipeline:
        c = self.config
        pipeline = open_pipeline(
            c.data, self.mesh, context_length=c.model.context_length, vocab_size=c.model.vocab_size,
            batch_size=c.train.batch_size, eval_steps=c.train.eval_steps, seed=c.train.seed)
        if self.teacher:
            self.teacher.check_tokenizer(pipeline.corpus.tokenizer)
        return pipeline

    def with_constants(self, train_step):
        """Restores the objective's constants, if any; returns (state, batch) → (state, metrics)."""
        constants = self.objective.constants()
        return (lambda state, batch: train_step(state, batch, constants)) if constants else train_step

    def runnable(self, compiled: jax.stages.Compiled):
        """On simulated devices, blocks until the result is available.

        Simulated devices share a few threads. Two programs that run at the same time can deadlock, because each
        program holds threads that the other program's collectives wait for.
        """
        if self.is_simulated:
            return lambda *arguments: jax.block_until_ready(compiled(*arguments))
        return compiled


def build_program(config: ConfigDict | Config, devices=None) -> Program:
    config = Config.of(config)
    model = models.LanguageModel(config.model)
    mesh = sharding.make_mesh(config.mesh, devices)
    batch_shards, path_shards = sharding.num_batch_shards(mesh), mesh.shape["path"]
    validate(config, batch_shards, path_shards)
    teacher = open_teacher(config.train, model, mesh)
    objective = make_objective(config.train, model, **({"feature_distance": teacher} if teacher else {}))
    models.require_factors(model)
    params, heads = models.abstract_params(model), objective.abstract_heads()
    if taken := params.keys() & heads.keys():
        raise ValueError(f"terms have the names of parameters: {', '.join(taken)}; rename the terms")
    trained = {**params, **heads}
    scales = transfer_multipliers(config, trained)
    optimizer = make_optimizer(trained, config.optimizer, scales)
    if teacher:  # it has the step of its newest checkpoint, if the config gives none
        config = config.replace(train={"teacher_step": teacher.step})
    model_state = jax.tree.map(lambda _: sharding.replicated(mesh), models.abstract_model_state(model))
    placed = sharding.param_shardings(mesh, params)
    shardings = TrainState(
        sharding.replicated(mesh), placed, sharding.optimizer_shardings(mesh, optimizer, trained), model_state,
        sharding.param_shardings(mesh, heads), placed if config.train.ema else {})
    return Program(config, model, objective, mesh, optimizer, shardings, teacher, scales)


def transfer_multipliers(config: Config, trained):
    """Returns the multipliers of muP and CompleteP, or None without a base model."""
    if not (config.optimizer.base_width or config.optimizer.base_depth):
        return None
    base = models.LanguageModel(base_config(config.model, config.optimizer))
    heads = make_objective(config.train, base).abstract_heads()
    return multipliers(trained, {**models.abstract_params(base), **heads}, config.model, config.optimizer)


def validate(config: Config, batch_shards: int, path_shards: int) -> None:
    """Raises UserError for values of one group that do not fit another group or the mesh."""
    train, model = config.train, config.model
    train.validate_choice("tracker", ("", *TRACKERS))
    parts = batch_shards * train.microbatches
    if train.batch_size % parts:
        train.refuse("batch_size", f"must be a multiple of {parts}, which is {batch_shards} devices "
                     f"(config.mesh.data × fsdp) × {train.microbatches} microbatches")
    if model.context_length % train.loss_chunks:
        train.refuse("loss_chunks", f"must divide config.model.context_length={model.context_length}")
    if path_shards != 1:
        paths = getattr(model, "num_paths", None)
        if paths is None:
            raise UserError(f"config.mesh.path={path_shards}: {model.architecture} has no paths")
        if paths % path_shards:
            raise UserError(f"config.mesh.path={path_shards}: must divide config.model.num_paths={paths}")


def is_out_of_memory(error: Exception) -> bool:
    """Excludes TPU vmem and smem, because a smaller batch does not reduce their use."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and "memory space vmem" not in text and "memory space smem" not in text


def out_of_memory_message(config: TrainConfig, error: Exception) -> str:
    return (f"config.train.batch_size={config.batch_size}: needs more memory than a device has, with "
            f"config.train.microbatches={config.microbatches} "
            f"({textwrap.shorten(str(error), 160, placeholder=' …')});\nincrease config.train.microbatches, set "
            "config.model.remat='full' or, on several devices, increase config.mesh.fsdp")
