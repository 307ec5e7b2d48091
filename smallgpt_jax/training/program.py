"""The program of a run. No arrays are allocated before `Program.initial_state` is called."""

import contextlib
import dataclasses
import operator
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.data.config import DataConfig, is_synthetic
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import DataPipeline, open_pipeline
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.objectives.future_tokens import FUTURE_HEADS
from smallgpt_jax.objectives.objective import OBJECTIVES
from smallgpt_jax.optim.learning_rate import learning_rate_schedule
from smallgpt_jax.optim.optimizer import OPTIMIZERS
from smallgpt_jax.optim.transfer import scale_initial
from smallgpt_jax.run.config import Config, TrainConfig
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.trackers import TRACKERS
from smallgpt_jax.training.compiled_steps import CompiledSteps, build_steps
from smallgpt_jax.training.step import Hyperparameters


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps of a run. `config` has all values; those that the steps do not contain are bound to
    them here.
    """

    config: Config
    steps: CompiledSteps  # possibly shared with other runs

    model = property(operator.attrgetter("steps.model"))
    objective = property(operator.attrgetter("steps.objective"))
    mesh = property(operator.attrgetter("steps.mesh"))
    optimizer = property(operator.attrgetter("steps.optimizer"))
    shardings = property(operator.attrgetter("steps.shardings"))
    teacher = property(operator.attrgetter("steps.teacher"))
    multipliers = property(operator.attrgetter("steps.multipliers"))
    abstract_state = property(operator.attrgetter("steps.abstract_state"))
    abstract_batch = property(operator.attrgetter("steps.abstract_batch"))

    @property
    def is_simulated(self) -> bool:
        """Simulated devices share the threads of one CPU."""
        return self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"

    def initial_state(self) -> TrainState:
        return self.steps.initialization(np.uint32(self.config.train.seed))

    def restore_or_initialize(self, checkpoints) -> TrainState:
        """The checkpoint of an imported model has neither heads, optimizer state nor average; they
        are initialized.
        """
        state = checkpoints.restore_latest(self.abstract_state) or self.initial_state()
        if state.opt_state is None:

            def initialize():
                return scale_initial(
                    self.objective.init_heads(self.config.train.seed), self.multipliers
                )

            state = state._replace(heads=jax.jit(initialize, out_shardings=self.shardings.heads)())
            opt_state = jax.jit(self.optimizer.init, out_shardings=self.shardings.opt_state)(
                state.trained
            )
            state = state._replace(opt_state=opt_state)
            if self.config.train.ema:
                state = state._replace(ema=jax.tree.map(jnp.copy, state.params))
        return state

    def start_compilation(self) -> tuple[Future, Future]:
        """Compiles in threads. The train step takes longest, so it is traced before others slow the
        tracing.
        """
        self.steps.trace_train_step()
        pool = ThreadPoolExecutor(2)
        steps = pool.submit(self.compile_train_step), pool.submit(self.compile_eval_step)
        pool.shutdown(wait=False)
        if self.is_simulated:  # otherwise a program that runs during compilation could lack threads
            wait(steps)
        return steps

    def compile_train_step(self) -> jax.stages.Compiled:
        """Returns (state, batch, hyperparameters[, constants]) → (state, metrics); the input state
        is donated.
        """
        return self.steps.train_step

    def compile_eval_step(self) -> jax.stages.Compiled:
        """Returns (`TrainState.evaluated`, model_state, batch) → sums; see `eval_step`."""
        return self.steps.eval_step

    def bind(self, train_step: jax.stages.Compiled):
        """Restores the objective's constants, if any; returns (state, batch) → (state, metrics)."""
        constants, c = self.objective.constants(), self.config
        schedule = learning_rate_schedule(c.optimizer)

        # A small program of its own, and not a part of the step, which then does not depend on the
        # schedule.
        def hyperparameters(step) -> Hyperparameters:
            return Hyperparameters(
                jnp.uint32(c.train.seed),
                jnp.float32(schedule(step)),
                jnp.float32(c.optimizer.weight_decay),
            )

        jitted = jax.jit(hyperparameters, out_shardings=sharding.replicated(self.mesh))
        further = (constants,) if constants else ()
        return self.runnable(
            lambda state, batch: train_step(state, batch, jitted(state.step), *further)
        )

    def runnable(self, step):
        """On simulated devices, blocks until the result is available.

        Simulated devices share a few threads. Two programs that run at the same time can deadlock,
        because each program holds threads that the other program's collectives wait for.
        """
        if self.is_simulated:
            return lambda *arguments: jax.block_until_ready(step(*arguments))
        return step

    def open_pipeline(self, corpus: Corpus | None = None) -> DataPipeline:
        c = self.config
        pipeline = open_pipeline(
            c.data,
            self.mesh,
            context_length=c.model.context_length,
            vocab_size=c.model.vocab_size,
            batch_size=c.train.batch_size,
            eval_steps=c.train.eval_steps,
            seed=c.data_seed,
            corpus=corpus,
        )
        if self.teacher:
            self.teacher.check_tokenizer(pipeline.corpus.tokenizer)
        if c.train.objective == "masked":
            require_mask_token(c.model, pipeline.corpus.tokenizer)
            return pipeline.with_vocab_size()
        return pipeline


