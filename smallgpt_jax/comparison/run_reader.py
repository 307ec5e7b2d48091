"""Reads a workdir as a `Run`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax.analysis import record
from smallgpt_jax.analysis.record import Inference, Inside, Point, Run, Session, TextLoss
from smallgpt_jax.comparison.counts import count
from smallgpt_jax.diagnosis.summary import read_summary
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.inference_cost import INFERENCE_FILE
from smallgpt_jax.evaluation.scores import read_scores
from smallgpt_jax.evaluation.texts import TEXTS_FILE
from smallgpt_jax.run.config import Config, flatten
from smallgpt_jax.run.config_file import read_config, read_groups
from smallgpt_jax.run.custom_code import refuse_training_code
from smallgpt_jax.run.metrics import LOSS_OF_REPEATS, answers_in, read_lines
from smallgpt_jax.run.names import (
    CONFIG_FILE,
    EVALUATION_FOLDER,
    METRICS_FILE,
    ORIGIN_FILE,
    STORE_FILE,
)
from smallgpt_jax.run.sessions import has_diverged, read_sessions
from smallgpt_jax.run.training_text import read_identity
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.json_files import NUMBER
from smallgpt_jax.storage.paths import resolve

# The seed in the name of a workdir, before the multiples of learning rate and steps.
_SEED = re.compile(r"[-_]seed\d+(?=(-lr[\d.e+-]+x)?(-x[\d.e+-]+)?$)")
# Config fields in which runs of one name may differ.
_NOT_IN_NAMES = ("train.seed", "data.source", "data.store", "data.tokenizer")


def read_run(
    name: str,
    folder: Path,
    *,
    averaged: int = 1,
    horizon: float = 1.0,
    trunk: Path | None = None,
    trust_custom_code: bool = False,
) -> Run:
    """Returns the run in a workdir, whose loss is the mean over the `averaged` last evaluations.

    `trunk` is the longer run whose first steps it has copied. Raises UserError if there is no run.
    """
    _require_started(folder)
    config = read_config(folder, trust_custom_code)
    refuse_training_code(config, folder, trust_custom_code)
    if config.train.teacher:
        raise UserError(
            f"{folder}: was trained with config.train.teacher, which comparisons do not support, "
            "because they would not count the cost of the teacher; remove the run"
        )
    counts = count(config)
    sessions = tuple(typed_json.parse(Session, session) for session in read_sessions(folder))
    lines = read_lines(folder / METRICS_FILE)
    tokens_per_step = _tokens_per_step(config, sessions)
    seconds = training_seconds(lines, tokens_per_step)
    curve = _curve(lines, tokens_per_step, counts.flops_per_step(config), seconds)
    evaluations = folder / EVALUATION_FOLDER
    summary = read_summary(folder, config.train.steps)
    loads = [line["expert_load"] for line in lines if "expert_load" in line]
    return Run(
        name=name,
        workdir=str(folder),
        seed=config.train.seed,
        config=config.flat(),
        is_finished=any(point.step == config.train.steps for point in curve),
        diverged=has_diverged(folder),
        is_imported=(folder / ORIGIN_FILE).exists(),
        steps_done=max((line["step"] for line in lines), default=0),
        parameters=counts.parameters,
        active_parameters=counts.active_parameters,
        components=counts.components,
        flops_per_token=counts.flops_per_token,
        tokens_per_step=tokens_per_step,
        curve=curve,
        tokens_per_second=seconds.tokens_per_second(tokens_per_step),
        memory_bytes=max((one.argument_bytes + one.temp_bytes for one in sessions), default=None),
        sessions=sessions,
        expert_load=loads[-1] if loads else None,
        texts=_texts(evaluations, config.train.steps),
        benchmarks=read_scores(evaluations, config.train.steps),
        uncounted=counts.uncounted,
        flops_problem=counts.flops_problem,
        text=record.TrainingText(**read_identity(folder)),
        averaged=averaged,
        weight_bytes=counts.weight_bytes,
        inference=typed_json.read_or_none(Inference, evaluations / INFERENCE_FILE),
        inside=typed_json.parse(Inside, summary) if summary else None,
        horizon=horizon,
        run=str(trunk or config.train.trunk or folder),
    )


def _require_started(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the workdir of a run")
    if (folder / STORE_FILE).exists() or not (folder / CONFIG_FILE).exists():
        return  # it has started; or `read_config` says that a folder without a config is no run
    if (folder / ORIGIN_FILE).exists():
        raise UserError(f"{folder}: an imported model that has not been trained; train it first")
    raise UserError(f"{folder}: the run has not started; train it first")


def _tokens_per_step(config: Config, sessions: Sequence[Session]) -> float:
    """Returns the tokens of a batch without padding."""
    inputs = config.inputs_per_step
    padding = sessions[-1].padding if sessions else 0
    # without padding an integer, as records have it
    return inputs * (1 - padding) if padding else inputs


# ------------------------------------------------------------------ costs and losses
class TrainingSeconds(NamedTuple):
    """The steps with a logged speed, and the seconds up to each, both beginning with 0."""

    steps: list[int]
    seconds: list[float]

    def at(self, step: int) -> float | None:
        """Returns the seconds up to `step`; None without a logged speed."""
        steps, seconds = self
        if len(steps) < 2:
            return None
        if step <= steps[-1]:
            return float(np.interp(step, steps, seconds))
        # The run goes on at its last speed.
        seconds_per_step = (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])
        return seconds[-1] + (step - steps[-1]) * seconds_per_step

    def tokens_per_second(self, tokens_per_step: float) -> float | None:
        """Returns the mean speed; None without a logged one."""
        if len(self.steps) < 2:
            return None
        return self.steps[-1] * tokens_per_step / self.seconds[-1]


def training_seconds(lines: Sequence[dict], tokens_per_step: float) -> TrainingSeconds:
    steps, seconds = [0], [0.0]
    for line in lines:
        if line["split"] == "train" and line.get("tokens_per_second"):
            tokens = (line["step"] - steps[-1]) * tokens_per_step
            seconds.append(seconds[-1] + tokens / line["tokens_per_second"])
            steps.append(line["step"])
    return TrainingSeconds(steps, seconds)


def _curve(
    lines: Sequence[dict],
    tokens_per_step: float,
    flops_per_step: float | None,
    seconds: TrainingSeconds,
) -> tuple[Point, ...]:
    """Returns the evaluations in the order of their steps; of several of a step, the newest."""
    points = {}
    for line in lines:
        if line["split"] != "eval":
            continue
        step, repeats = line["step"], line.get(LOSS_OF_REPEATS)
        points[step] = Point(
            step=step,
            tokens=round(step * tokens_per_step),
            flops=None if flops_per_step is None else step * flops_per_step,
            seconds=seconds.at(step),
            loss=line["loss"],
            bits_per_byte=line["bits_per_byte"],
            targets=line["targets"],
            answers=answers_in(line),
            loss_of_repeats=repeats if NUMBER.accepts(repeats) else None,
        )
    return tuple(points[step] for step in sorted(points))


def _texts(evaluations: Path, step: int) -> tuple[TextLoss, ...]:
    rows = typed_json.read_or_none(tuple[TextLoss, ...], evaluations / TEXTS_FILE) or ()
    return tuple(row for row in rows if row.step == step)


# ------------------------------------------------------------------ names
def name_workdirs(workdirs: Sequence[Path]) -> list[tuple[str, Path]]:
    """Returns (name, workdir) pairs: "gpt-seed1" becomes "gpt", and "gpt-seed1-lr2x-x0.5" becomes
    "gpt-lr2x-x0.5".

    Runs share a name only if their configs are equal except for the seed and the places of the
    text, whose content `comparability.require_comparable` checks; otherwise, the second is
    "gpt (2)".
    """
    config_of_name: dict[str, dict] = {}
    pairs = []
    for folder in workdirs:
        config = flatten(read_groups(folder)) if (folder / CONFIG_FILE).exists() else {}
        for field in _NOT_IN_NAMES:
            config.pop(field, None)
        short = _SEED.sub("", resolve(folder).name)
        name, number = short, 2
        while config_of_name.setdefault(name, config) != config:
            name, number = f"{short} ({number})", number + 1
        pairs.append((name, folder))
    return pairs
