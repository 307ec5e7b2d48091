"""Records of models whose true losses are known, to check decisions against."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from smallgpt_jax.analysis.record import Point, Record, Run

DEVIATION = 0.02  # nats, over seeds
KINDS = (
    "normal",  # all models have one deviation
    "20× spreads",  # deviations between DEVIATION and 20 times that
    "t3",  # heavy tails: Student's t with 3 degrees of freedom
    "bimodal",  # each run learns to copy with the probability COPIES, which lowers its loss
    "unequal seeds",  # each model has between two and all seeds
    "unequal grids",  # each model has between two and all of the sizes
    "1.3× FLOPs",  # every second model costs 1.3 times as many FLOPs per token
)
COPIES, COPYING = 1 / 3, 0.3  # nats
PARAMETERS = (1e5, 2.2e5, 4.8e5, 1.06e6, 2.3e6)  # of the sizes
TOKENS_PER_PARAMETER = 20
SHARED = 0.7  # share of the variance that the lengths of a run have in common
CONTEXT = 256


def loss_of(parameters: float, tokens: float) -> float:
    """Returns the true loss of a model that is neither better nor worse than others."""
    return 1.5 + 8 * parameters**-0.14 + 8 * tokens**-0.12


@dataclasses.dataclass(frozen=True)
class Model:
    """A made-up model, which needs 1 / `gain` of the tokens of others for the same loss."""

    name: str
    gain: float
    deviation: float
    cost: float  # FLOPs per token, in those of others
    sizes: tuple[int, ...]  # indices into PARAMETERS
    seeds: tuple[int, ...]
    copies: float  # probability that a run learns to copy

    def loss(self, size: int, flops: float) -> float:
        """Returns the true loss at a size, the mean over all seeds."""
        tokens = flops / (6 * PARAMETERS[size])  # at equal FLOPs: `cost` is in the FLOPs
        return loss_of(PARAMETERS[size], tokens * self.gain) - self.copies * COPYING


@dataclasses.dataclass(frozen=True)
class Design:
    kind: str
    models: int
    seeds: int
    sizes: int = 2
    lengths: tuple[float, ...] = (0.5, 1.0)  # of the longest


def draw_models(design: Design, spread: float, rng: np.random.Generator) -> list[Model]:
    """Returns models whose losses at equal FLOPs vary with the deviation `spread`, in nats."""
    # A loss falls by about 0.2 nats per e-fold of tokens.
    gains = np.exp(rng.standard_normal(design.models) * spread / 0.2)
    models = []
    for number in range(design.models):
        is_wide, is_dear = design.kind == "20× spreads", design.kind == "1.3× FLOPs"
        sizes, seeds = range(design.sizes), range(design.seeds)
        if design.kind == "unequal grids":
            count = rng.integers(2, design.sizes + 1) if number else design.sizes
            sizes = sorted(rng.choice(design.sizes, size=count, replace=False).tolist())
        if design.kind == "unequal seeds" and number:
            seeds = range(int(rng.integers(2, design.seeds + 1)))
        models.append(
            Model(
                name=f"m{number}",
                gain=float(gains[number]),
                deviation=DEVIATION * (20 ** rng.random() if is_wide else 1),
                cost=1.3 if is_dear and number % 2 else 1.0,
                sizes=tuple(sizes),
                seeds=tuple(seeds),
                copies=COPIES if design.kind == "bimodal" else 0.0,
            )
        )
    return models


def make_record(
    design: Design, models: Sequence[Model], correlation: float, rng: np.random.Generator
) -> Record:
    """Returns what training the models may give. `correlation` is that of the noise of two models
    with the same order of batches.
    """
    runs = []
    for size in range(design.sizes):
        orders = [_noise(design, rng) for _ in range(design.seeds)]
        for model in models:
            if size in model.sizes:
                for seed in model.seeds:
                    own = _noise(design, rng)
                    noise = math.sqrt(correlation) * orders[seed]
                    noise = model.deviation * (noise + math.sqrt(1 - correlation) * own)
                    noise += COPYING * (model.copies - (rng.random() < model.copies))
                    runs += _runs(design, model, size, seed, noise)
    return Record("made up", "", "", f"{models[0].name}@{0}", tuple(runs))


def _noise(design: Design, rng: np.random.Generator) -> np.ndarray:
    """Returns the noise of the lengths of a run, with the variance 1."""

    def draw(shape=()):
        return (
            rng.standard_t(3, shape) / math.sqrt(3)
            if design.kind == "t3"
            else rng.normal(size=shape)
        )

    lengths = len(design.lengths)
    return math.sqrt(SHARED) * draw() + math.sqrt(1 - SHARED) * draw(lengths)


def _runs(design: Design, model: Model, size: int, seed: int, noise: np.ndarray) -> list[Run]:
    runs = []
    parameters = round(PARAMETERS[size])
    for length, extra in zip(design.lengths, noise):
        steps = round(TOKENS_PER_PARAMETER * PARAMETERS[size] * length / CONTEXT)
        tokens = steps * CONTEXT
        flops = 6 * parameters * tokens * model.cost
        loss = model.loss(size, flops) + float(extra)
        runs.append(
            Run(
                name=f"{model.name}@{size}",
                workdir="",
                seed=seed,
                config={
                    "train.steps": steps,
                    "model.context_length": CONTEXT,
                    "model.name": model.name,
                },
                text=None,
                is_finished=True,
                diverged=False,
                is_imported=False,
                steps_done=steps,
                parameters=parameters,
                active_parameters=parameters,
                components={},
                flops_per_token=6.0 * parameters * model.cost,
                tokens_per_step=CONTEXT,
                curve=(Point(steps, tokens, flops, None, loss, None, 1000),),
                tokens_per_second=None,
                memory_bytes=None,
                sessions=(),
                expert_load=None,
                texts=(),
                benchmarks={},
                horizon=length / max(design.lengths),
            )
        )
    return runs


def best_at(models: Sequence[Model], budget: float, sizes: Sequence[int]) -> np.ndarray:
    """Returns the true loss of each model at a budget, at the best of the sizes that are trained
    with about this budget by anyone.
    """
    near = [size for size in sizes if 0.2 * _longest(size) < budget < 1.7 * _longest(size)] or [
        min(sizes, key=lambda size: abs(math.log(_longest(size) / budget)))
    ]
    return np.array([min(model.loss(size, budget) for size in near) for model in models])


def _longest(size: int) -> float:
    """Returns the FLOPs of the longest training of a size."""
    return 6 * TOKENS_PER_PARAMETER * PARAMETERS[size] ** 2
