"""Compares models: makes a record, by training or from existing runs and records, and reports on it.

report = compare("compare/paper:tiny", "runs/paper", {"compare.seeds": 3})
report = compare_runs(["runs/gpt", "runs/pgpt"], "runs/report")
report = merge_results(["a/results.json", "b/results.json"], "runs/merged")
print(report)
"""

import glob
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.record import RESULTS_FILE, Record, model_of
from smallgpt_jax.comparison import comparability, dry_run, held_out, merging, recipe
from smallgpt_jax.comparison.dry_run import Forecast
from smallgpt_jax.comparison.outcomes import Outcomes, read_recorded
from smallgpt_jax.comparison.queue import Queue, check_existing
from smallgpt_jax.comparison.run_reader import name_workdirs, read_run
from smallgpt_jax.comparison.runs import RUNS_FOLDER, PlannedRun
from smallgpt_jax.config.recipes import ConfigLike, load_config
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.diagnosis.summary import read_summary
from smallgpt_jax.diagnosis.windows import WINDOWS
from smallgpt_jax.errors import UserError, require_list
from smallgpt_jax.evaluation import inference_cost, texts
from smallgpt_jax.report import figures, page
from smallgpt_jax.report.page import Report
from smallgpt_jax.report.words import plural
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.custom_code import import_training_code
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, match
from smallgpt_jax.storage.paths import as_path, local_path, resolve

_SENTENCES = {  # about what all runs have in common, by config.compare.budget
    "tokens": "All runs are trained on as many tokens as {reference}'s recipe.",
    "flops": "All runs are trained for as many FLOPs as {reference}'s recipe.",
    "parameters": "All runs have the same number of parameters within 2%, reached by changing their "
    "widths, and are trained on as many tokens as {reference}'s recipe.",
    "seconds": "All runs are trained for {seconds:g} seconds at the speed measured before the "
    "first run.",
    "own": "Each run is trained for its own number of steps.",
}
REPORTING_FRACTION = 0.05  # of the time, that reports between runs may take


def compare(
    config: ConfigLike,
    output: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    results: Sequence[str] = (),
    command: str = "",
    logged: str | None = None,
) -> Report:
    """Trains the runs of a comparison that are missing in the folder `output`; returns their record
    and findings, and writes them there; print() shows the answers.

    `config` is the recipe of a comparison or its fields; `overrides` are further values, such as
    {"compare.seeds": 3}. Finished runs of `results`, paths of results.json, are taken over.
    `command` repeats the comparison. `logged` is a CSV file of losses that the paper's authors
    logged. Raises UserError, and StoppedError after a stop request.
    """
    folder = as_path("--output", str(output))
    curves = _read_logged(logged)
    comparison = TrainedComparison(load_config(config, overrides), folder, results, command)
    comparison.train(lambda record: _report(record, folder, curves))
    return _report(comparison.record(), folder, curves)


def compare_runs(
    workdirs: Sequence[str],
    output: str | Path,
    *,
    command: str = "",
    logged: str | None = None,
    trust_custom_code: bool = False,
) -> Report:
    """Reports on existing runs, of which the first is the reference; see `compare`."""
    folder = as_path("--output", str(output))
    curves = _read_logged(logged)
    record = _record_of_workdirs(workdirs, folder, command, trust_custom_code)
    return _report(record, folder, curves)


def merge_results(
    results: Sequence[str], output: str | Path, *, command: str = "", logged: str | None = None
) -> Report:
    """Merges the records of comparisons, paths of results.json, and reports on them."""
    folder = as_path("--output", str(output))
    curves = _read_logged(logged)
    paths = result_paths(results)
    _refuse_reported(folder)
    record = merging.merge([(path, records.read(path)) for path in paths], command)
    return _report(record, folder, curves)


def plan_comparison(
    config: ConfigLike,
    output: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    results: Sequence[str] = (),
    topology: str | None = None,
) -> Forecast:
    """Returns what the runs that are missing in `output` will cost, on this machine or `topology`;
    print() shows a table.

    Trains nothing, but measures the speed of steps, unless a topology is given.
    """
    folder = as_path("--output", str(output))
    comparison = TrainedComparison(load_config(config, overrides), folder, results, "")
    return dry_run.forecast(comparison.outcomes, topology)


def _read_logged(path: str | None) -> figures.LoggedCurves:
    # Before the training, so that a damaged file is refused at once.
    return figures.read_logged(local_path("--logged", path)) if path else {}


def _report(record: Record, folder: Path, logged: figures.LoggedCurves) -> Report:
    findings = analyse(record)
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may write the report.
    with file_lock(folder / LOCK_FILE, wait=True):
        page.write(folder, record, findings, logged)
    return Report(record, findings)


