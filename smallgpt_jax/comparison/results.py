"""What came of runs: read from their workdirs, and nothing else. The numbers of a report are made here."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax import data, models, workdir
from smallgpt_jax.analysis import memory
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import METRICS_FILE, read_lines

OWN = "own"  # the name of the text that a run was trained on, among those that it was measured on
TEXTS_FILE, DECODING_FILE = "texts.json", "decoding.json"  # among the evaluations
RESULTS_FILE = "results.json"  # of a comparison


@dataclasses.dataclass(frozen=True)
class Point:
    """A validation of a run: `tokens`, `flops` and `seconds` are those of training until then; FLOPs are spent on
    padding too, which has no tokens."""

    step: int
    tokens: int
    flops: float
    seconds: float | None  # None if no speed was logged yet
    loss: float | None  # nats a token; None where it was not finite
    bits_per_byte: float | None
    targets: int | None  # tokens that the loss is the mean over; older versions did not record it


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, as its workdir tells it."""

    name: str
    workdir: str
    seed: int
    config: dict[str, Any]  # {"group.field": value}
    is_finished: bool  # trained and validated to config's last step
    diverged: bool
    is_imported: bool  # began with weights from elsewhere
    steps_done: int  # of config's train.steps, as far as they are logged
    parameters: int
    components: dict[str, int]
    flops_per_token: float
    tokens_per_step: float  # padding left out
    curve: tuple[Point, ...]
    tokens_per_second: float | None  # of training, over the whole run
    memory_bytes: int | None  # of one device, as the compiled step needs them
    sessions: tuple[dict, ...]
    texts: tuple[dict, ...]  # {"text", "fingerprint", "context_length", "bits_per_byte", …} of the last step
    decoding: dict | None
    benchmarks: dict[str, float]  # {"task metric (shots, examples)": score}

    @property
    def last(self) -> Point | None:
        return self.curve[-1] if self.curve else None


def read_run(name: str, folder: Path) -> Run:
    """Raises UserError if there is no run in `folder`."""
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; a run's workdir is wanted")
    config = workdir.read_config(folder)
    if "train" not in config:
        raise UserError(f"{folder}: an imported model, which has not been trained here: there is nothing to draw")
    model = models.build(**config.model)
    sessions = read_lines(folder / workdir.SESSIONS_FILE, keys={"device"})
    inputs_per_step = config.train.batch_size * config.model.context_length
    # Runs of earlier versions counted padding as tokens, and do not say how much there was.
    padding = sessions[-1].get("padding", 0) if sessions else 0
    tokens_per_step = inputs_per_step * (1 - padding) if padding else inputs_per_step
    flops_per_token = train_flops_per_token(model)
    lines = read_lines(folder / METRICS_FILE)
    evaluated = {line["step"]: line for line in lines if line["split"] == "eval"}  # each step's newest line
    steps, seconds = training_seconds(lines, tokens_per_step)

    def point(line: dict) -> Point:
        step = line["step"]
        return Point(step, round(step * tokens_per_step), step * inputs_per_step * flops_per_token,
                     seconds_at(step, steps, seconds), line["loss"], line["bits_per_byte"], line.get("targets"))

    evaluations = folder / workdir.EVALUATION_FOLDER
    texts = read_json(evaluations / TEXTS_FILE) or ()
    return Run(
        name=name, workdir=str(folder), seed=config.train.seed, config=workdir.flat(config),
        is_finished=config.train.steps in evaluated,
        diverged=has_diverged(folder), is_imported=(folder / workdir.ORIGIN_FILE).exists(),
        steps_done=steps_done(folder),
        parameters=models.num_parameters(model), components=memory.components(model),
        flops_per_token=flops_per_token, tokens_per_step=tokens_per_step,
        curve=tuple(point(evaluated[step]) for step in sorted(evaluated)),
        tokens_per_second=steps[-1] * tokens_per_step / seconds[-1] if len(steps) > 1 else None,
        memory_bytes=max((s["argument_bytes"] + s["temp_bytes"] for s in sessions), default=None),
        sessions=tuple(sessions), texts=tuple(row for row in texts if row["step"] == config.train.steps),
        decoding=read_json(evaluations / DECODING_FILE), benchmarks=benchmarks(evaluations, config.train.steps))


