"""Compares models at an equal budget: trains them with several seeds and writes a report with
plots.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report
    python -m smallgpt_jax.compare --results=a/results.json,b/results.json --output=runs/merged
    python -m smallgpt_jax.compare --config=configs/compare/paper.py --results=a/results.json --output=runs/more

The first form trains the runs of a comparison one after another, each in its own workdir under
--output. Rerun the same command to resume. Several processes with the same command divide the runs
among themselves. The second form reports on one or more existing runs. The third form merges the
results of comparisons, without the workdirs of their runs. The fourth form continues a comparison:
it takes the finished runs over from results that were made elsewhere, and trains the others. All
write report.html, report.md and results.json.

smallgpt_jax/comparison/config.py documents the fields of a comparison: its budget, seeds and
measurements.
"""

import functools
import glob
import os
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from smallgpt_jax import cli
from smallgpt_jax.comparison import (
    budget,
    inference_cost,
    measure,
    prediction,
    recorded,
    records,
    results,
    training,
)
from smallgpt_jax.comparison.names import RESULTS_FILE, model_of
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.runs import RUNS_FOLDER, Comparison, PlannedRun
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import UserError
from smallgpt_jax.output import best_effort
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, match
from smallgpt_jax.storage.paths import as_path, local_path, resolve

_CONFIG = cli.define_config()
_WORKDIRS = flags.DEFINE_list(
    "workdirs",
    None,
    "Workdirs of existing runs, instead of --config; patterns with * are expanded.",
)
_RESULTS = flags.DEFINE_list(
    "results",
    None,
    "results.json files of comparisons. Without --config, they are merged. "
    "With --config, the runs in them are not trained again.",
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the comparison, created if missing.")
_LOGGED = flags.DEFINE_string(
    "logged",
    None,
    "CSV file with the columns model,step,val_loss. It contains losses that "
    "the paper's authors logged (524,288 tokens per step). They are added to the plot of "
    "loss against tokens.",
)
flags.mark_flags_as_required(["output"])

BUDGET_DESCRIPTIONS = {
    "tokens": "All runs are trained on as many tokens as {reference}'s recipe.",
    "flops": "All runs are trained for as many FLOPs as {reference}'s recipe.",
    "parameters": "All runs have the same number of parameters within 2%, reached by changing their widths, and are "
    "trained on as many tokens as {reference}'s recipe.",
    "seconds": "All runs are trained for {seconds:g} seconds at the speed measured before the first run.",
    "own": "Each run is trained for its own number of steps.",
}


@best_effort("stdout")
def main() -> None:
    from smallgpt_jax.comparison import (
        figures,
        report,
    )  # here, because they import matplotlib, which takes time

    given = tuple(flag.value is not None for flag in (_CONFIG, _WORKDIRS, _RESULTS))
    if sum(given) != 1 and given != (True, False, True):
        cli.fail(
            "give either --config (a comparison to train), --workdirs (existing runs) or "
            "--results (results to merge); --results may be combined with --config",
            status=2,
        )
    logged = figures.read_logged(local_path("--logged", _LOGGED.value)) if _LOGGED.value else None
    output = as_path("--output", _OUTPUT.value)
    if _CONFIG.value is None and _RESULTS.value is not None:
        read_record = functools.partial(merge_results, output)
    elif _CONFIG.value is None:
        read_record = functools.partial(record_of_workdirs, find_runs(output))
    else:
        read_record = functools.partial(record_of_comparison, *train_runs(output))
    read_record()  # raises UserError before the folder is created
    output.mkdir(parents=True, exist_ok=True)
    # Several processes may write the report. The lock makes them wait for each other, so the last
    # report has all runs.
    with file_lock(output / LOCK_FILE, wait=True):
        summary = report.write_report(output, read_record(), logged)
    print(f"\n{summary}\n\n{output / 'report.html'}")


def record_of_comparison(comparison: Comparison, losses: dict[Path, float]) -> Record:
    compare, names = _CONFIG.value.compare, budget.run_names(_CONFIG.value)
    count = len(set(map(model_of, names)))
    equal = "" if compare.budget == "own" else f" at equal {compare.budget}"
    return Record(
        f"{count} model{'s' * (count != 1)}{equal}",
        BUDGET_DESCRIPTIONS[compare.budget].format(**compare),
        repeating_command(),
        compare.reference,
        results.require_comparable(comparison.known_results(losses)),
        comparison.grids(losses),
        compare.held_out,
        prediction.read(comparison.output / prediction.PREDICTIONS_FILE)
        if compare.held_out
        else None,
    )


def record_of_workdirs(workdirs: list[tuple[str, Path]]) -> Record:
    """`workdirs` are names and workdirs of runs. The first one is the reference."""
    first, *others = dict.fromkeys(name for name, _ in workdirs)
    runs = tuple(
        results.read_run(name, folder, flags.FLAGS.trust_custom_code) for name, folder in workdirs
    )
    return Record(
        "Comparison" if others else first,
        "Separately trained runs, each with its own config." if len(runs) > 1 else "A single run.",
        repeating_command(),
        first,
        results.require_comparable(runs),
    )


def merge_results(output: Path) -> Record:
    """Raises UserError if `output` contains the report of other runs."""
    paths = recorded_paths()
    if (output / RUNS_FOLDER).is_dir() and (output / RESULTS_FILE).exists():
        raise UserError(
            f"--output={output}: contains the report of other runs; use another --output"
        )
    return records.merge([(path, records.read(path)) for path in paths], repeating_command())


def recorded_paths() -> list[Path]:
    paths = [as_path("--results", path) for path in dict.fromkeys(_RESULTS.value) if path]
    if not paths:
        raise UserError("--results: the list is empty; name at least one results.json")
    return paths


def find_runs(output: Path) -> list[tuple[str, Path]]:
    """Returns the names and workdirs of the runs in --workdirs. Refuses to overwrite the report of
    other runs.
    """
    patterns = [pattern for pattern in _WORKDIRS.value if pattern]
    folders = [folder for pattern in patterns for folder in find_folders(pattern)]
    if not folders:
        raise UserError("--workdirs: the list is empty; name at least one run")
    own = output / RUNS_FOLDER
    if (
        own.is_dir()
        and (output / RESULTS_FILE).exists()
        and not all(resolve(folder).parent == resolve(own) for folder in folders)
    ):
        raise UserError(
            f"--output={output}: contains the report of other runs, which are in {own}; use "
            "another --output"
        )
    return results.name_workdirs(folders)


def find_folders(pattern: str) -> list[Path]:
    """The pattern may be in object storage. A local pattern that ends with / matches only
    folders.
    """
    path = as_path("--workdirs", pattern)
    found = match(path) if is_remote(path) else map(Path, glob.glob(os.path.expanduser(pattern)))
    return sorted(found) or [path]


def train_runs(output: Path) -> tuple[Comparison, dict[Path, float]]:
    """Returns the comparison and {folder: loss} of the finished runs.

    For a model with a grid, only the runs at the best learning rate are measured.
    """
    configs, compare = (
        [*map(Config.of, budget.resolve_runs(_CONFIG.value).values())],
        _CONFIG.value.compare,
    )
    print_ignored_overrides()
    texts = measure.parse_texts(compare.texts)
    corpora = measure.open_texts(configs[0], texts)  # raises UserError before training starts
    for name, corpus in corpora.items():
        for config in configs:
            if config.data.format == "text":
                measure.TextSample(corpus, config, compare.contexts, name)
    comparison = budget.make_comparison(_CONFIG.value, output)
    for run in comparison.runs({}):
        training.check_existing(run, output, corpora[results.OWN_TEXT])
    if _RESULTS.value is not None:
        comparison = recorded.take_over(comparison, recorded_paths(), corpora[results.OWN_TEXT])
    if compare.train:
        return comparison, train_comparison(comparison, corpora[results.OWN_TEXT], texts)
    return comparison, training.known_losses(comparison, corpora[results.OWN_TEXT])


def train_comparison(
    comparison: Comparison, text: Corpus, texts: dict[str, str]
) -> dict[Path, float]:
    """Trains the runs, measures them, and predicts the held-out ones. Returns {folder: loss} of the
    finished runs.
    """
    compare = _CONFIG.value.compare

    def measure_run(run: PlannedRun) -> None:
        if comparison.recorded_run(run):
            return
        with file_lock(
            run.folder / LOCK_FILE, wait=True
        ):  # another process may be measuring the run
            measure.measure_texts(run.folder, texts, compare.contexts)
            if compare.decoding:
                inference_cost.measure_inference(run.folder)
            if compare.diagnose:
                measure.observe(run.folder)

    return training.train_comparison(comparison, text, measure_run, repeating_command())


def print_ignored_overrides() -> None:
    """Prints each --config.GROUP.FIELD flag that does not apply to a run, because the run overrides
    that field.
    """
    for path, value in config_flags.get_override_values(flags.FLAGS["config"]).items():
        group, _, field = path.partition(".")
        for name in budget.run_names(_CONFIG.value):
            own = budget.own_fields(_CONFIG.value, name).get(group, {})
            if field in own:
                print(
                    f"--config.{path}={value}: does not apply to {name}, which sets the field to "
                    f"{own[field]!r}; use " + shlex.quote(f"--config.runs.{name}.{path}")
                )


def repeating_command() -> str:
    given = [
        argument for argument in sys.argv[1:] if argument != "--config.compare.train=false"
    ]  # trains nothing
    return shlex.join(["python", "-m", "smallgpt_jax.compare", *given])


if __name__ == "__main__":
    cli.run(main)