# ------------------------------------------------------------------ trained runs
class TrainedComparison:
    """A comparison whose runs are trained in a folder."""

    def __init__(self, config: ConfigDict, output: Path, results: Sequence[str], command: str):
        """Raises UserError for what would fail later: configs, texts, workdirs and records."""
        configs = [Config.of(run) for run in recipe.resolve_runs(config).values()]
        for run in configs:  # or reading their workdirs would ask whether to trust it
            import_training_code(run)
        self.config, self.compare, self.command = config, config.compare, command
        self.sources = texts.parse_texts(config.compare.texts)
        text = _open_text(configs, self.sources, self.compare.contexts)
        comparison = recipe.make_comparison(config, output)
        for run in comparison.runs({}):  # those that are known before any loss is
            check_existing(run, output, text)
        record = read_recorded(comparison, result_paths(results), text) if results else None
        self.outcomes = Outcomes(comparison, text, record)
        self.losses: Mapping[Path, float] = {}

    def train(self, report) -> None:
        """Trains and measures the runs. `report` gets records of the runs so far, now and then."""
        if not self.compare.train:
            self.losses = self.outcomes.losses()
            return  # reports on what is finished
        # A report takes longer, the more runs there are. Without a limit, most of the time of short
        # runs would go into reports.
        due = 0.0  # when the next report may be written

        def after_run() -> None:
            nonlocal due
            started = time.monotonic()
            if started >= due:
                report(self.record())
                ended = time.monotonic()
                due = ended + (ended - started) / REPORTING_FRACTION

        queue = Queue(self.outcomes, self._measure, after_run)
        self.losses = queue.losses
        try:
            queue.train(self.command)
        except UserError:
            report(self.record())
            raise

    def _measure(self, run: PlannedRun) -> None:
        if self.outcomes.recorded(run):
            return  # was measured where it was trained, and has no workdir here
        with file_lock(run.folder / LOCK_FILE, wait=True):  # another process may be measuring it
            texts.measure_texts(run.folder, self.sources, self.compare.contexts)
            if self.compare.decoding:
                inference_cost.measure_inference(run.folder)
            if self.compare.diagnose:
                diagnose_run(run.folder)

    def record(self) -> Record:
        """Returns the record of the runs that are finished so far."""
        names = recipe.run_names(self.config)
        models = plural(len(set(map(model_of, names))), "model")
        equal = "" if self.compare.budget == "own" else f" at equal {self.compare.budget}"
        comparison = self.outcomes.comparison
        predictions = held_out.read_predictions(comparison.output) if comparison.held_out else None
        return Record(
            title=f"{models}{equal}",
            budget=_SENTENCES[self.compare.budget].format(**self.compare),
            command=self.command,
            reference=self.compare.reference,
            runs=comparability.require_comparable(self.outcomes.runs(self.losses)),
            learning_rates=comparison.grids(self.losses),
            held_out=comparison.held_out,
            predictions=predictions,
            seeds_as_needed=comparison.rounds is not None,
        )


def _open_text(
    configs: Sequence[Config], sources: dict[str, str], contexts: Sequence[int]
) -> Corpus:
    """Returns the text of all runs. Raises UserError if it or a text of `sources`, {name: source},
    is too short for rows of `contexts` context lengths.
    """
    corpora = texts.open_texts(configs[0], sources)
    for name, corpus in corpora.items():
        for run in configs:
            if run.data.format == "text":
                texts.TextSample(corpus, run, contexts, name)
    return corpora[texts.OWN_TEXT]


def diagnose_run(folder: Path) -> None:
    """Writes diagnosis/diagnose.json and its plots, unless they exist for the last step."""
    from smallgpt_jax.diagnosis import diagnosis  # here, because it imports matplotlib

    steps = read_config(folder).train.steps
    if read_summary(folder, steps):
        return
    try:
        diagnosis.diagnose(folder, step=steps, windows=WINDOWS, deep=0)
    except UserError as error:  # a custom architecture, or a masked model
        print(f"{folder.name}: not observed: {error}", flush=True)


# ------------------------------------------------------------------ existing runs and records
def _record_of_workdirs(
    patterns: Sequence[str], output: Path, command: str, trust_custom_code: bool
) -> Record:
    """Returns the record of existing runs. The first one is the reference."""
    require_list("workdirs", patterns)
    folders = [folder for pattern in filter(None, patterns) for folder in _find_folders(pattern)]
    if not folders:
        raise UserError("--workdirs: the list is empty; name at least one run")
    own_runs = resolve(output / RUNS_FOLDER)
    # The report of a comparison's own runs may be written again.
    if not all(resolve(folder).parent == own_runs for folder in folders):
        _refuse_reported(output)
    runs = []
    for name, folder in name_workdirs(folders):
        runs.append(read_run(name, folder, trust_custom_code=trust_custom_code))
    first, *others = dict.fromkeys(run.name for run in runs)
    budget = "Separately trained runs, each with its own config." if runs[1:] else "A single run."
    return Record(
        title="Comparison" if others else first,
        budget=budget,
        command=command,
        reference=first,
        runs=comparability.require_comparable(tuple(runs)),
    )


def _find_folders(pattern: str) -> list[Path]:
    """Returns what a pattern matches, which may be in object storage; else the pattern itself."""
    path = as_path("--workdirs", pattern)
    if is_remote(path):
        return sorted(match(path)) or [path]
    return sorted(map(Path, glob.glob(os.path.expanduser(pattern)))) or [path]


def _refuse_reported(output: Path) -> None:
    """Raises UserError if a report here would replace that of a trained comparison."""
    own_runs = output / RUNS_FOLDER
    if own_runs.is_dir() and (output / RESULTS_FILE).exists():
        raise UserError(
            f"--output={output}: contains the report of other runs, which are in {own_runs}; use "
            "another --output"
        )


def result_paths(results: Sequence[str]) -> list[Path]:
    require_list("results", results)
    paths = [as_path("--results", path) for path in dict.fromkeys(results) if path]
    if not paths:
        raise UserError("--results: the list is empty; name at least one results.json")
    return paths
