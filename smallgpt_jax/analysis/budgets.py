"""The costs that a budget can limit: of training, and of the trained model."""

import dataclasses
from collections.abc import Callable

from smallgpt_jax.analysis.record import Run

DECODING_BATCHES = (1, 32)  # batch sizes at which `compare` measures decoding
BATCH_BUDGETS = ("decode_ms", "memory")  # that depend on the batch size of decoding


@dataclasses.dataclass(frozen=True)
class Budget:
    cost: Callable[[Run, int], float | None]  # of a run, by the batch size; None if not measured
    is_training: bool = False


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


BUDGETS: dict[str, Budget] = {
    "flops": Budget(lambda run, batch: run.last and run.last.flops, is_training=True),
    "seconds": Budget(lambda run, batch: run.last and run.last.seconds, is_training=True),
    "parameters": Budget(lambda run, batch: run.parameters),
    "bytes": Budget(lambda run, batch: run.weight_bytes),
    "decode_ms": Budget(_decoding_ms),
    "memory": Budget(_decoding_bytes),
    "training_memory": Budget(lambda run, batch: run.memory_bytes),
}