def steps_done(folder: Path) -> int:
    """As far as they are logged."""
    return max((line["step"] for line in read_lines(folder / METRICS_FILE)), default=0)


def has_diverged(folder: Path) -> bool:
    """Whether the run ended so when it was trained last."""
    told = read_lines(folder / workdir.SESSIONS_FILE, keys={"time"})
    return bool(told) and "diverged" in told[-1]


def training_seconds(lines: Sequence[dict], tokens_per_step: int) -> tuple[list[int], list[float]]:
    """Steps, and the seconds that training took until each: what the logged speeds add up to."""
    steps, seconds = [0], [0.0]
    for line in lines:
        if line["split"] == "train" and line.get("tokens_per_second"):
            seconds.append(seconds[-1] + (line["step"] - steps[-1]) * tokens_per_step / line["tokens_per_second"])
            steps.append(line["step"])
    return steps, seconds


def seconds_at(step: int, steps: list[int], seconds: list[float]) -> float | None:
    """Between two logged steps as if their speed were even, beyond the last at its speed."""
    if len(steps) < 2:
        return None
    if step <= steps[-1]:
        return float(np.interp(step, steps, seconds))
    return seconds[-1] + (step - steps[-1]) * (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])


def benchmarks(evaluations: Path, step: int) -> dict[str, float]:
    """{"task metric (shots, examples)": score} of the checkpoint of `step`: the newest of lm-evaluation-harness's
    results of each task, of the whole model as it was trained, on all examples; acc_norm where there is one."""
    scores = {}
    paths = [path for path in evaluations.glob(f"step{step}-*.json")
             if not re.match(rf"step{step}-(paths|float32-|bfloat16-)", path.name)]  # see evaluate.py
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        evaluation = read_json(path) or {}
        for task, values in evaluation.get("results", {}).items():
            metrics = {key.partition(",")[0]: value for key, value in values.items() if isinstance(value, float)}
            metric = next((metric for metric in ("acc_norm", "acc") if metric in metrics), None)
            if metric and not is_limited(evaluation, task):
                scores[f"{task} {metric}{measured_with(evaluation, task)}"] = metrics[metric]
    return scores


def is_limited(evaluation: dict, task: str) -> bool:
    """Whether only some of the task's examples were scored."""
    counts = (evaluation.get("n-samples") or {}).get(task)
    if counts:
        return counts["effective"] < counts["original"]
    return evaluation.get("config", {}).get("limit") is not None


def measured_with(evaluation: dict, task: str) -> str:
    """" (5-shot, 1,000 examples)", as far as the results say so."""
    shots, examples = evaluation.get("n-shot", {}).get(task), evaluation["results"][task].get("sample_len")
    told = [f"{shots}-shot"] * (shots is not None) + [f"{examples:,} examples"] * (examples is not None)
    return f" ({', '.join(told)})" if told else ""


