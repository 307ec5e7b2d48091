"""Builds the program of a config, or finds a recent one."""

import dataclasses
import functools

import jax
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.devices import sharding
from smallgpt_jax.objectives.future_tokens import find_future_head, future_terms
from smallgpt_jax.objectives.objective import Objective, find_objective, make_objective
from smallgpt_jax.objectives.teacher import Teacher, open_teacher
from smallgpt_jax.optim import trainable
from smallgpt_jax.optim.mup import base_config, multipliers
from smallgpt_jax.optim.optimizer import find_optimizer, make_optimizer
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.checks import check_config
from smallgpt_jax.training.program import Program


def build_program(config: ConfigDict | Config, devices=None) -> Program:
    """Returns a new program. Raises UserError for an invalid config."""
    return _build(*_checked(config, devices))


def shared_program(config: ConfigDict | Config, devices=None) -> Program:
    """Returns a recent program whose config has an equal compiled part, or a new one."""
    return RECENT_PROGRAMS.get(*_checked(config, devices))


def _checked(config: ConfigDict | Config, devices) -> tuple[Config, jax.sharding.Mesh]:
    """Returns what a program depends on: the compiled part of the config, and the mesh."""
    config = Config.of(config)
    if not config.train.microbatches:
        # Training and `plan` replace 0 by the number that fits; other estimates assume one.
        config = config.replace(train={"microbatches": 1})
    mesh = sharding.make_mesh(config.mesh, devices)
    check_config(config, mesh)
    return config.compiled_part(), mesh


@dataclasses.dataclass
class RecentPrograms:
    """The programs that this process used last, for further runs."""

    limit: int
    programs: dict[tuple, Program] = dataclasses.field(default_factory=dict)  # the newest is last

    def get(self, config: Config, mesh: jax.sharding.Mesh) -> Program:
        if config.train.teacher:  # its newest checkpoint may change
            return _build(config, mesh)
        # The functions and classes distinguish those that use the same name, one after the other.
        key = (
            config,
            mesh,
            find_objective(config.train.objective),
            find_future_head(config.train.future_head) if config.train.future_tokens else None,
            find_optimizer(config.optimizer.name),
            *models.named_parts(config.model),
        )
        self.programs[key] = self.programs.pop(key, None) or _build(config, mesh)
        while len(self.programs) > self.limit:
            oldest = next(iter(self.programs))
            del self.programs[oldest]
        return self.programs[key]


RECENT_PROGRAMS = RecentPrograms(limit=4)


def _build(config: Config, mesh: jax.sharding.Mesh) -> Program:
    model = models.LanguageModel(config.model)
    teacher = open_teacher(config.train, model, mesh)
    objective = _make_objective(config, model, teacher)
    models.require_factors(model)
    params = models.abstract_params(model)
    if config.optimizer.lora_rank:
        objective = _with_adapters(objective, params, config)
    heads = objective.abstract_heads()
    if taken := params.keys() & heads.keys():
        raise ValueError(
            f"terms have the names of parameters: {', '.join(taken)}; rename the terms"
        )
    trained = {**params, **heads}
    # Which entries of each parameter are trained; None: all
    masks = trainable.make_masks(params, heads, config.optimizer)
    # Trained parameters → weights of the model: frozen entries without gradient, LoRA merged
    weights = functools.partial(
        trainable.weights_to_apply, masks=masks, params=params, config=config.optimizer
    )
    objective = dataclasses.replace(objective, weights=weights)
    scales = transfer_multipliers(config, trained)

    def make_for(selected, scales):
        return make_optimizer(selected, config.optimizer, scales)

    optimizer = trainable.only(make_for, trained, masks, scales)
    replicated = sharding.replicated(mesh)
    stored = trainable.shardings(mesh, params, masks)
    shardings = TrainState(
        step=replicated,
        params=stored,
        opt_state=sharding.optimizer_shardings(mesh, optimizer, trained),
        model_state=jax.tree.map(lambda _: replicated, models.abstract_model_state(model)),
        heads=sharding.stored_shardings(mesh, heads),
        ema=stored if config.train.ema else {},
    )
    return Program(config, mesh, model, objective, optimizer, shardings, teacher, scales)


def _make_objective(
    config: Config, model: models.LanguageModel, teacher: Teacher | None
) -> Objective:
    terms = future_terms(config.train, model)
    if teacher:
        terms = {**terms, "feature_distance": teacher}
    objective = make_objective(config.train, model, **terms)
    # Of prompts with answers, only the answers are in the loss.
    if config.data.format != "text":
        objective = dataclasses.replace(objective, examples=objective.tuning_examples)
    return objective


def _with_adapters(objective: Objective, params, config: Config) -> Objective:
    if others := objective.abstract_heads():
        config.optimizer.refuse(
            "lora_rank",
            f"cannot be combined with the objective's {', '.join(others)}, which "
            "has parameters of its own; set it to 0",
        )
    adapters = functools.partial(trainable.init_adapters, params, config.optimizer)
    return dataclasses.replace(objective, adapters=adapters)


def transfer_multipliers(config: Config, trained):
    """Returns a tree of `mup.Multipliers`, or None if all are 1."""
    if not (config.optimizer.base_width or config.optimizer.base_depth):
        return None
    base = models.LanguageModel(base_config(config.model, config.optimizer))
    heads = make_objective(config.train, base).abstract_heads()
    return multipliers(
        trained, {**models.abstract_params(base), **heads}, config.model, config.optimizer
    )
