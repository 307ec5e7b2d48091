"""The results of runs, computed from the files in their workdirs."""

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.diagnosis.summary import read_summary
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.models.components import components
from smallgpt_jax.models.flops import Cost, train_cost, update_flops
from smallgpt_jax.objectives.future_tokens import future_terms
from smallgpt_jax.objectives.objective import Objective, Term, make_objective
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.optimizer import OPTIMIZERS
from smallgpt_jax.run.config import Config, flatten
from smallgpt_jax.run.config_file import read_config, read_groups
from smallgpt_jax.run.metrics import answers_in, read_lines
from smallgpt_jax.run.names import (
    CONFIG_FILE,
    EVALUATION_FOLDER,
    METRICS_FILE,
    ORIGIN_FILE,
    STORE_FILE,
)
from smallgpt_jax.run.sessions import has_diverged, read_sessions
from smallgpt_jax.run.training_text import read_identity, text_changes
from smallgpt_jax.storage.json_files import (
    BOOLEAN,
    LOSS,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    Optional,
    integer,
    one_of,
    printable_values,
    read_json_or_none,
)
from smallgpt_jax.storage.object_storage import is_remote
from smallgpt_jax.storage.paths import resolve

OWN_TEXT = "own"  # in the results, the name of a run's training text
TEXTS_FILE, INFERENCE_FILE = "texts.json", "inference.json"  # in a workdir's evaluations/
TEXTS = [
    {
        "step": integer(0),
        "text": TEXT,
        "source": TEXT,
        "context_length": integer(1),
        "bits_per_byte": LOSS,
        "fingerprint": TEXT,
    }
]
QUARTILES = {"median": POSITIVE, "low": POSITIVE, "high": POSITIVE, "count": integer(1)}
INFERENCE = {
    "device": TEXT,
    "dtype": TEXT,
    "context_length": integer(1),
    "cache_bytes": integer(0),
    "cache_bytes_per_token": integer(0),
    "prefill_ms": (NULL, QUARTILES),
    "decoding": [{"batch": integer(1), "cache": one_of("empty", "full"), "step_ms": QUARTILES}],
}
# The config fields that determine the validation rows.
ROWS = ("model.context_length", "data.packing", "data.separate_documents")
# Config fields in which runs of one name may differ.
NOT_IN_NAMES = ("train.seed", "data.source", "data.store", "data.tokenizer")
# The parts of lm-evaluation-harness's results that are read.
EVALUATION = {
    "results": Each({"sample_len": Optional((NULL, integer(0)))}),
    "n-shot": Optional(OBJECT),
    "n-samples": Optional((NULL, Each({"effective": integer(0), "original": integer(0)}))),
    "config": Optional(OBJECT),
}

