"""The costs that a budget can limit, of runs in results.json: training, size, latency, memory."""

import dataclasses
import shlex
from collections.abc import Callable

from smallgpt_jax.errors import command_line


@dataclasses.dataclass(frozen=True)
class Budget:
    label: str
    cost: Callable[[dict], float | None]  # of a run in results.json; None if it was not measured
    is_training: bool
    advice: str  # how to measure a missing cost


def budgets(batch: int = 1, comparison: str = "") -> dict[str, Budget]:
    """`batch` is the batch size of decoding; `comparison` is the command that made the records, if
    known.
    """
    again = rerun(comparison) or "rerun the command of the comparison"
    measure = (
        rerun(comparison, "--config.compare.decoding=true")
        or "rerun compare with config.compare.decoding=true"
    )
    return {
        "flops": Budget(
            "training FLOPs",
            lambda run: run["curve"][-1]["flops"],
            True,
            "they cannot be counted; ask for --seconds",
        ),
        "seconds": Budget(
            "seconds of training on the machine of the records",
            lambda run: run["curve"][-1]["seconds"],
            True,
            "train again with a smaller config.train.log_every",
        ),
        "parameters": Budget("parameters", lambda run: run["parameters"], False, ""),
        "bytes": Budget(
            "bytes of weights in decoding", lambda run: run.get("weight_bytes"), False, again
        ),
        "decode_ms": Budget(
            f"ms per decoding step at batch size {batch} with a full cache",
            lambda run: step_ms(run.get("inference"), batch),
            False,
            measure,
        ),
        "memory": Budget(
            f"bytes of weights and of a full cache at batch size {batch}",
            lambda run: inference_bytes(run, batch),
            False,
            measure,
        ),
        "training_memory": Budget(
            "bytes of memory per device in training",
            lambda run: run.get("memory_bytes"),
            False,
            "they are logged when a run starts; train again",
        ),
    }


def step_quartiles(inference: dict | None, batch: int, cache: str) -> dict[str, float] | None:
    """Returns the milliseconds of a decoding step, if they were measured with this batch size and
    cache.
    """
    rows = inference["decoding"] if inference else []
    return next(
        (row["step_ms"] for row in rows if (row["batch"], row["cache"]) == (batch, cache)), None
    )


def step_ms(inference: dict | None, batch: int) -> float | None:
    """Returns the median milliseconds of a decoding step with a full cache, if it was measured."""
    found = step_quartiles(inference, batch, "full")
    return found and found["median"]


def inference_bytes(run: dict, batch: int) -> int | None:
    """Returns the bytes of the weights and of the full caches of `batch` texts, if they are
    known.
    """
    if not run.get("weight_bytes") or not run.get("inference"):
        return None
    return run["weight_bytes"] + batch * run["inference"]["cache_bytes"]


def rerun(comparison: str, *flags: str, without: tuple[str, ...] = ()) -> str:
    """Returns the command of a comparison with further flags, or "" if it is unknown or trains no
    runs.

    `without` are the names of flags to leave out.
    """
    try:
        words = shlex.split(comparison)
    except ValueError:  # an open quote
        words = []
    if words[1:3] != ["-m", "smallgpt_jax.compare"] or not any(
        word.startswith("--config") for word in words
    ):
        return ""
    given = {*without, *(flag.partition("=")[0] for flag in flags)}
    return command_line(
        "compare", *(word for word in words[3:] if word.partition("=")[0] not in given), *flags
    )


BUDGETS = budgets()
DECODING_BATCHES = (1, 32)  # batch sizes at which `compare` measures decoding
BATCH_BUDGETS = ("decode_ms", "memory")  # that depend on the batch size