def read_json(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def named(workdirs: Sequence[Path]) -> list[tuple[str, Path]]:
    """A name for each workdir: its folder's, without the seed; runs that differ in more get names of their own."""
    names: dict[str, dict] = {}
    found = []
    for folder in workdirs:
        short = re.sub(r"[-_]seed\d+$", "", folder.resolve().name)
        config = workdir.flat(workdir.read_config(folder)) if (folder / workdir.CONFIG_FILE).exists() else {}
        what = {field: value for field, value in config.items() if field != "train.seed"}
        name, number = short, 2
        while names.setdefault(name, what) != what:
            name, number = f"{short} ({number})", number + 1
        found.append((name, folder))
    return found


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises UserError if two runs were validated on different texts, or the same run is there twice."""
    seen: dict[tuple, Run] = {}
    for run in runs:
        other = seen.setdefault((run.name, run.seed), run)
        if other is not run:
            raise UserError(f"{other.workdir} and {run.workdir}: the same run twice (config and seed are the same)")
    own = [(run, text_of(Path(run.workdir))) for run in runs]
    for run, text in own[1:]:
        first, its = own[0]
        if not data.same_text(text[0], its[0]) or text[1] != its[1]:
            raise UserError(f"{first.workdir} and {run.workdir} cannot be drawn in one plot: their texts differ "
                            f"({workdir.what_changed(its[0], text[0])}), so their losses mean different things")
    for text in texts(runs):
        measured = [(row, run) for run in runs for row in run.texts if row["text"] == text]
        recorded = [(row, run) for row, run in measured if "fingerprint" in row]
        check_same_content(recorded, "fingerprint")
        if len(recorded) < len(measured):  # by an older version: there is only its source to tell it by
            check_same_content(measured, "source")


def check_same_content(measured: Sequence[tuple[dict, Run]], field: str) -> None:
    """Raises UserError if measurements under one name differ in what identifies their text."""
    for row, run in measured[1:]:
        first, other = measured[0]
        if row[field] != first[field]:
            raise UserError(f"{other.workdir} and {run.workdir}: the texts measured as {row['text']!r} differ (of "
                            f"{first['source']!r} and {row['source']!r}); measure both runs on the same text, or name "
                            "the texts differently in config.compare.texts")


def text_of(folder: Path) -> tuple[dict, str]:
    store = read_json(folder / workdir.STORE_FILE)
    if store is None:
        raise UserError(f"{folder}: this run has not begun yet")
    return store, tokenizers.fingerprint(tokenizers.load(folder / workdir.TOKENIZER_FOLDER))


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of one number over seeds."""

    mean: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """None if a value is missing."""
    if not values or any(value is None for value in values):
        return None
    return Spread(float(np.mean(values)), min(values), max(values), len(values))


def last(runs: Sequence[Run], field: str) -> Spread | None:
    """Of a field of the last points; None unless all seeds are as far as each other."""
    if len({run.last and run.last.step for run in runs}) != 1 or not runs[0].last:
        return None
    return spread([getattr(run.last, field) for run in runs])


def mean_curve(runs: Sequence[Run], axis: str) -> list[tuple[float, Spread]]:
    """(mean of `axis`, spread of the loss) at each step at which all seeds were validated, on as many targets as at
    their last one."""
    at = [{point.step: point for point in run.curve if point.targets == run.last.targets} for run in runs]
    curve = []
    for step in sorted(set.intersection(*map(set, at))):
        losses, places = (spread([getattr(points[step], field) for points in at]) for field in ("loss", axis))
        if losses and places:
            curve.append((places.mean, losses))
    return curve


def differ_in_targets(runs: Sequence[Run]) -> bool:
    """Whether the last losses are means over different rows: over numbers of targets more than 1% apart. Not if it
    is not recorded."""
    targets = [run.last.targets for run in runs if run.last]
    return bool(targets) and None not in targets and max(targets) > 1.01 * min(targets)


def texts(runs: Sequence[Run]) -> list[str]:
    """The names of the texts that any run was measured on."""
    return list(dict.fromkeys(row["text"] for run in runs for row in run.texts))


def contexts(runs: Sequence[Run], text: str) -> dict[int, Spread]:
    """{context: bits per byte} of seeds on a text."""
    found: dict[int, list[float | None]] = {}
    for run in runs:
        for row in run.texts:
            if row["text"] == text:
                found.setdefault(row["context_length"], []).append(row["bits_per_byte"])
    return {length: bits for length, values in sorted(found.items()) if (bits := spread(values))}


def shared(runs: Sequence[Run], fields: Sequence[str]) -> dict[str, Any]:
    """Of these fields those that are the same in all runs, and their values."""
    first, *others = (run.config for run in runs)
    return {field: first.get(field) for field in fields
            if all(repr(other.get(field)) == repr(first.get(field)) for other in others)}


def different_fields(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """{field: {name of run: value}} for the fields in which the runs differ, but the seed."""
    groups = by_name(runs)
    fields = dict.fromkeys(field for run in runs for field in run.config)
    table = {field: {name: group[0].config.get(field) for name, group in groups.items()} for field in fields}
    return {field: values for field, values in table.items()
            if field != "train.seed" and len(set(map(repr, values.values()))) > 1}
