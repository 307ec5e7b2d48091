"""What is compiled for a config and a mesh: the model, the objective, the optimizer and the steps.

A program is made from `Config.compiled_part`, which lacks the values of the fields declared as
`not_compiled`. What changes the numbers of an update among these is an input of its steps: the
seed, the learning rate and the weight decay. So runs that differ in nothing else share a program.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.devices.platform import step_options
from smallgpt_jax.objectives.objective import Objective
from smallgpt_jax.objectives.teacher import Teacher
from smallgpt_jax.optim.learning_rate import learning_rate_schedule
from smallgpt_jax.output import elapsed_time_shown
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.initial_state import abstract_state, init_state
from smallgpt_jax.training.step import Hyperparameters, train_step
from smallgpt_jax.training.validation import eval_step


def preparation_shown() -> contextlib.AbstractContextManager:
    """Shows the time on standard error while steps are compiled and the state is restored."""
    # Only of one process: a cluster's logs are often one file.
    is_shown = distributed.is_primary()
    return elapsed_time_shown("preparing the first step") if is_shown else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Traces and compiles when needed, and once. Only `initial_state` allocates arrays."""

    config: Config  # a `Config.compiled_part`
    mesh: jax.sharding.Mesh
    model: models.LanguageModel
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    shardings: TrainState
    teacher: Teacher | None  # also a term of the objective
    multipliers: Any  # see `mup.Multipliers`; None: all are 1

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract_state(self),
            self.shardings,
        )

    def abstract_batch(self, evaluates: bool = False) -> Batch:
        """Fields that this config does not use are None."""
        c, time = self.config, self.config.model.context_length
        rows_on_devices = sharding.batch_sharding(self.mesh)

        def shape(dtype: str, *lengths: int) -> jax.ShapeDtypeStruct:
            shape_of_batch = (c.train.batch_size, *lengths)
            return jax.ShapeDtypeStruct(shape_of_batch, dtype, sharding=rows_on_devices)

        # Elsewhere, all targets are the next tokens, so the step computes them from the tokens.
        has_targets = c.data.packing == "best_fit" or is_synthetic(c.data)
        return Batch(
            tokens_BxT1=shape("int32", time + 1),
            segment_ids_BxT=shape("int32", time) if c.data.separate_documents else None,
            loss_mask_BxT=shape("bool", time) if evaluates or has_targets else None,
            targets_BxT=shape("int32", time) if has_targets else None,
            row_numbers_B=shape("uint32") if evaluates else None,
            vocab_size_B=shape("int32") if c.train.objective == "masked" else None,
        )

    def initial_state(self, seed: int) -> TrainState:
        # Compiled with shardings, so that each device initializes its own shards.
        return self._initialization(np.uint32(seed))

    def bind(self, config: ConfigDict | Config) -> Callable:
        """Returns (state, batch) → (state, metrics) with the seed, the schedule and the weight
        decay of `config`; the input state is donated. Restores the objective's constants, if any.
        """
        config = Config.of(config)
        schedule = learning_rate_schedule(config.optimizer)

        # A small program of its own, and not a part of the step, which then does not depend on the
        # schedule.
        @functools.partial(jax.jit, out_shardings=sharding.replicated(self.mesh))
        def hyperparameters(step_number) -> Hyperparameters:
            return Hyperparameters(
                jnp.uint32(config.train.seed),
                jnp.float32(schedule(step_number)),
                jnp.float32(config.optimizer.weight_decay),
            )

        step, constants = self.compiled_train_step, self.objective.constants()
        further = (constants,) if constants else ()

        def update(state, batch):
            results = step(state, batch, hyperparameters(state.step), *further)
            return self._wait_if_simulated(results)

        return update

    def evaluate(self, evaluated, model_state, batch):
        """Returns the `EvaluationSums` of a batch. `evaluated`: of `TrainState`."""
        return self._wait_if_simulated(self.compiled_eval_step(evaluated, model_state, batch))

    @property
    def compiler_options(self) -> dict | None:
        """The options of both steps; None: the compiler's defaults."""
        platform = self.mesh.devices.flat[0].platform
        return step_options(platform, self.config.train.deterministic) or None

    @functools.cached_property
    def compiled_train_step(self) -> jax.stages.Compiled:
        """(state, batch, hyperparameters[, constants]) → (state, metrics)."""
        compiled = self.lowered_train_step.compile(self.compiler_options)
        vars(self).pop("lowered_train_step")  # takes more memory than the compiled step
        return compiled

    @functools.cached_property
    def lowered_train_step(self) -> jax.stages.Lowered:
        jitted = jax.jit(
            functools.partial(train_step, self),
            donate_argnums=0,  # the next state takes the memory of this one
            out_shardings=(self.shardings, sharding.replicated(self.mesh)),
        )
        hyperparameters = Hyperparameters(
            seed=self._abstract_number("uint32"),
            learning_rate=self._abstract_number("float32"),
            weight_decay=self._abstract_number("float32"),
        )
        inputs = [self.abstract_state, self.abstract_batch(), hyperparameters]
        if self.objective.abstract_constants:
            inputs.append(self.objective.abstract_constants)
        with sharding.use_mesh(self.mesh):
            return jitted.lower(*inputs)

    @functools.cached_property
    def compiled_eval_step(self) -> jax.stages.Compiled:
        """(`TrainState.evaluated`, model_state, batch) → sums."""
        return self.lower_eval_step().compile(self.compiler_options)

    def lower_eval_step(self) -> jax.stages.Lowered:
        evaluation = functools.partial(eval_step, self)
        jitted = jax.jit(evaluation, out_shardings=sharding.replicated(self.mesh))
        state, batch = self.abstract_state, self.abstract_batch(evaluates=True)
        with sharding.use_mesh(self.mesh):
            return jitted.lower(state.evaluated, state.model_state, batch)

    def start_compilation(self) -> list[Future]:
        """Compiles both steps in threads."""
        # The train step takes longest, so it is traced before others slow the tracing.
        if "compiled_train_step" not in vars(self):
            self.lowered_train_step  # noqa: B018
        pool = ThreadPoolExecutor(2)
        compilations = [
            pool.submit(lambda: self.compiled_train_step),
            pool.submit(lambda: self.compiled_eval_step),
        ]
        pool.shutdown(wait=False)  # its threads end after both compilations
        if self._is_simulated:  # a program that runs during compilation could lack threads
            wait(compilations)
        return compilations

    @functools.cached_property
    def _initialization(self) -> jax.stages.Compiled:
        """seed → state."""
        initialize = functools.partial(init_state, self)
        jitted = jax.jit(initialize, out_shardings=self.shardings)
        lowered = jitted.lower(self._abstract_number("uint32"))
        return lowered.compile(self._initialization_options)

    @property
    def _initialization_options(self) -> dict | None:
        # On CPUs, optimizing the initialization takes longer than running it, and it runs only once.
        option = "xla_backend_optimization_level"
        if self.mesh.devices.flat[0].platform != "cpu" or option in os.environ.get("XLA_FLAGS", ""):
            return None
        return {option: 1}

    def _abstract_number(self, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding.replicated(self.mesh))

    @property
    def _is_simulated(self) -> bool:
        return self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"

    def _wait_if_simulated(self, results):
        # Simulated devices share a few threads of one CPU. Two programs that run at the same time
        # can deadlock, because each holds threads that the other's collectives wait for.
        return jax.block_until_ready(results) if self._is_simulated else results
