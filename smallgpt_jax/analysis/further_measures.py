"""Further measures of a record's runs beside the loss, and verdicts on those that are tested."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.contest import compare_pairs, draw_losses
from smallgpt_jax.analysis.findings import Measure, Pair, Spread
from smallgpt_jax.analysis.record import Run

# Fields of a diagnosis: of the activations after a block, of a block's attention, of the whole model.
_ACTIVATIONS = ("token_similarity", "neighbour_similarity", "effective_rank")
_ATTENTION = ("entropy", "first_weight")
_WHOLE_MODEL = (
    "loss_of_repeats",
    "loss_of_others",
    "in_context_score",
    "least_important_block",
    "most_important_block",
)
Values = dict[str, dict[int, float]]  # of a measure: {name: {seed: value}}


def find_measures(
    runs: Sequence[Run], reference: str, pair_level: float | None
) -> tuple[Measure, ...]:
    """Returns the measures of finished runs; those of _TESTED with verdicts against the name
    `reference`. `pair_level`: see `Evidence.pair_level`.
    """
    finished = [run for run in runs if run.is_finished and not run.diverged]
    measures = []
    for kind, measure_of in _MEASURES:
        for measure, values in _by_measure(finished, measure_of).items():
            spread_of = {name: Spread.of([*by_seed.values()]) for name, by_seed in values.items()}
            pairs = _compare(values, reference, pair_level) if kind in _TESTED else ()
            measures.append(Measure(kind, measure, spread_of, pairs))
    return tuple(measures)


def _compare(values: Values, reference: str, pair_level: float | None) -> tuple[Pair, ...]:
    """Returns the verdicts on a measure, each name against the reference. "lower" means a lower
    value, whether or not that is better.
    """
    names = [name for name in values if name != reference]
    if reference not in values or not names:
        return ()
    by_name_and_seed = spreads.matrix([values[reference], *(values[name] for name in names)])
    estimate = spreads.estimate_alone(by_name_and_seed)
    pairs = compare_pairs((reference, *names), estimate, draw_losses(estimate), pair_level)
    return tuple(pair for pair in pairs if pair.other == reference)


def _by_measure(
    runs: Sequence[Run], measure_of: Callable[[Run], Mapping[str, float | None]]
) -> dict[str, Values]:
    """Returns {measure: {name: {seed: value}}} without missing values."""
    values: dict[str, Values] = {}
    for run in runs:
        for measure, value in measure_of(run).items():
            if value is not None:
                values.setdefault(measure, {}).setdefault(run.name, {})[run.seed] = value
    return values


def _text_losses(run: Run) -> dict[str, float]:
    """Returns {"own × 2": bits per byte}, × 2: at twice the context length of training."""
    trained = run.config["model.context_length"]
    return {
        f"{row.text} × {row.context_length / trained:g}": row.bits_per_byte for row in run.texts
    }


def _speed(run: Run) -> dict[str, float | None]:
    seconds = run.last.seconds if run.last else None
    return {"tokens_per_second": run.tokens_per_second, "seconds": seconds}


def _inside(run: Run) -> dict[str, float | None]:
    """Returns one number per measure of the run's diagnosis (`Run.inside`); {} without one."""
    diagnosis = run.inside
    if diagnosis is None or not diagnosis.blocks:
        return {}
    # All blocks write to one stream of activations: after the last one, it has what all have done.
    values = {field: getattr(diagnosis.blocks[-1], field) for field in _ACTIVATIONS}
    # Each block has its own attention. None: a block without attention.
    for field in _ATTENTION:
        of_blocks = [getattr(block, field) for block in diagnosis.blocks]
        known = [value for value in of_blocks if value is not None]
        values[field] = statistics.fmean(known) if known else None
    return values | {field: getattr(diagnosis, field) for field in _WHOLE_MODEL}


def _inference(run: Run) -> dict[str, float | None]:
    """Returns {measure: bytes or milliseconds} of decoding; {} if it was not measured."""
    inference = run.inference
    if inference is None:
        return {}
    values = {
        "weight_bytes": run.weight_bytes,
        "cache_bytes_per_token": inference.cache_bytes_per_token,
        "cache_bytes": inference.cache_bytes,
        "prefill_ms": inference.prefill_ms and inference.prefill_ms.median,
    }
    for row in inference.decoding:
        values[f"step_ms, batch {row.batch}, {row.cache} cache"] = row.step_ms.median
    return values


_TESTED = ("benchmark", "inside", "answers")  # kinds whose differences are tested
# (kind, run → {measure: value}), in the order of the report
_MEASURES = (
    ("answers", lambda run: run.last.answers if run.last else {}),
    ("text", _text_losses),
    ("benchmark", lambda run: run.benchmarks),
    ("inference", _inference),
    ("speed", _speed),
    ("memory", lambda run: {"memory_bytes": run.memory_bytes}),
    ("inside", _inside),
)
