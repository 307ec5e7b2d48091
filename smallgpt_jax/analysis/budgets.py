"""The kinds of budget, and what a run costs of each."""

from collections.abc import Callable

from smallgpt_jax.analysis.record import Run

DECODING_BATCHES = (1, 32)  # batch sizes at which `compare` measures decoding
BATCH_BUDGETS = ("decode_ms", "memory")  # that depend on the batch size of decoding


def _decoding_ms(run: Run, batch: int) -> float | None:
    """Returns the median milliseconds of a decoding step with a full cache."""
    for row in run.inference.decoding if run.inference else ():
        if (row.batch, row.cache) == (batch, "full"):
            return row.step_ms.median
    return None


def _decoding_bytes(run: Run, batch: int) -> int | None:
    """Returns the bytes of the weights and of the full caches of `batch` texts."""
    if not run.weight_bytes or not run.inference:
        return None
    return run.weight_bytes + batch * run.inference.cache_bytes


# {kind of budget: cost of a run, by the batch size of decoding; None if it was not measured}
BUDGETS: dict[str, Callable[[Run, int], float | None]] = {
    "flops": lambda run, batch: run.last and run.last.flops,
    "seconds": lambda run, batch: run.last and run.last.seconds,
    "parameters": lambda run, batch: run.parameters,
    "bytes": lambda run, batch: run.weight_bytes,
    "decode_ms": _decoding_ms,
    "memory": _decoding_bytes,
    "training_memory": lambda run, batch: run.memory_bytes,
}
TRAINING_BUDGETS = ("flops", "seconds")  # that grow with the length of training
