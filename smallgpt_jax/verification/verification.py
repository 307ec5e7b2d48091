"""Checks a record: what it says without training, and some of its runs by training them again.

verification = verify("results.json", "runs/check", Sample(size=2))
print(verification)
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import Record, Run
from smallgpt_jax.comparison.runs import RUNS_FOLDER
from smallgpt_jax.devices.platform import processor_identity
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.provenance import package_versions
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import NUMBER, TEXT, read_json_or_none
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.verification import bundle
from smallgpt_jax.verification.bands import BAND, BITS, NO_BAND, OUTSIDE, SEED, ComparedLoss
from smallgpt_jax.verification.cached_counts import CachedCounts
from smallgpt_jax.verification.problems import CONTRADICTION, Problem, label_of
from smallgpt_jax.verification.record_checks import check_record, config_of
from smallgpt_jax.verification.sample import Sample, chance_to_pass

VERIFICATION_FILE = "verification.json"
FORMAT = 1
REPRODUCED, NOT_REPRODUCED, CANNOT_TELL = "reproduced", "not reproduced", "cannot tell"
STATUS = {REPRODUCED: 0, NOT_REPRODUCED: 1, CANNOT_TELL: 2}
HOW = {
    BITS: "bit for bit",
    BAND: "within what rounding changes here",
    SEED: "as a seed: rounding changes it as much as another seed does",
}
SHOWN_PROBLEMS = 20


@dataclasses.dataclass(frozen=True)
class RunVerdict:
    run: str
    verdict: str
    text: str
    steps: int  # that were to be trained again
    of: int  # steps of the run
    machine: str  # how this machine differs from that of the record; "": in nothing recorded
    comparisons: tuple[ComparedLoss, ...] = ()

    @property
    def is_same_run(self) -> bool:
        """Whether the run itself was reproduced: not only as well as by another seed."""
        return self.verdict == REPRODUCED and all(loss.how != SEED for loss in self.comparisons)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.run}, {self.steps:,} of {self.of:,} steps: {self.text}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was checked of a record, and the verdict; print() shows it."""

    record_sha256: str
    sample: Sample
    drawn: tuple[str, ...]
    runs: int  # of the record that may be drawn
    problems: tuple[Problem, ...]
    verdicts: tuple[RunVerdict, ...]

    @property
    def verdict(self) -> str:
        """REPRODUCED, NOT_REPRODUCED or CANNOT_TELL."""
        # A contradiction outweighs all else, and no reproduced run outweighs one in doubt.
        verdicts = [run.verdict for run in self.verdicts]
        kinds = [problem.kind for problem in self.problems]
        if CONTRADICTION in kinds or NOT_REPRODUCED in verdicts:
            return NOT_REPRODUCED
        is_complete = bool(verdicts) and len(verdicts) == len(self.drawn)
        if not is_complete or CANNOT_TELL in verdicts or self._unresolved_problems():
            return CANNOT_TELL
        return REPRODUCED

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return STATUS[self.verdict]

    def _unresolved_problems(self) -> list[Problem]:
        """Returns the problems that training the run again has not refuted."""
        # A curve that was copied from another seed also passes as a seed: that refutes nothing.
        resolved = {run.run for run in self.verdicts if run.is_same_run}
        return [problem for problem in self.problems if problem.run not in resolved]

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            lines.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more problems")
        if not self.problems:
            lines.append("checks without training: no problem")
        lines += [str(run) for run in self.verdicts]
        lines.append(f"{self.verdict}: {self._summary()}")
        return "\n".join(lines)

    def _summary(self) -> str:
        """Says how probably the sample would have missed a record with a tenth of wrong runs."""
        if not self.drawn:
            return "no run was trained again; set --sample"
        trained = sum(bool(run.comparisons) for run in self.verdicts)
        wrong = max(1, self.runs // 10)
        chance = chance_to_pass(self.runs, wrong, trained)
        return (
            f"{trained} of {self.runs} runs were trained again, drawn with "
            f"--nonce={self.sample.nonce}; if {wrong} of the {self.runs} were wrong, the draw would "
            f"have missed them with a probability of {chance:.0%}"
        )

    def content(self) -> dict[str, Any]:
        """Returns verification.json."""
        return {
            "format": FORMAT,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "verdict": self.verdict,
            "record_sha256": self.record_sha256,
            "nonce": self.sample.nonce,
            "fraction": self.sample.fraction,
            "names": self.sample.names,
            "drawn": list(self.drawn),
            "runs": self.runs,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "verdicts": [dataclasses.asdict(run) for run in self.verdicts],
            "versions": package_versions(),
            "processor": processor_identity(),
        }


def verify(
    results: str | Path,
    output: str | Path,
    sample: Sample | None = None,
    *,
    trust_custom_code: bool = False,
) -> Verification:
    """Checks a results.json, or a bundle that contains one, and trains a sample of its runs again
    in the folder `output`; writes verification.json there.

    Rerun the same call to resume. `trust_custom_code` allows the record to name modules, which are
    then imported. Raises UserError, also if the file is no record.
    """
    path, folder = as_path("--verify", str(results)), as_path("--output", str(output))
    if path.is_dir():
        path = bundle.open_bundle(path, trust_custom_code)
    record = records.read(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    count = CachedCounts()
    problems = check_record(record, count, trust_custom_code)
    count.save()
    sample = _with_nonce(sample or Sample(), folder, digest)
    drawn = sample.draw(record.runs, digest, [problem.run for problem in problems])
    verification = Verification(
        record_sha256=digest,
        sample=sample,
        drawn=tuple(map(label_of, drawn)),
        runs=len(sample.candidates(record.runs)),
        problems=tuple(problems),
        verdicts=(),  # a resumed call compares finished trainings again, but trains none twice
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(verification, folder)
    except OSError as error:
        raise UserError(f"--output={folder}: {error.strerror}; choose another folder") from None
    for number, run in enumerate(drawn, 1):
        print(f"\n[{number}/{len(drawn)}] {label_of(run)}", flush=True)
        verdict = _verify_run(run, record, folder, sample.fraction, trust_custom_code)
        print(verdict, flush=True)
        verification = dataclasses.replace(verification, verdicts=(*verification.verdicts, verdict))
        # After each run: the training of some takes hours, and may be interrupted.
        _write(verification, folder)
    return verification


def _write(verification: Verification, folder: Path) -> None:
    text = json.dumps(verification.content(), indent=1) + "\n"
    write_atomically(folder / VERIFICATION_FILE, text)


def _with_nonce(sample: Sample, folder: Path, digest: str) -> Sample:
    """Returns the sample with the nonce of an earlier call for this record, or with a new one."""
    schema = {"record_sha256": TEXT, "nonce": TEXT, "fraction": NUMBER, "names": TEXT}
    before = read_json_or_none(folder / VERIFICATION_FILE, schema)
    if before and before["record_sha256"] == digest and not sample.nonce:
        return dataclasses.replace(sample, nonce=before["nonce"])
    return sample.with_nonce()


# ------------------------------------------------------------------ one run
def _verify_run(
    run: Run, record: Record, folder: Path, fraction: float, trust_custom_code: bool
) -> RunVerdict:
    """Returns whether the first `fraction` of the run's steps, trained here, has its losses."""
    # Here, because checks without training need no data pipeline and no trainer.
    from smallgpt_jax.verification import retraining

    steps = retraining.steps_to_train(run, fraction)
    machine = retraining.machine_differences(run)
    comparisons = []
    try:
        config = retraining.retrained_config(_usable_config(run, trust_custom_code), steps)
        corpus = retraining.open_text(config, run)
        name = f"{safe_name(run.name)}-seed{run.seed}-{run.horizon:g}-{steps}"
        workdir = folder / RUNS_FOLDER / name
        comparisons = retraining.compare_run(
            run, record, config, workdir, corpus, trust_custom_code
        )
        kind, text = judge(comparisons)
    except UserError as error:
        kind, text = CANNOT_TELL, str(error)
    return RunVerdict(label_of(run), kind, text, steps, run.steps, machine, tuple(comparisons))


def _usable_config(run: Run, trust_custom_code: bool) -> Config:
    try:
        return config_of(run, trust_custom_code)
    except UserError:  # is already among the problems of the record
        raise UserError("its config cannot be used here") from None


def judge(comparisons: Sequence[ComparedLoss]) -> tuple[str, str]:
    """Returns the verdict on a run (REPRODUCED, …) and the reason."""
    for comparison in comparisons:
        if comparison.how == OUTSIDE:
            off = comparison.recorded - comparison.trained
            return NOT_REPRODUCED, (
                f"from step {comparison.step:,} on: recorded {comparison.recorded:.6f}, here "
                f"{comparison.trained:.6f} ({off:+.2g}), where rounding explains "
                f"{comparison.allowed:.2g}"
            )
    hows = {comparison.how for comparison in comparisons}
    if not hows:
        return CANNOT_TELL, "no evaluation of the record was reached"
    if NO_BAND in hows:
        return CANNOT_TELL, "the losses differ, and what rounding changes was not measured"
    if hows == {BITS}:
        return REPRODUCED, f"{HOW[BITS]} ({len(comparisons)} evaluations)"
    how = SEED if SEED in hows else BAND  # the weakest agreement of any evaluation counts
    last = comparisons[-1]
    return REPRODUCED, (
        f"{HOW[how]} (recorded {last.recorded:.6f}, here {last.trained:.6f}, "
        f"± {last.allowed or 0:.2g})"
    )
