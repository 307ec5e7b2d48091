"""Which bugs do the losses of the first tenth of a quickstart give away?

    python experiments/normal_runs.py --output=runs/normal --seeds=1,2,3             # honest runs
    python experiments/normal_runs.py --output=runs/normal --write_bands             # their band
    python experiments/normal_runs.py --output=runs/normal --seeds=1 --bug=no_mask   # a bug
    python experiments/normal_runs.py --output=runs/normal --report

A run is 200 updates of a recipe's quickstart. Its losses are written to
OUTPUT/RECIPE/BUG-NAME-SEED.json. A run with a bug ends when it has left the band. The report counts
the bugs that are found, and the honest runs that are outside of the band of all others: each one is
left out of its band.

The bugs were chosen before any of them was trained:

| bug | how it happens |
|---|---|
| shifted | targets are shifted twice, by the data and by the loss: each token predicts the next but one |
| no_warmup | the schedule starts at the peak |
| fast_schedule | the schedule counts microbatches: four per step, so warm-up and decay end four times too early |
| halved_rate | half the learning rate, as when a rate is divided by the number of devices |
| no_mask | attention sees later tokens |
| half_masters | the parameters are stored in bfloat16 between updates |
| doubled_batch | a batch size per device is taken as one for all |
| repeated_rows | four readers read the same rows, so each batch has two different rows instead of eight |
| unshuffled | rows are read in the order of the text |
| no_positions | the position embedding is not added |
| no_final_norm | the head reads the trunk's output without the last norm |
| large_init | initial matrices are ten times too large |
"""

import contextlib
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # without an installation

from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.corpus import Corpus, load_or_prepare
from smallgpt_jax.data.file_sets import StandardLibrary
from smallgpt_jax.devices import compilation_cache
from smallgpt_jax.models import ModelConfig
from smallgpt_jax.objectives.examples import Examples
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.training import program as programs
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.loss_band import (
    BANDS_FILE,
    BandPoint,
    LossBand,
    bytes_per_token,
    find_band,
    relevant_fields,
)
from smallgpt_jax.training.opening import open_pipeline

HONEST = "honest"

