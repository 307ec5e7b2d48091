"""The record of a comparison, results.json: its runs, their learning-rate grids and predictions.

The dataclasses are the format: `read` checks a file against their types, `write` stores their
fields. docs/comparison.md documents the fields. A change of meaning increases FORMAT.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from smallgpt_jax.storage import json_files, typed_json
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import NUMBER, TEXT, Optional, integer
from smallgpt_jax.storage.typed_json import Count, Finite, Positive, Schema

RESULTS_FILE = "results.json"  # in a comparison's folder
PREDICTIONS_FILE = "predictions.json"  # in a comparison's folder
FORMAT = 1
T = TypeVar("T")

# Of configs and texts, the parts that are read here and in reports.
_TEXT_FIELDS = ("data.mixture", "data.source", "data.tokenizer", "data.format", "train.objective")
FlatConfig = Annotated[
    dict[str, Any],
    Schema(
        {
            "train.steps": integer(1),
            "model.context_length": integer(1),
            "optimizer.learning_rate": Optional(NUMBER),
            **dict.fromkeys(_TEXT_FIELDS, Optional(TEXT)),
        }
    ),
]
_STORE = {
    "splits": Optional({"train": {"tokens": Optional(integer(0))}}),  # those of a probe: "rows"
    "vocab_size": Optional(integer(1)),
    "weight": Optional(json_files.POSITIVE),
}
Description = Annotated[dict[str, Any], Schema({**_STORE, "mixture": Optional([_STORE])})]


@dataclasses.dataclass(frozen=True)
class Point:
    """An evaluation. `tokens`, `flops` and `seconds` are totals over the steps before it."""

    step: int
    tokens: int  # without padding
    flops: float | None  # with padding and the optimizer; None if they cannot be counted
    seconds: float | None  # None if the run has logged no speed
    loss: float | None  # nats per token; None if not finite
    bits_per_byte: float | None
    targets: Count  # tokens over which `loss` is the mean
    # of a probe, or of eval_examples
    answers: dict[str, float] = dataclasses.field(default_factory=dict)
    loss_of_repeats: float | None = None  # on tokens that end a repeat; None if it was not logged


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """The loss on a further text or context length, after the last step."""

    step: int
    text: str  # its name; "own" is the text of training
    source: str
    context_length: Count
    bits_per_byte: float
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Quartiles:
    median: Positive
    low: Positive
    high: Positive
    count: Count


@dataclasses.dataclass(frozen=True)
class DecodingStep:
    batch: Count
    cache: str  # "empty" or "full"
    step_ms: Quartiles


@dataclasses.dataclass(frozen=True)
class Inference:
    """Measurements by evaluation/inference_cost.py, on the machine of the comparison."""

    device: str
    dtype: str
    context_length: Count
    cache_bytes: int
    cache_bytes_per_token: int
    prefill_ms: Quartiles | None
    decoding: tuple[DecodingStep, ...]


@dataclasses.dataclass(frozen=True)
class Depth:
    """What a diagnosis says of one block; None where it does not apply."""

    token_similarity: float | None
    neighbour_similarity: float | None
    effective_rank: float | None
    entropy: float | None
    first_weight: float | None


@dataclasses.dataclass(frozen=True)
class Inside:
    """Summary of the diagnosis after the last step."""

    step: int
    loss: float | None
    in_context_score: float | None
    least_important_block: float | None
    most_important_block: float | None
    blocks: tuple[Depth, ...]
    loss_of_repeats: float | None = None
    loss_of_others: float | None = None


@dataclasses.dataclass(frozen=True)
class Session:
    """A start of a run."""

    time: str
    device: str
    devices: Count
    versions: dict[str, str]
    argument_bytes: int
    temp_bytes: int
    padding: float
    first_step: int = 0
    stack: int = 1  # runs that the program trained at the same time
    # Of CPUs: family, model, instruction sets, …, because machines of one name differ in speed and
    # bits (`devices.platform.processor_identity`)
    processor: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrainingText:
    description: Description  # `Corpus.description`
    tokenizer: str  # fingerprint


# Runs of one model at several sizes are named MODEL@SIZE. Other names have the size "".
def model_of(name: str) -> str:
    return name.partition("@")[0]


def size_of(name: str) -> str:
    return name.partition("@")[2]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a finished or running run says of itself, from a workdir or a record."""

    name: str  # MODEL or MODEL@SIZE
    workdir: str
    seed: int  # of the initial weights
    config: FlatConfig  # {"group.field": value}
    text: TrainingText | None
    is_finished: bool  # trained and evaluated to the config's last step
    diverged: bool
    is_imported: bool  # started from imported weights
    steps_done: int  # the last logged step
    parameters: Count
    active_parameters: Count  # that one token uses; in a mixture of experts, fewer
    components: dict[str, int]
    flops_per_token: float | None  # without the optimizer; None if they cannot be counted
    tokens_per_step: Positive  # padding excluded
    curve: tuple[Point, ...]
    tokens_per_second: float | None  # mean training speed of the whole run
    memory_bytes: int | None  # per device, of the compiled training step
    sessions: tuple[Session, ...]
    expert_load: dict[str, list] | None  # last {path of a router: load by layer and expert}
    texts: tuple[TextLoss, ...]
    benchmarks: dict[str, float]  # {"task metric (shots, examples)": score}
    uncounted: float | None = 0.0  # arithmetic besides products, per FLOP
    flops_problem: str = ""  # why the FLOPs cannot be counted
    averaged: Count = 1  # last evaluations over which `loss` is the mean
    weight_bytes: int | None = None  # in decoding
    inference: Inference | None = None
    inside: Inside | None = None
    horizon: Positive = 1.0  # steps, as a multiple of those of the name's longest run
    run: str = ""  # workdir of the longest run, if this one has copied its first steps

    @property
    def model(self) -> str:
        return model_of(self.name)

    @property
    def size(self) -> str:
        return size_of(self.name)

    @property
    def label(self) -> str:
        return self.name if self.horizon == 1 else f"{self.name} × {self.horizon:g}"

    @property
    def batch_order(self) -> int:
        """The seed of the order of the batches: runs of one order are compared in pairs."""
        order = self.config.get("data.seed", -1)
        return self.seed if order == -1 else order

    @property
    def steps(self) -> int:
        """The steps of the config, done or not."""
        return self.config["train.steps"]

    @property
    def tokens(self) -> float:
        """The training tokens of the config, padding excluded."""
        return round(self.steps * self.tokens_per_step)

    @property
    def learning_rate(self) -> float:
        return self.config.get("optimizer.learning_rate", math.nan)

    @property
    def last(self) -> Point | None:
        return self.curve[-1] if self.curve else None

    @property
    def copied_steps(self) -> int:
        """The steps that the run has copied from its longest run."""
        if not self.sessions or not self.config.get("train.trunk"):
            return 0
        return self.sessions[0].first_step

    @property
    def trained_fraction(self) -> float:
        """The share of the config's steps that were not copied."""
        return 1 - self.copied_steps / self.steps

    def final(self, field: str) -> float | None:
        """Returns the mean over the last evaluations; None if a value is missing or not finite."""
        # Only evaluations on the same rows as the last one can be averaged with it.
        points = [point for point in self.curve if point.targets == self.curve[-1].targets]
        values = [getattr(point, field) for point in points[-self.averaged :]]
        return None if not values or None in values else math.fsum(values) / len(values)

    @property
    def loss(self) -> float:
        """The loss to compare by; inf if the run has diverged, NaN if it is unfinished."""
        if self.diverged:
            return math.inf
        loss = self.final("loss") if self.is_finished else math.nan
        return math.inf if loss is None else loss  # records have None for a loss that is not finite


