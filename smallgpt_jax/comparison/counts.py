"""Counts of a config: parameters by component, FLOPs of training, bytes in decoding."""

import dataclasses
import functools

from smallgpt_jax import models
from smallgpt_jax.models.components import components
from smallgpt_jax.models.flops import train_cost, update_flops
from smallgpt_jax.objectives.future_tokens import future_terms
from smallgpt_jax.objectives.objective import Objective, Term, make_objective
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.optimizer import find_optimizer
from smallgpt_jax.run.config import Config


@dataclasses.dataclass(frozen=True)
class Counts:
    components: dict[str, int]  # number of parameters of each component
    active_parameters: int
    flops_per_token: float | None  # of training, without the optimizer; None if unknown
    optimizer_flops: int  # per update
    uncounted: float | None  # arithmetic besides products, per FLOP
    flops_problem: str  # why the FLOPs are unknown
    weight_bytes: int  # in decoding

    @property
    def parameters(self) -> int:
        return sum(self.components.values())

    def flops_per_step(self, config: Config) -> float | None:
        """Returns the FLOPs of a step, with padding and the optimizer; None if unknown."""
        if self.flops_per_token is None:
            return None
        return config.inputs_per_step * self.flops_per_token + self.optimizer_flops


def count(config: Config) -> Counts:
    """Returns the counts of a config. Heads for further tokens count as training, not as parameters."""
    model = models.LanguageModel(config.model)
    objective = make_objective(config.train, model, **future_terms(config.train, model))
    return _count_once(model, tuple(objective.terms.items()), config.optimizer.name)


@functools.cache
def _count_once(
    model: models.LanguageModel, terms: tuple[tuple[str, Term], ...], optimizer_name: str
) -> Counts:
    """Cached, because it traces the model. FLOPs do not depend on the optimizer's settings."""
    # Here, because whoever finds all counts in the cache folder does not need these imports.
    from smallgpt_jax.inference import layout

    trained = models.abstract_params(model) | Objective(terms=dict(terms)).abstract_heads()
    optimizer = find_optimizer(optimizer_name)(trained, OptimizerConfig(name=optimizer_name))
    cost = train_cost(model, dict(terms).values())
    return Counts(
        components=components(model),
        active_parameters=models.num_active_parameters(model),
        flops_per_token=cost.flops,
        optimizer_flops=update_flops(trained, optimizer),
        uncounted=cost.uncounted,
        flops_problem=cost.problem,
        weight_bytes=layout.num_bytes(layout.packed_shapes(model)),
    )
