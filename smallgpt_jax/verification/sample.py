"""The runs of a record that are trained again.

They are drawn by a hash of the record and of a word that its author could not know, the nonce. A
record that is made to fit one draw is another record, with another draw.
"""

import dataclasses
import fnmatch
import hashlib
import math
import secrets
from collections.abc import Sequence

from smallgpt_jax.analysis.record import Run
from smallgpt_jax.errors import UserError
from smallgpt_jax.verification.problems import label_of


@dataclasses.dataclass(frozen=True)
class Sample:
    size: int = 3  # runs to train again; 0: none
    fraction: float = 0.1  # of the steps of each, at least up to its first evaluation
    names: str = "*"  # pattern of the names to draw from, such as *@45k
    nonce: str = ""  # "": a new one

    def __post_init__(self):
        if self.size < 0:
            raise UserError(f"--sample={self.size}: must be at least 0")
        if not 0 < self.fraction <= 1:
            raise UserError(f"--fraction={self.fraction:g}: must be above 0 and at most 1")

    def with_nonce(self) -> "Sample":
        return self if self.nonce else dataclasses.replace(self, nonce=secrets.token_hex(8))

    def candidates(self, runs: Sequence[Run]) -> list[Run]:
        """Returns the runs that may be drawn."""
        return [
            run
            for run in runs
            if run.is_finished and run.curve and fnmatch.fnmatchcase(run.name, self.names)
        ]

    def draw(self, runs: Sequence[Run], record_sha256: str, suspects: Sequence[str]) -> list[Run]:
        """Returns the drawn runs, first those of `suspects`: labels, names or models."""
        if not self.size:
            return []
        candidates = self.candidates(runs)
        if not candidates:
            raise UserError(f"--only={self.names}: the record has no finished run of such a name")

        # By hashes, and not by a random generator: a larger sample begins with the smaller one.
        def order(run: Run) -> tuple[bool, str]:
            text = f"{record_sha256} {self.nonce} {run.name} {run.seed} {run.horizon!r}"
            is_suspect = not {run.model, run.name, label_of(run)}.isdisjoint(suspects)
            return not is_suspect, hashlib.sha256(text.encode()).hexdigest()

        return sorted(candidates, key=order)[: self.size]


def chance_to_pass(runs: int, wrong: int, sampled: int) -> float:
    """Returns the probability that a sample contains none of the wrong runs."""
    if sampled > runs - wrong:
        return 0.0
    return math.comb(runs - wrong, sampled) / math.comb(runs, sampled)
