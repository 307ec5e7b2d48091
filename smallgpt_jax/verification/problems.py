"""What speaks against a record."""

import dataclasses

from smallgpt_jax.analysis.record import Run

# Kinds of problems. A contradiction is impossible in a record that a comparison has written; a
# suspicion is unlikely there; what is unknown could not be checked.
CONTRADICTION, SUSPICION, UNKNOWN = "contradiction", "suspicion", "unknown"


@dataclasses.dataclass(frozen=True)
class Problem:
    kind: str
    check: str  # name of the check
    run: str  # label of the run, its name or its model; "" for the whole record
    text: str

    def __str__(self) -> str:
        where = f"{self.run}: " if self.run else ""
        return f"{self.kind}: {where}{self.text}"


def label_of(run: Run) -> str:
    return f"{run.label}, seed {run.seed}"


def contradiction(check: str, run: Run | None, text: str) -> Problem:
    """Returns a contradiction in a run or, without `run`, in the whole record."""
    return Problem(CONTRADICTION, check, label_of(run) if run else "", text)
