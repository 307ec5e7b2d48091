"""A gate for searches: is a candidate better than a model of a record?

A search that asks often enough finds a lucky seed, or fits the validation rows. So the gate draws
the seeds, measures losses on rows that the record has not used, counts its questions in a ledger,
and answers each at a level that holds for all questions together (analysis/sequential.py).
"""

import dataclasses
import hashlib
import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis import sequential
from smallgpt_jax.analysis.record import Record, Run
from smallgpt_jax.comparison.counts import Counts
from smallgpt_jax.comparison.runs import RUNS_FOLDER
from smallgpt_jax.config.recipes import ConfigLike, load_config
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.custom_code import import_training_code
from smallgpt_jax.run.metrics import read_evaluations
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.verification.cached_counts import CachedCounts
from smallgpt_jax.verification.record_checks import config_of

LEDGER_FILE = "ledger.json"
BETTER, WORSE, UNDECIDED = "better", "worse", "not told"
STATUS = {BETTER: 0, WORSE: 1, UNDECIDED: 2}  # exit status of the command
LEVEL = 0.05  # of all questions together
MOST_SEEDS = 8
BUDGET_TOLERANCE = 0.01
# Losses of the candidate and of the reference with one seed.
TrainPair = Callable[[Config, Config, Path], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Question:
    number: int
    candidate: str  # digest of its config
    level: float
    differences: tuple[float, ...] = ()  # loss of the candidate − loss of the reference, by seed
    verdict: str = ""  # "" while seeds are being trained

    def __str__(self) -> str:
        seeds = f"{len(self.differences)} seeds"
        low, high = sequential.interval(self.differences, self.level)
        text = f"question {self.number} at level {self.level:.2g}, {seeds}"
        if math.isinf(low):  # too few seeds for an interval
            return f"{self.verdict}: {text}"
        return f"{self.verdict}: {text}: loss {low:+.4f} to {high:+.4f} nats"


@dataclasses.dataclass(frozen=True)
class Ledger:
    record_sha256: str
    reference: str
    secret: str  # from which all seeds follow; drawn once
    questions: tuple[Question, ...] = ()

    def with_question(self, question: Question) -> "Ledger":
        """Returns the ledger with the question in place of the one of its number, or added."""
        before, after = self.questions[: question.number - 1], self.questions[question.number :]
        return dataclasses.replace(self, questions=(*before, question, *after))

    def seed(self, question: Question, index: int) -> int:
        text = f"{self.secret} {question.number} {index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def ask_gate(
    candidate: ConfigLike,
    against: str | Path,
    output: str | Path,
    *,
    reference: str = "",
    most_seeds: int = MOST_SEEDS,
    train_pair: TrainPair | None = None,
) -> Question:
    """Returns whether a candidate, a recipe or its fields, has a lower loss than the run
    `reference` of the record `against`, by default the record's own reference.

    Trains both in the folder `output` with new seeds, until the difference is significant or
    `most_seeds` are trained. The ledger is in the same folder: use one folder for all questions of
    a search. A candidate that was asked before gets the same answer. Rerun the same call to resume.
    Raises UserError.
    """
    folder, path = as_path("--output", str(output)), as_path("--against", str(against))
    record = records.read(path)
    name = reference or record.reference
    base = config_of(_run_named(record, name), trust_custom_code=False)
    config = Config.of(load_config(candidate))
    import_training_code(config)
    config = comparable(config, base)
    train = train_pair or train_on_new_rows
    # The question is in the ledger before its first seed is trained, and each difference before the
    # next one: a search that kills what looks bad finds the same question, with the same seeds.
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / LOCK_FILE, wait=True):  # questions are asked one after another
        ledger = _open_ledger(folder, hashlib.sha256(path.read_bytes()).hexdigest(), name)
        ledger, question = _find_question(ledger, config)
        typed_json.write(ledger, folder / LEDGER_FILE)
        while not question.verdict:
            index = len(question.differences)
            # data.seed=-1: one seed for initial weights and order of batches
            seed = {"train": {"seed": ledger.seed(question, index)}, "data": {"seed": -1}}
            runs = folder / RUNS_FOLDER / f"question{question.number}-{index}"
            losses = train(config.replace(**seed), base.replace(**seed), runs)
            question = decide(question, losses[0] - losses[1], most_seeds)
            ledger = ledger.with_question(question)
            typed_json.write(ledger, folder / LEDGER_FILE)
    return question


def decide(question: Question, difference: float, most_seeds: int) -> Question:
    """Returns the question with one more seed, and with a verdict if the seeds are enough for one.
    `difference`: loss of the candidate − loss of the reference. The evidence is two-sided.
    """
    differences = (*question.differences, difference)
    verdict = ""
    if sequential.evidence(differences) >= 1 / question.level:
        verdict = BETTER if math.fsum(differences) < 0 else WORSE
    elif len(differences) >= most_seeds:
        verdict = UNDECIDED
    return dataclasses.replace(question, differences=differences, verdict=verdict)