_RECIPE = flags.DEFINE_string("recipe", "pgpt:quickstart", "Recipe to train.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the results.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["1"], "Seeds to train; those with a result are not repeated.")
_BUG = flags.DEFINE_string("bug", "", "A bug of the docstring; none: an honest run.")
_LIBRARY = flags.DEFINE_string(
    "library", "", "Folder of another Python's standard library, such as /usr/lib/python3.13."
)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.")
_NAME = flags.DEFINE_string("name", "here", "What distinguishes the runs, beside bug and seed.")
_WRITE_BANDS = flags.DEFINE_bool("write_bands", False, "Write loss_bands.json from the results.")
_REPORT = flags.DEFINE_bool("report", False, "Print which results are outside of their band.")

# Spans of steps, (first, last), by measure.
SPANS = {
    "mean": ((1, 1), (2, 10), (11, 25), (26, 50), (51, 100), (101, 150), (151, 200)),
    "log_scatter": ((26, 100), (101, 200)),
}
MIN_RUNS = 5
# Changed fields of the config, by bug.
_FIELDS = {
    "no_warmup": {"optimizer": {"warmup_steps": 0}},
    "doubled_batch": {"train": {"batch_size": 16}},
    "no_mask": {"model": {"attention_mask": "bidirectional"}},
    "no_positions": {"model": {"position": "none"}},
    "halved_rate": {"optimizer": {"learning_rate": 1.5e-3, "final_learning_rate": 1.5e-4}},
}


def main(_) -> None:
    if _WRITE_BANDS.value:
        write_bands(Path(_OUTPUT.value))
    elif _REPORT.value:
        report(Path(_OUTPUT.value))
    else:
        train_seeds()


def train_seeds() -> None:
    compilation_cache.configure()
    recipe = Config.of(load_config(_RECIPE.value))
    config = recipe.replace(train={"steps": _STEPS.value}).replace(**_FIELDS.get(_BUG.value, {}))
    folder = Path(_OUTPUT.value) / _RECIPE.value
    folder.mkdir(parents=True, exist_ok=True)
    with standard_library(_LIBRARY.value):
        corpus = load_or_prepare(config.data)
    band = find_band(recipe, corpus.description) if _BUG.value else None
    with injected(_BUG.value):
        program = build_program(config)
        for seed in map(int, _SEEDS.value):
            path = folder / f"{_BUG.value or HONEST}-{_NAME.value}-{seed}.json"
            if not path.exists():
                losses = train(program, config.replace(train={"seed": seed}), corpus, band)
                run = {"losses": losses, "bytes_per_token": bytes_per_token(corpus.description)}
                path.write_text(json.dumps(run))
                print(f"{path}: {len(losses)} steps, last loss {losses[-1]:.3f}", flush=True)


@contextlib.contextmanager
def standard_library(folder: str):
    """Reads the `python_stdlib` of another Python."""
    if not folder:
        yield
        return
    identity = property(lambda self: [(self.name, str(self.path))])
    with (
        mock.patch.object(StandardLibrary, "path", Path(folder)),
        mock.patch.object(StandardLibrary, "identity", identity),
    ):
        yield


def train(program, config: Config, corpus: Corpus, band: LossBand | None) -> list[float]:
    """Returns the losses of all updates, or of those until they have left the band."""
    pipeline = open_pipeline(config, program, corpus)
    state = with_bug_in_weights(program.initial_state(config.train.seed))
    update, losses = program.bind(config), {}
    for step, batch in zip(range(1, config.train.steps + 1), batches(pipeline, config)):
        state, metrics = update(state, pipeline.to_devices(batch))
        if _BUG.value == "half_masters":
            state = state._replace(params=rounded(state.params))
        losses[step] = float(metrics["loss"])
        if band and band.problem(losses, step):
            break
    return list(losses.values())


def batches(pipeline, config: Config):
    for number, batch in enumerate(read_ahead(pipeline.train_batches, 0, 1)):
        if _BUG.value == "repeated_rows":
            batch = batch._replace(tokens_BxT1=np.tile(batch.tokens_BxT1[:2], (4, 1)))
        if _BUG.value == "unshuffled":
            size = config.train.batch_size
            batch = pipeline.train.read_rows(np.arange(size * number, size * (number + 1)))
        yield batch


@jax.jit
def rounded(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)


def with_bug_in_weights(state):
    if _BUG.value == "large_init":
        # the scales of norms are all 1
        params = jax.tree.map(lambda x: jnp.where(jnp.all(x == 1), x, 10 * x), state.params)
        return state._replace(
            params=jax.device_put(params, jax.tree.map(sharding_of, state.params))
        )
    return state


def sharding_of(array):
    return array.sharding


@contextlib.contextmanager
def injected(bug: str):
    """The bugs that need other code than that of the package."""
    patches = contextlib.ExitStack()
    schedule = programs.learning_rate_schedule
    with patches:
        if bug == "shifted":
            targets = property(lambda self: jnp.roll(self.batch.tokens_BxT1, -1, axis=1)[:, 1:])
            patches.enter_context(mock.patch.object(Examples, "targets_BxT", targets))
        elif bug == "fast_schedule":
            fast = mock.patch.object(
                programs,
                "learning_rate_schedule",
                lambda config: lambda count: schedule(config)(4 * count),
            )
            patches.enter_context(fast)
        elif bug == "no_final_norm":
            patches.enter_context(mock.patch.object(ModelConfig, "ends_with_norm", True))
        yield


def write_bands(output: Path) -> None:
    bands = {}
    for folder in sorted(output.iterdir()):
        runs = read_runs(folder, HONEST)
        bands[folder.name] = {
            "config": changed_fields(Config.of(load_config(folder.name))),
            "bytes_per_token": round(statistics.fmean(r["bytes_per_token"] for r in runs), 4),
            "points": [dataclasses.asdict(point) for point in make_points(runs)],
        }
    BANDS_FILE.write_text(json.dumps(bands, indent=1) + "\n")


def changed_fields(config: Config) -> dict[str, dict]:
    """Returns the fields that matter and are not those of the groups' defaults."""
    groups: dict[str, dict] = {name: {} for name in GROUPS}
    for name, value in relevant_fields(config).items():
        group, field = name.split(".")
        fields = {f.name: f.default for f in dataclasses.fields(getattr(config, group))}
        if value != fields[field]:
            groups[group][field] = value
    return groups


def read_runs(folder: Path, bug: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{bug}-*.json"))]


def by_step(run: dict) -> dict[int, float]:
    return dict(enumerate(run["losses"], 1))


def make_points(runs: list[dict]) -> list[BandPoint]:
    points = []
    for measure, spans in SPANS.items():
        for first, last in spans:
            values = [BandPoint(first, last, measure, 0, 0, 0).value(by_step(run)) for run in runs]
            values = [value for value in values if not np.isnan(value)]
            if len(values) >= MIN_RUNS:
                mean, deviation = statistics.fmean(values), statistics.stdev(values)
                point = BandPoint(
                    first, last, measure, round(mean, 5), round(deviation, 5), len(values)
                )
                points.append(point)
    return sorted(points, key=lambda point: point.last)


def report(output: Path) -> None:
    for folder in sorted(output.iterdir()):
        honest = sorted(folder.glob(f"{HONEST}-*.json"))
        runs = read_runs(folder, HONEST)
        alarms = 0
        for number, path in enumerate(honest):
            others = [*runs[:number], *runs[number + 1 :]]
            problem = first_problem(make_points(others), runs[number])
            alarms += bool(problem)
            if problem:
                print(f"alarm: {path.stem}: {problem}")
        print(f"{folder.name}: {alarms} alarms in {len(honest)} honest runs")
        points = make_points(runs)
        for point in points:
            print(f"  {point}  {LossBand('', tuple(points)).interval(point)}")
        for path in sorted(folder.glob("*.json")):
            if path not in honest:
                problem = first_problem(points, json.loads(path.read_text()))
                print(f"{folder.name}: {path.stem}: {problem or 'not found'}")


def first_problem(points: list[BandPoint], run: dict) -> str:
    band, losses = LossBand("the recipe", tuple(points)), by_step(run)
    problems = (f"step {step}: {band.problem(losses, step)}" for step in losses)
    return next((problem for problem in problems if not problem.endswith(": ")), "")


if __name__ == "__main__":
    app.run(main)
