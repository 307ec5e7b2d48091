"""The compiled steps of a training program, which runs of equal shapes share.

They are made from `Config.compiled_part`, which lacks the values of the fields declared as
`not_compiled`. What changes the numbers of an update among these is an input of the steps: the
seed, the learning rate and the weight decay.
"""

import dataclasses
import functools
import os
from typing import Any

import jax
import optax

from smallgpt_jax import models
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.objectives.future_tokens import future_terms
from smallgpt_jax.objectives.objective import Objective, make_objective
from smallgpt_jax.objectives.teacher import Teacher, open_teacher
from smallgpt_jax.optim import trainable
from smallgpt_jax.optim.optimizer import make_optimizer
from smallgpt_jax.optim.transfer import base_config, multipliers
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.step import Hyperparameters, eval_step, init_state, train_step


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledSteps:
    """Nothing is traced or compiled before it is first needed, and nothing twice."""

    config: Config  # a `Config.compiled_part`
    model: models.LanguageModel
    objective: Objective
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformationExtraArgs
    shardings: TrainState
    teacher: Teacher | None  # also a term of the objective
    multipliers: Any  # see `transfer.multipliers`; None: all are 1

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self._traced_initialization.out_info,
            self.shardings,
        )

    def abstract_number(self, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding.replicated(self.mesh))

    def abstract_batch(self, evaluates: bool = False) -> Batch:
        """Fields that this config does not use are None."""
        c, time = self.config, self.config.model.context_length

        def shape(dtype: str, *lengths: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (c.train.batch_size, *lengths), dtype, sharding=sharding.batch_sharding(self.mesh)
            )

        has_targets = c.data.packing == "best_fit" or is_synthetic(c.data)
        return Batch(
            shape("int32", time + 1),
            shape("int32", time) if c.data.separate_documents else None,
            shape("bool", time) if evaluates or has_targets else None,
            shape("int32", time) if has_targets else None,
            shape("uint32") if evaluates else None,
            shape("int32") if c.train.objective == "masked" else None,
        )

    @functools.cached_property
    def initialization(self) -> jax.stages.Compiled:
        """Returns seed → state. Each device initializes its own shards."""
        return self._traced_initialization.lower().compile(self._initialization_options)

    @property
    def _initialization_options(self) -> dict | None:
        """On CPUs, optimizing the initialization takes longer than running it, and it runs only
        once.
        """
        option = "xla_backend_optimization_level"
        if self.mesh.devices.flat[0].platform != "cpu" or option in os.environ.get("XLA_FLAGS", ""):
            return None
        return {option: 1}

    @functools.cached_property
    def _traced_initialization(self) -> jax.stages.Traced:
        def initialize(seed):
            return init_state(
                self.model,
                self.objective,
                self.optimizer,
                seed,
                self.multipliers,
                self.config.train.ema,
            )

        return jax.jit(initialize, out_shardings=self.shardings).trace(
            self.abstract_number("uint32")
        )

    @functools.cached_property
    def train_step(self) -> jax.stages.Compiled:
        compiled = self.lowered_train_step.compile()
        vars(self).pop("lowered_train_step")  # takes more memory than the compiled step
        return compiled

    def trace_train_step(self) -> None:
        if "train_step" not in vars(self):
            self.lowered_train_step  # noqa: B018

    @functools.cached_property
    def lowered_train_step(self) -> jax.stages.Lowered:
        constants = self.objective.abstract_constants
        jitted = jax.jit(
            self._update,
            donate_argnums=0,
            out_shardings=(self.shardings, sharding.replicated(self.mesh)),
        )
        with sharding.use_mesh(self.mesh):
            return jitted.lower(*self._abstract_arguments, *([constants] if constants else []))

    @functools.cached_property
    def _update(self):
        return functools.partial(
            train_step,
            model=self.model,
            objective=self.objective,
            optimizer=self.optimizer,
            microbatches=self.config.train.microbatches,
            ema=self.config.train.ema,
        )

    @property
    def _abstract_arguments(self) -> tuple:
        hyperparameters = Hyperparameters(
            *map(self.abstract_number, ("uint32", "float32", "float32"))
        )
        return self.abstract_state, self.abstract_batch(), hyperparameters

    @functools.cached_property
    def eval_step(self) -> jax.stages.Compiled:
        return self.lower_eval_step().compile()

    def lower_eval_step(self) -> jax.stages.Lowered:
        evaluation = functools.partial(
            eval_step,
            model=self.model,
            objective=self.objective,
            microbatches=self.config.train.microbatches,
            counts_answers=is_synthetic(self.config.data),
            measures_repeats=self.config.train.eval_repeats,
        )
        jitted = jax.jit(evaluation, out_shardings=sharding.replicated(self.mesh))
        state = self.abstract_state
        with sharding.use_mesh(self.mesh):
            return jitted.lower(
                state.evaluated, state.model_state, self.abstract_batch(evaluates=True)
            )


def build_steps(config: Config, mesh: jax.sharding.Mesh) -> CompiledSteps:
    """Returns steps of which nothing is traced. Raises UserError for an invalid config."""
    config = config.compiled_part()
    model = models.LanguageModel(config.model)
    teacher = open_teacher(config.train, model, mesh)
    objective = make_objective(
        config.train,
        model,
        **future_terms(config.train, model),
        **({"feature_distance": teacher} if teacher else {}),
    )
    if config.data.format != "text":
        objective = dataclasses.replace(objective, examples=objective.tuning_examples)
    models.require_factors(model)
    params = models.abstract_params(model)
    if config.optimizer.lora_rank:
        if others := objective.abstract_heads():
            config.optimizer.refuse(
                "lora_rank",
                f"cannot be combined with the objective's {', '.join(others)}, which "
                "has parameters of its own; set it to 0",
            )
        objective = dataclasses.replace(
            objective, adapters=functools.partial(trainable.init_adapters, params, config.optimizer)
        )
    heads = objective.abstract_heads()
    if taken := params.keys() & heads.keys():
        raise ValueError(
            f"terms have the names of parameters: {', '.join(taken)}; rename the terms"
        )
    trained = {**params, **heads}
    scales = transfer_multipliers(config, trained)
    masks = trainable.make_masks(params, heads, config.optimizer)
    objective = dataclasses.replace(
        objective, weights=trainable.weights_of(masks, params, config.optimizer)
    )
    optimizer = trainable.only(
        lambda chosen, scales: make_optimizer(chosen, config.optimizer, scales),
        trained,
        masks,
        scales,
    )
    model_state = jax.tree.map(
        lambda _: sharding.replicated(mesh), models.abstract_model_state(model)
    )
    stored = trainable.shardings(mesh, params, masks)
    shardings = TrainState(
        sharding.replicated(mesh),
        stored,
        sharding.optimizer_shardings(mesh, optimizer, trained),
        model_state,
        sharding.stored_shardings(mesh, heads),
        stored if config.train.ema else {},
    )
    return CompiledSteps(config, model, objective, mesh, optimizer, shardings, teacher, scales)


def transfer_multipliers(config: Config, trained):
    if not (config.optimizer.base_width or config.optimizer.base_depth):
        return None
    base = models.LanguageModel(base_config(config.model, config.optimizer))
    heads = make_objective(config.train, base).abstract_heads()
    return multipliers(
        trained, {**models.abstract_params(base), **heads}, config.model, config.optimizer
    )