# The parts of the results of `evaluate --examples` that are read.
EXAMPLES = {
    "examples": TEXT,
    "count": integer(1),
    "results": Each({"mean": NUMBER}),
    "is_whole": Optional(BOOLEAN),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """An evaluation of a run. `tokens`, `flops` and `seconds` are totals over all training steps
    before it.
    """

    step: int
    tokens: int  # without padding
    flops: float | None  # with padding and the optimizer; None if they cannot be counted
    seconds: float | None  # None if the run has logged no speed
    loss: float | None  # nats per token; None if not finite
    bits_per_byte: float | None
    targets: int  # number of tokens over which `loss` is the mean
    answers: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # measures of a probe's answers


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    workdir: str
    seed: int
    config: dict[str, Any]  # {"group.field": value}
    is_finished: bool  # trained and evaluated to the config's last step
    diverged: bool
    is_imported: bool  # started from imported weights
    steps_done: int  # the last logged step
    parameters: int
    active_parameters: (
        int  # parameters that one token uses; in a mixture of experts, fewer than `parameters`
    )
    components: dict[str, int]
    flops_per_token: (
        float | None
    )  # of the model, without the optimizer; None if they cannot be counted
    tokens_per_step: float  # padding excluded
    curve: tuple[Point, ...]
    tokens_per_second: float | None  # mean training speed of the whole run
    memory_bytes: int | None  # per device, of the compiled training step
    sessions: tuple[dict, ...]
    expert_load: (
        dict[str, list] | None
    )  # the last logged {path of a router: load by layer and expert}
    texts: tuple[
        dict, ...
    ]  # measured at the last step: {"text", "fingerprint", "context_length", "bits_per_byte", …}
    benchmarks: dict[str, float]  # {"task metric (shots, examples)": score}
    uncounted: float | None = (
        0.0  # arithmetic besides products, per FLOP; None if the FLOPs cannot be counted
    )
    flops_problem: str = ""  # why the FLOPs cannot be counted
    text: dict[str, Any] | None = None  # of training; see `training_text.identity_of`
    averaged: int = 1  # number of last evaluations over which `final` averages
    weight_bytes: int | None = None  # in decoding
    inference: dict | None = None  # time and cache of inference, if measured: inference.json
    inside: dict | None = (
        None  # summary of the diagnosis after the last step, if any: diagnose.json
    )
    horizon: float = 1.0  # number of steps, as a multiple of that of the model's longest run
    run: str = ""  # workdir of the trunk: runs that have steps in common have the same one

    @property
    def label(self) -> str:
        return self.name + (f" × {self.horizon:g}" if self.horizon != 1 else "")

    @property
    def copied_steps(self) -> int:
        """The number of steps that the run has copied from its trunk."""
        return (
            self.sessions[0].get("first_step", 0)
            if self.sessions and self.config.get("train.trunk")
            else 0
        )

    @property
    def last(self) -> Point | None:
        return self.curve[-1] if self.curve else None

    def final(self, field: str) -> float | None:
        """Returns the mean over the last evaluations with as many targets as the last; None if a
        value is missing.
        """
        points = [point for point in self.curve if point.targets == self.last.targets][
            -self.averaged :
        ]
        values = [getattr(point, field) for point in points]
        return None if not values or None in values else statistics.fmean(values)

    @property
    def score(self) -> float:
        """The loss by which a comparison chooses; infinite if the run has diverged."""
        loss = self.final("loss")
        return math.inf if self.diverged or loss is None else loss

    @property
    def evaluation_rows(self) -> dict[str, Any]:
        """The config fields and the number of targets that, with the text, fix the rows of the last
        evaluation.
        """
        targets = self.last and self.last.targets
        return {**{f"config.{field}": self.config.get(field) for field in ROWS}, "targets": targets}


def read_run(
    name: str,
    folder: Path,
    trust_custom_code: bool = False,
    averaged: int = 1,
    horizon: float = 1.0,
    trunk: Path | None = None,
) -> Run:
    """Returns the results of a run, whose loss is the mean over the `averaged` last evaluations."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the workdir of a run")
    config = read_config(folder, trust_custom_code)
    if (folder / ORIGIN_FILE).exists() and not (folder / STORE_FILE).exists():
        raise UserError(f"{folder}: an imported model that has not been trained; train it first")
    if not (folder / STORE_FILE).exists():
        raise UserError(f"{folder}: the run has not started; train it first")
    if config.train.teacher:
        raise UserError(
            f"{folder}: was trained with config.train.teacher, which comparisons do not support, "
            "because they would not count the cost of the teacher; remove the run"
        )
    sessions = read_sessions(folder)
    inputs_per_step = config.train.batch_size * config.model.context_length
    padding = sessions[-1]["padding"] if sessions else 0
    tokens_per_step = inputs_per_step * (1 - padding) if padding else inputs_per_step
    counts = count(config)
    lines = read_lines(folder / METRICS_FILE)
    evaluated = {
        line["step"]: line for line in lines if line["split"] == "eval"
    }  # the newest line per step
    steps, seconds = training_seconds(lines, tokens_per_step)

    def point(line: dict) -> Point:
        step = line["step"]
        flops = (
            None
            if counts.cost.flops is None
            else step * (inputs_per_step * counts.cost.flops + counts.optimizer_flops)
        )
        return Point(
            step,
            round(step * tokens_per_step),
            flops,
            seconds_at(step, steps, seconds),
            line["loss"],
            line["bits_per_byte"],
            line["targets"],
            answers_in(line),
        )

    evaluations = folder / EVALUATION_FOLDER
    texts = printable_values(read_json_or_none(evaluations / TEXTS_FILE, TEXTS) or [])
    return Run(
        name=name,
        workdir=str(folder),
        seed=config.train.seed,
        config=config.flat(),
        is_finished=config.train.steps in evaluated,
        diverged=has_diverged(folder),
        is_imported=(folder / ORIGIN_FILE).exists(),
        steps_done=steps_done(folder),
        parameters=sum(counts.components.values()),
        active_parameters=counts.active_parameters,
        components=counts.components,
        flops_per_token=counts.cost.flops,
        tokens_per_step=tokens_per_step,
        curve=tuple(point(evaluated[step]) for step in sorted(evaluated)),
        tokens_per_second=steps[-1] * tokens_per_step / seconds[-1] if len(steps) > 1 else None,
        memory_bytes=max((s["argument_bytes"] + s["temp_bytes"] for s in sessions), default=None),
        sessions=tuple(sessions),
        expert_load=next(
            (line["expert_load"] for line in reversed(lines) if "expert_load" in line), None
        ),
        texts=tuple(row for row in texts if row["step"] == config.train.steps),
        benchmarks=printable_values(
            benchmarks(evaluations, config.train.steps) | examples(evaluations, config.train.steps)
        ),
        uncounted=counts.cost.uncounted,
        flops_problem=counts.cost.problem,
        text=read_identity(folder),
        averaged=averaged,
        weight_bytes=counts.weight_bytes,
        inference=printable_values(read_json_or_none(evaluations / INFERENCE_FILE, INFERENCE)),
        inside=read_summary(folder, config.train.steps),
        horizon=horizon,
        run=str(trunk or config.train.trunk or folder),
    )


class Counts(NamedTuple):
    components: dict[str, int]  # number of parameters of each component
    active_parameters: int
    cost: Cost  # of training, without the optimizer
    optimizer_flops: int  # per update
    weight_bytes: int  # in decoding


def count(config: Config) -> Counts:
    model = models.LanguageModel(config.model)
    objective = make_objective(config.train, model, **future_terms(config.train, model))
    return count_once(model, tuple(objective.terms.items()), config.optimizer.name)


@functools.cache
def count_once(
    model: models.LanguageModel, terms: tuple[tuple[str, Term], ...], optimizer_name: str
) -> Counts:
    """Cached, because it traces the model. FLOPs do not depend on the optimizer's settings."""
    trained = models.abstract_params(model) | Objective(terms=dict(terms)).abstract_heads()
    optimizer = OPTIMIZERS[optimizer_name](trained, OptimizerConfig(name=optimizer_name))
    return Counts(
        components(model),
        models.num_active_parameters(model),
        train_cost(model, dict(terms).values()),
        update_flops(trained, optimizer),
        layout.num_bytes(layout.packed_shapes(model)),
    )


def steps_done(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder / METRICS_FILE)), default=0)