def comparable(candidate: Config, base: Config) -> Config:
    """Returns the candidate with the text and the evaluations of the reference `base`. Raises
    UserError if it takes more FLOPs, or could not be evaluated on the same rows, or if there are no
    validation rows that the record has not used.
    """
    fields, wanted = candidate.flat(), base.flat()
    for name in ("model.context_length", "train.objective"):
        if fields[name] != wanted[name]:
            raise UserError(
                f"config.{name}={fields[name]!r}: must be {wanted[name]!r}, as of the reference, "
                "because losses are compared on the same rows"
            )
    rows = base.train.eval_steps * base.train.batch_size
    eval_steps, rest = divmod(rows, candidate.train.batch_size)
    if rest:
        raise UserError(
            f"config.train.batch_size={candidate.train.batch_size}: must divide the {rows} rows on "
            "which the reference is evaluated"
        )
    # Losses on other rows, or after steps that a trunk has computed, could not be compared.
    train = {"eval_steps": eval_steps, "kept_steps": (), "trunk": "", "tracker": ""}
    candidate = candidate.replace(data=dataclasses.asdict(base.data), train=train)
    count = CachedCounts()
    flops, allowed = (_flops(config, count(config)) for config in (candidate, base))
    if flops > (1 + BUDGET_TOLERANCE) * allowed:
        raise UserError(
            f"--config: the candidate takes {flops:.4g} FLOPs, the reference {allowed:.4g}; reduce "
            "config.train.steps"
        )
    if not base.train.eval_steps:
        raise UserError(
            "--against: the record was evaluated on all validation rows, so there are no others; "
            "compare with a record that sets config.train.eval_steps"
        )
    return candidate


def _flops(config: Config, counts: Counts) -> float:
    per_step = counts.flops_per_step(config)
    if per_step is None:
        raise UserError("--config: its FLOPs cannot be counted, so its budget cannot be compared")
    return config.train.steps * per_step


def _run_named(record: Record, name: str) -> Run:
    for run in record.runs:
        if run.name == name and run.horizon == 1:
            return run
    names = ", ".join(dict.fromkeys(run.name for run in record.runs))
    raise UserError(f"--only={name}: no such run in the record; choose from {names}")


# ------------------------------------------------------------------ ledger
def _open_ledger(folder: Path, digest: str, reference: str) -> Ledger:
    """Returns the ledger of a search, or a new one. `digest` is that of the record."""
    path = folder / LEDGER_FILE
    if not path.exists():
        return Ledger(digest, reference, secrets.token_hex(16))
    advice = "restore it; without it, the level does not hold"
    ledger = typed_json.read(Ledger, path, advice)
    if (ledger.record_sha256, ledger.reference) != (digest, reference):
        raise UserError(
            f"{path}: belongs to another record or reference; use another --output, or the record "
            "with which the search began"
        )
    return ledger


def _find_question(ledger: Ledger, config: Config) -> tuple[Ledger, Question]:
    """Returns the ledger with the question about `config`, which may have been asked before."""
    # With any seed, it is the same candidate: the gate draws the seeds.
    fields = config.replace(train={"seed": 0}).flat()
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
    for question in ledger.questions:
        if question.candidate == digest:
            return ledger, question
    number = len(ledger.questions) + 1
    question = Question(number, digest, sequential.level_of_question(number, LEVEL))
    return ledger.with_question(question), question


# ------------------------------------------------------------------ losses
def train_on_new_rows(candidate: Config, base: Config, folder: Path) -> tuple[float, float]:
    """Returns the losses of candidate and base after their last step, on validation rows that
    follow those on which the record was evaluated.
    """
    # Here, because a question that was asked before needs no trainer.
    from smallgpt_jax.data.corpus import load_or_prepare
    from smallgpt_jax.training import trainer

    corpus = load_or_prepare(base.data)
    losses = []
    for name, config in (("candidate", candidate), ("reference", base)):
        workdir = folder / name
        config = config.replace(train={"keep_checkpoints": 1})
        trainer.train_and_evaluate(config, str(workdir), corpus)
        # On the rows of the record and as many further ones. The run is finished, so it is only
        # evaluated.
        more = config.replace(train={"eval_steps": 2 * config.train.eval_steps})
        trainer.train_and_evaluate(more, str(workdir), corpus)
        losses.append(loss_of_new_rows(workdir, config.train.steps))
    return losses[0], losses[1]


def loss_of_new_rows(workdir: Path, step: int) -> float:
    """Returns the mean loss over the rows that only the larger evaluation after `step` has."""
    sums = {  # {number of targets: sum of their losses}
        line["targets"]: line["loss"] * line["targets"]
        for line in read_evaluations(workdir)
        if line["step"] == step and line["loss"] is not None
    }
    if len(sums) < 2:
        raise UserError(
            f"{workdir}: the validation split has no rows beyond those of the record; use a larger "
            "config.data.validation_fraction in the record"
        )
    # The larger evaluation begins with the rows of the smaller one.
    few, many = min(sums), max(sums)
    return (sums[many] - sums[few]) / (many - few)
