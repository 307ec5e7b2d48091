"""A config as a program: the model, its mesh, its optimizer, where the state lies, and the compiled steps.

Training, planning and comparison begin here. Nothing is allocated before `initial_state`.
"""

import dataclasses
import functools
import textwrap

import flax.linen as nn
import jax
import optax
from ml_collections import ConfigDict

from smallgpt_jax import models, sharding
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.data.pipeline import DataPipeline, open_pipeline
from smallgpt_jax.errors import UserError
from smallgpt_jax.optimizer import learning_rate_schedule, make_optimizer
from smallgpt_jax.step import TrainState, eval_step, init_state, train_step

SCHEDULE_FIELDS = ("learning_rate", "warmup_steps", "decay_steps", "final_learning_rate")


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config asks for: the model, where it is trained and how it is updated."""

    config: ConfigDict
    model: models.LanguageModel
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    shardings: TrainState

    def abstract_state(self) -> TrainState:
        """Returns the shapes of a state, and where each part lies."""
        shapes = jax.eval_shape(self._init_state)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def initial_state(self) -> TrainState:
        """Returns the state before the first update, computed where it lies."""
        return jax.jit(self._init_state, out_shardings=self.shardings)()

    def _init_state(self) -> TrainState:
        return init_state(self.model, self.optimizer, self.config.train.seed)

    def initial_opt_state(self, params) -> optax.OptState:
        """Returns the optimizer's state before the first update of these parameters."""
        return jax.jit(self.optimizer.init, out_shardings=self.shardings.opt_state)(params)

    def compile_train_step(self, compiler_options: dict | None = None) -> jax.stages.Compiled:
        """Returns (state, batch) → (state, metrics), which reuses the memory of its state."""
        c = self.config
        schedule = learning_rate_schedule(**{field: c.optimizer[field] for field in SCHEDULE_FIELDS})
        step = functools.partial(
            train_step, model=self.model, optimizer=self.optimizer, schedule=schedule, seed=c.train.seed,
            microbatches=c.train.microbatches, loss_chunks=c.train.loss_chunks)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, sharding.replicated(self.mesh)))
        with sharding.context(self.mesh):
            return jitted.lower(self.abstract_state(), self.abstract_batch()).compile(compiler_options)

    def compile_eval_step(self) -> jax.stages.Compiled:
        """Returns (params, model_state, batch) → (summed loss, number of targets)."""
        evaluation = functools.partial(
            eval_step, model=self.model, microbatches=self.config.train.microbatches,
            loss_chunks=self.config.train.loss_chunks)
        jitted = jax.jit(evaluation, out_shardings=sharding.replicated(self.mesh))
        state = self.abstract_state()
        with sharding.context(self.mesh):
            return jitted.lower(state.params, state.model_state, self.abstract_batch(evaluates=True)).compile()

    def abstract_batch(self, evaluates: bool = False) -> Rows:
        """Returns the shapes of a global batch, and where it lies; a field that the packing leaves out is None."""
        c, time = self.config, self.config.model.context_length

        def shape(length: int, dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((c.train.batch_size, length), dtype,
                                        sharding=sharding.batch_sharding(self.mesh))

        is_best_fit = c.data.packing == "best_fit"
        return Rows(
            shape(time + 1, "int32"), shape(time, "int32") if c.data.separate_documents else None,
            shape(time, "bool") if evaluates or is_best_fit else None, shape(time, "int32") if is_best_fit else None)

    def open_pipeline(self) -> DataPipeline:
        """Returns the data, for this process's devices. Raises UserError, see `data.pipeline.open_pipeline`."""
        c = self.config
        return open_pipeline(
            c.data, self.mesh, context_length=c.model.context_length, vocab_size=c.model.vocab_size,
            batch_size=c.train.batch_size, eval_steps=c.train.eval_steps, seed=c.train.seed)

    def runnable(self, compiled: jax.stages.Compiled):
        """Returns the compiled function as it can be called again and again.

        Simulated CPU devices share a few threads: programs in flight together can each hold some of those that the
        other's collectives wait for. So there each call waits for its end.
        """
        if self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu":
            return lambda *arguments: jax.block_until_ready(compiled(*arguments))
        return compiled


def build_program(config: ConfigDict, devices=None) -> Program:
    """Returns the program of `config`, on all devices if none are named.

    Raises UserError for what cannot be trained.
    """
    model = models.build(**config.model)
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
    validate_train(config.train, model.config, mesh)
    boxed_params = models.abstract_params(model)
    optimizer = make_optimizer(boxed_params, **config.optimizer)
    params = sharding.param_shardings(mesh, boxed_params)
    opt_state = sharding.optimizer_shardings(mesh, optimizer, nn.unbox(boxed_params), params)
    model_state = jax.tree.map(lambda _: sharding.replicated(mesh), models.abstract_model_state(model))
    shardings = TrainState(sharding.replicated(mesh), params, opt_state, model_state)
    return Program(config, model, mesh, optimizer, shardings)


def validate_train(train: ConfigDict, model: models.ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError for a `train` group with which this model cannot be trained on this mesh."""
    for field in ("steps", "batch_size", "microbatches", "loss_chunks", "log_every", "eval_every",
                  "checkpoint_every", "keep_checkpoints", "max_nonfinite"):
        if train[field] < 1:
            raise UserError(f"config.train.{field}={train[field]}: must be at least 1")
    if train.eval_steps < 0:
        raise UserError(f"config.train.eval_steps={train.eval_steps}: must not be negative")
    if not 0 <= train.seed < 2**32:
        raise UserError(f"config.train.seed={train.seed}: must be at least 0 and below 2^32")
    if train.on_nonfinite not in ("stop", "skip"):
        raise UserError(f"config.train.on_nonfinite={train.on_nonfinite!r}: must be 'stop' or 'skip'")
    parts = sharding.batch_parts(mesh) * train.microbatches
    if train.batch_size % parts:
        raise UserError(
            f"config.train.batch_size={train.batch_size}: must be a multiple of {parts}: "
            f"{sharding.batch_parts(mesh)} devices (config.mesh.data × fsdp) × "
            f"{train.microbatches} microbatches")
    if model.context_length % train.loss_chunks:
        raise UserError(f"config.train.loss_chunks={train.loss_chunks}: must divide "
                        f"config.model.context_length={model.context_length}")
    if (length := mesh.shape["path"]) != 1:
        paths = getattr(model, "num_paths", None)
        if paths is None:
            raise UserError(f"config.mesh.path={length}: {model.architecture} has no paths")
        if paths % length:
            raise UserError(f"config.mesh.path={length}: must divide config.model.num_paths={paths}")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a compiler or a device reports that its memory is too small.

    A TPU's vmem and smem are not meant: what its kernels need there does not depend on the batch.
    """
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and "memory space vmem" not in text and "memory space smem" not in text


def out_of_memory_message(config: ConfigDict, error: Exception) -> str:
    """Returns the message of a run that a device's memory cannot hold."""
    return (f"config.train.batch_size={config.train.batch_size}: in config.train.microbatches="
            f"{config.train.microbatches} parts it needs more memory than a device has "
            f"({textwrap.shorten(str(error), 160, placeholder=' …')});\nset more config.train.microbatches, "
            "config.model.remat='full' or, on several devices, a larger config.mesh.fsdp")