def training_seconds(lines: Sequence[dict], tokens_per_step: int) -> tuple[list[int], list[float]]:
    """Returns the steps with a logged speed, and the seconds of training up to each. Both lists
    begin with 0.
    """
    steps, seconds = [0], [0.0]
    for line in lines:
        if line["split"] == "train" and line.get("tokens_per_second"):
            seconds.append(
                seconds[-1]
                + (line["step"] - steps[-1]) * tokens_per_step / line["tokens_per_second"]
            )
            steps.append(line["step"])
    return steps, seconds


def seconds_at(step: int, steps: list[int], seconds: list[float]) -> float | None:
    """Returns the training seconds up to `step`, or None if no speed is logged.

    `steps` and `seconds` are the result of `training_seconds`. Interpolates between these steps.
    After the last one, assumes the last speed.
    """
    if len(steps) < 2:
        return None
    if step <= steps[-1]:
        return float(np.interp(step, steps, seconds))
    return seconds[-1] + (step - steps[-1]) * (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])


def benchmarks(evaluations: Path, step: int) -> dict[str, float]:
    """Returns {"task metric (shots, examples)": score} of a checkpoint, from
    lm-evaluation-harness's result files.

    Uses the newest evaluation of the full model, in its own dtype, on all examples; acc_norm if
    present, else acc.
    """
    scores = {}
    # Skips evaluations that used only some of ParallelGPT's parallel paths, and evaluations with
    # the flag --dtype. Both are recognized by their file names, for example step100-paths….json or
    # step100-float32-….json.
    paths = [
        path
        for path in evaluations.glob(f"step{step}-*.json")
        if not re.match(rf"step{step}-(paths|float32-|bfloat16-)", path.name)
    ]
    for path in sorted(paths, key=modified_at):
        evaluation = read_json_or_none(path, EVALUATION) or {}
        for task, values in evaluation.get("results", {}).items():
            metrics = {
                key.partition(",")[0]: value
                for key, value in values.items()
                if isinstance(value, float) and math.isfinite(value)
            }
            metric = next((metric for metric in ("acc_norm", "acc") if metric in metrics), None)
            if metric and not is_limited(evaluation, task):
                scores[f"{task} {metric}{settings_suffix(evaluation, task)}"] = metrics[metric]
    return scores


