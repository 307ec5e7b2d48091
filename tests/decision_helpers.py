"""Records of made-up runs with literal losses, for tests of decisions."""

import math
from collections.abc import Iterable, Mapping

from smallgpt_jax.analysis.candidates import Evidence, evidence_of
from smallgpt_jax.analysis.record import Point, Record, Run

TOKENS_PER_STEP = 100


def runs(
    name: str,
    losses: Mapping[int, float] | Iterable[float],
    *,
    steps: int = 100,
    flops: float | None = None,
    parameters: int = 1000,
    horizon: float = 1.0,
    rate: float = 0.01,
    config: dict | None = None,
    **fields,
) -> list[Run]:
    """Returns finished runs; `losses` by seed, or of the seeds 0, 1, …; inf if a run has diverged.

    Without `flops`, they are 6 · parameters · tokens.
    """
    by_seed = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
    tokens = steps * TOKENS_PER_STEP
    flops = 6.0 * parameters * tokens if flops is None else flops
    made = []
    for seed, loss in by_seed.items():
        diverged = math.isinf(loss)
        point = Point(steps, tokens, flops, None, None if diverged else loss, None, 500)
        settings = {
            "train.steps": steps,
            "train.seed": seed,
            "optimizer.learning_rate": rate,
            "model.context_length": 32,
            "model.name": name.partition("@")[0],
            **(config or {}),
        }
        defaults = {
            "workdir": f"/elsewhere/{name}-seed{seed}",
            "text": None,
            "is_finished": not diverged,
            "is_imported": False,
            "steps_done": steps,
            "parameters": parameters,
            "active_parameters": parameters,
            "components": {},
            "flops_per_token": 6.0 * parameters,
            "tokens_per_step": float(TOKENS_PER_STEP),
            "tokens_per_second": None,
            "memory_bytes": None,
            "sessions": (),
            "expert_load": None,
            "texts": (),
            "benchmarks": {},
            "horizon": horizon,
        }
        settled = {"name": name, "seed": seed, "config": settings, "diverged": diverged}
        made.append(Run(**{**defaults, **settled, "curve": (point,), **fields}))
    return made


def record(*groups: list[Run], reference: str = "a") -> Record:
    return Record("made up", "", "", reference, tuple(run for group in groups for run in group))


def evidence(*groups: list[Run]) -> Evidence:
    return evidence_of(record(*groups))