@dataclasses.dataclass(frozen=True)
class GridRate:
    multiple: Positive  # of `Grid.learning_rate`
    loss: float | None  # after the last step; None if it is unfinished or has diverged
    diverged: bool


@dataclasses.dataclass(frozen=True)
class Grid:
    """A name's losses at multiples of the learning rate of its config, with one seed of its own."""

    seed: int
    learning_rate: Positive  # that is multiplied
    rates: tuple[GridRate, ...]  # in ascending order of the multiples

    @property
    def losses(self) -> dict[float, float | None]:
        """{multiple: loss}; inf if it has diverged, None if it is unfinished."""
        return {rate.multiple: math.inf if rate.diverged else rate.loss for rate in self.rates}

    @property
    def is_finished(self) -> bool:
        return None not in self.losses.values()

    @property
    def has_diverged(self) -> bool:
        """Whether the model has diverged at every multiple."""
        return all(rate.diverged for rate in self.rates)

    @property
    def best(self) -> float | None:
        """The multiple with the lowest loss; None until all are trained."""
        if not self.is_finished:
            return None
        # of equal losses the lowest: if all have diverged, lower rates are tried next
        return min(self.losses, key=lambda multiple: (self.losses[multiple], multiple))

    @property
    def edge(self) -> str:
        """Returns "lowest" or "highest" if the best multiple is at that end, else ""."""
        multiples = list(self.losses)
        return {multiples[0]: "lowest", multiples[-1]: "highest"}.get(self.best, "")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted loss of a held-out name, with an 80% interval."""

    name: str  # of the model, at all sizes
    size: Positive  # parameters
    tokens: Positive
    loss: Finite
    low: Finite
    high: Finite


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Content of predictions.json, which is written once, before the first held-out run starts."""

    time: str
    command: str
    held_out: str  # SIZE
    interval: Positive
    records_sha256: str  # of the losses that were fitted
    predictions: dict[str, tuple[Prediction, ...]]  # by the kind of size: "parameters"
    not_predicted: dict[str, str]  # {model: what it lacked}
    form: str = "power"  # of the law: a key of `laws.FORMS`, or a sum of two powers, as once was


@dataclasses.dataclass(frozen=True)
class Record:
    title: str
    budget: str  # a sentence about the budget of the runs
    command: str  # that repeats the comparison
    reference: str  # name of the run that the others are compared with
    runs: tuple[Run, ...]  # with grids, those at the best learning rates
    learning_rates: dict[str, Grid] = dataclasses.field(default_factory=dict)
    held_out: str = ""  # SIZE of the held-out runs
    predictions: Predictions | None = None
    # Seeds were added where verdicts needed them, so a test for a fixed number of seeds is wrong
    # more often than it says.
    seeds_as_needed: bool = False

    def longest_runs(self, size: str = "") -> list[Run]:
        """Returns the longest runs of a size, or of all names."""
        return [run for run in self.runs if run.horizon == 1 and size in ("", run.size)]


def read(path: Path) -> Record:
    """Returns the record in a results.json. Raises UserError, which names the field, if it is none."""
    advice = f"expected a results.json of format {FORMAT}; repeat the command that made it"
    return typed_json.read(Record, path, advice, format=json_files.one_of(FORMAT))


def write(record: Record, path: Path) -> None:
    write_atomically(path, json.dumps(content(record), indent=1) + "\n")


def content(record: Record) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(record)}


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Returns {key: items}. Groups and their items are in the order of `items`."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