def examples(evaluations: Path, step: int) -> dict[str, float]:
    """Returns {"file metric (examples)": score} of a checkpoint, from `evaluate --examples`, as
    `benchmarks` does.
    """
    scores = {}
    for path in sorted(evaluations.glob(f"examples-step{step}-*.json"), key=modified_at):
        found = read_json_or_none(path, EXAMPLES)
        if found and found.get("is_whole", False):
            file = "/".join(Path(found["examples"]).parts[-2:])
            scores |= {
                f"{file} {metric} ({found['count']:,} examples)": values["mean"]
                for metric, values in found["results"].items()
            }
    return scores


def modified_at(path: Path) -> float:
    return path.stat().mtime if is_remote(path) else path.stat().st_mtime


def is_limited(evaluation: dict, task: str) -> bool:
    """Whether only some of the task's examples were scored."""
    counts = (evaluation.get("n-samples") or {}).get(task)
    if counts:
        return counts["effective"] < counts["original"]
    return evaluation.get("config", {}).get("limit") is not None


def settings_suffix(evaluation: dict, task: str) -> str:
    """Returns a suffix such as " (5-shot, 1,000 examples)". Omits numbers that the results do not
    record.
    """
    shots, examples = (
        evaluation.get("n-shot", {}).get(task),
        evaluation["results"][task].get("sample_len"),
    )
    settings = [f"{shots}-shot"] if shots is not None else []
    settings += [f"{examples:,} examples"] if examples is not None else []
    return f" ({', '.join(settings)})" if settings else ""


def name_workdirs(workdirs: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns (name, workdir) pairs: "gpt-seed1" becomes "gpt", and "gpt-seed1-lr2x-x0.5" becomes
    "gpt-lr2x-x0.5".

    Runs share a name only if their configs are equal except for the seed and the places of the
    text, whose content `require_comparable` checks; otherwise, the second is "gpt (2)".
    """
    names: dict[str, dict] = {}
    found = []
    for folder in workdirs:
        short = re.sub(r"[-_]seed\d+(?=(-lr[\d.e+-]+x)?(-x[\d.e+-]+)?$)", "", resolve(folder).name)
        config = flatten(read_groups(folder)) if (folder / CONFIG_FILE).exists() else {}
        model = {field: value for field, value in config.items() if field not in NOT_IN_NAMES}
        name, number = short, 2
        while names.setdefault(name, model) != model:
            name, number = f"{short} ({number})", number + 1
        found.append((name, folder))
    return found


def require_comparable(runs: Sequence[Run]) -> Sequence[Run]:
    """Returns the runs. Raises UserError if one is listed twice, or if training texts or texts of
    one name differ.
    """
    seen: dict[tuple, Run] = {}
    for run in runs:
        other = seen.setdefault((run.name, run.seed, run.horizon), run)
        if other is not run:
            raise UserError(
                f"{other.workdir} and {run.workdir}: same config and seed; list the run once"
            )
    for run in runs[1:]:
        if changes := text_changes(runs[0].text, run.text):
            raise UserError(
                f"{runs[0].workdir} and {run.workdir}: cannot be compared, since their texts "
                f"differ ({changes}); report on them separately"
            )
    for text in text_names(runs):
        (first, other), *measured = [
            (row, run) for run in runs for row in run.texts if row["text"] == text
        ]
        for row, run in measured:
            if row["fingerprint"] != first["fingerprint"]:
                raise UserError(
                    f"{other.workdir} and {run.workdir}: the texts named {text!r} differ "
                    f"({first['source']!r} and {row['source']!r}); measure both runs on the same "
                    "text, or use different names in config.compare.texts"
                )
    return runs


def text_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(row["text"] for run in runs for row in run.texts))