def build_program(config: ConfigDict | Config, devices=None, build=build_steps) -> Program:
    config = Config.of(config)
    mesh = sharding.make_mesh(config.mesh, devices)
    validate(config, sharding.num_batch_shards(mesh), mesh.shape["path"])
    steps = build(config, mesh)
    if steps.teacher:  # it has the step of its newest checkpoint, if the config gives none
        config = config.replace(train={"teacher_step": steps.teacher.step})
    return Program(config, steps)


def shared_program(config: ConfigDict | Config, devices=None) -> Program:
    """Like `build_program`, but reuses the steps of a recent program whose config has an equal
    compiled part.
    """
    return build_program(config, devices, RECENT_STEPS.find)


@dataclasses.dataclass
class RecentSteps:
    """Compiled steps that a process keeps for further runs: those that were used last."""

    limit: int
    steps: dict[tuple, CompiledSteps] = dataclasses.field(
        default_factory=dict
    )  # the last is the newest

    def find(self, config: Config, mesh: jax.sharding.Mesh) -> CompiledSteps:
        if config.train.teacher:  # its newest checkpoint may change
            return build_steps(config, mesh)
        # `parts` only distinguishes functions and classes that use the same name, one after the
        # other.
        parts = (
            OBJECTIVES.get(config.train.objective),
            FUTURE_HEADS.get(config.train.future_head),
            OPTIMIZERS.get(config.optimizer.name),
            *models.named_parts(config.model),
        )
        key = config.compiled_part(), mesh, parts
        self.steps[key] = self.steps.pop(key, None) or build_steps(config, mesh)
        while len(self.steps) > self.limit:
            self.steps.pop(next(iter(self.steps)))
        return self.steps[key]


RECENT_STEPS = RecentSteps(limit=4)


def validate(config: Config, batch_shards: int, path_shards: int) -> None:
    """Raises UserError for values of one group that do not fit another group or the mesh."""
    train, model = config.train, config.model
    train.validate_choice("tracker", ("", *TRACKERS))
    learning_rate_schedule(config.optimizer)
    if train.objective != "causal" and is_synthetic(config.data):
        train.refuse("objective", "must be 'causal' with a probe, whose answers are next tokens")
    if train.objective != "causal" and config.data.format != "text":
        validate_tuning(train, config.data)
    if train.future_tokens and (config.optimizer.base_width or config.optimizer.base_depth):
        train.refuse(
            "future_tokens",
            "must be 0 with config.optimizer.base_width or base_depth, which have no rules "
            "for its heads",
        )
    if train.ema and config.optimizer.lora_rank:
        train.refuse(
            "ema", "must be 0 with config.optimizer.lora_rank, which does not train the weights"
        )
    parts = batch_shards * train.microbatches
    if train.batch_size % parts:
        train.refuse(
            "batch_size",
            f"must be a multiple of {parts}, which is {batch_shards} devices "
            f"(config.mesh.data × fsdp) × {train.microbatches} microbatches",
        )
    if model.context_length % train.loss_chunks:
        train.refuse(
            "loss_chunks", f"must divide config.model.context_length={model.context_length}"
        )
    if path_shards != 1:
        paths = getattr(model, "num_paths", None)
        if paths is None:
            raise UserError(f"config.mesh.path={path_shards}: {model.architecture} has no paths")
        if paths % path_shards:
            raise UserError(
                f"config.mesh.path={path_shards}: must divide config.model.num_paths={paths}"
            )


def validate_tuning(train: TrainConfig, data: DataConfig) -> None:
    """Raises UserError unless another objective than the causal one can be trained on prompts with
    answers.
    """
    if data.format != "completion":
        train.refuse("objective", f"must be 'causal' with config.data.format={data.format!r}")
    if train.objective != "prefix":
        train.refuse(
            "objective",
            "must be 'causal' or 'prefix' with config.data.format='completion', whose answers "
            "are next tokens",
        )
    if not data.separate_documents:
        data.refuse(
            "separate_documents",
            "must be True with config.train.objective='prefix' and prompts, each of "
            "which is a prefix",
        )


def require_mask_token(model: models.ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError unless the last row of the embedding, which is the mask token, is no token
    of the text.
    """
    if model.vocab_size == tokenizer.vocab_size:
        model.refuse(
            "vocab_size",
            "config.train.objective='masked' uses the embedding's last row as the mask token, "
            f"but the tokenizer uses all {tokenizer.vocab_size:,}; increase it by 1 or more",
        )


@contextlib.contextmanager
def memory_errors_explained(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(out_of_memory_message(config, error)) from None


def is_out_of_memory(error: Exception) -> bool:
    """Excludes TPU vmem and smem, because a smaller batch does not reduce their use."""
    text = str(error)
    return (
        "RESOURCE_EXHAUSTED" in text
        and "memory space vmem" not in text
        and "memory space smem" not in text
    )


def out_of_memory_message(config: TrainConfig, error: Exception) -> str:
    reason = textwrap.shorten(str(error), 160, placeholder=" …")
    return (
        f"config.train.batch_size={config.batch_size}: needs more memory than a device has, with "
        f"config.train.microbatches={config.microbatches} ({reason});\nincrease "
        "config.train.microbatches, set config.model.remat='full' or, on several devices, "
        "increase config.mesh.fsdp"
    )
