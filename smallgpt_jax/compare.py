"""Compares architectures at one budget: trains them with several seeds, and writes a report with plots.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report

The first form trains what is not trained yet, one run after another, each in a workdir of its own below
--output; the same command again goes on where it was stopped. Started several times at once, the processes
share the runs. The second takes runs that are there; of a single one it draws the loss. Both leave report.html,
report.md and results.json.
What is equal, how many seeds, which texts: configs/compare/base.py.
"""

import glob
import os
import shlex
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from smallgpt_jax import cli, data, train, workdir
from smallgpt_jax.comparison import budget, measure, results
from smallgpt_jax.errors import Diverged, InTraining, UserError
from smallgpt_jax.files import local_path, locked
from smallgpt_jax.output import best_effort

_CONFIG = cli.define_config()
_WORKDIRS = flags.DEFINE_list("workdirs", None, "Instead of --config: the workdirs of runs that are there; patterns "
                              "with * too.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the comparison; made if it is not there.")
_LOGGED = flags.DEFINE_string("logged", None, "A table model,step,val_loss, as the paper's authors logged their "
                              "runs of 524,288 tokens a step: drawn along in the plot against tokens.")
flags.mark_flags_as_required(["output"])

EQUAL = {
    "tokens": "All runs are trained on as many tokens as {reference}'s recipe says.",
    "flops": "All runs take as many FLOPs of training as {reference}'s recipe.",
    "parameters": "All runs have as many parameters within 2%, by their widths, and are trained on as many tokens as "
                  "{reference}'s recipe says.",
    "seconds": "All runs were to be trained for {seconds:g} seconds each, at the speed that was measured first."}


@best_effort("stdout")
def main() -> None:
    try:
        from smallgpt_jax.comparison import figures, report
    except ImportError:
        raise UserError("comparing needs matplotlib: pip install -e '.[compare]'") from None
    if (_CONFIG.value is None) == (_WORKDIRS.value is None):
        cli.fail("give either --config, a comparison to make, or --workdirs, runs that are there", status=2)
    logged = figures.read_logged(local_path("--logged", _LOGGED.value)) if _LOGGED.value else None
    output = local_path("--output", _OUTPUT.value)
    found = make(output) if _WORKDIRS.value is None else find(output)
    read(found)  # before the folder is made
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / workdir.LOCK_FILE, wait=True):  # who writes last has seen all that is finished
        told = report.write(output, read(found), about(found), logged)
    print(f"\n{told}\n\n{output / 'report.html'}")


def read(found: list[tuple[str, Path]]) -> list[results.Run]:
    """What came of these runs. Raises UserError for folders without one, and for runs that do not compare."""
    runs = [results.read_run(name, folder) for name, folder in found]
    results.check_comparable(runs)
    return runs


def find(output: Path) -> list[tuple[str, Path]]:
    """The runs of --workdirs, with names."""
    for pattern in _WORKDIRS.value:
        local_path("--workdirs", pattern)
    patterns = [os.path.expanduser(pattern) for pattern in _WORKDIRS.value if pattern]
    folders = [Path(folder) for pattern in patterns for folder in sorted(glob.glob(pattern)) or [pattern]]
    if not folders:
        raise UserError("--workdirs: names no run")
    made = output / budget.RUNS_FOLDER
    if made.is_dir() and (output / results.RESULTS_FILE).exists() and not all(
            folder.resolve().parent == made.resolve() for folder in folders):
        raise UserError(f"--output={output}: has the report of runs of its own, {made}; use another --output")
    return results.named(folders)


def make(output: Path) -> list[tuple[str, Path]]:
    """Trains what is not trained yet of --config, and measures of each finished run what the comparison asks
    for. Returns the runs that have begun, with their names."""
    configs, compare = budget.resolved(_CONFIG.value), _CONFIG.value.compare
    tell_own_fields()
    texts = measure.named_sources(compare.texts)
    corpora = measure.corpora(next(iter(configs.values())), texts)  # all of them now, not when the first run has ended
    for name, corpus in corpora.items():
        for config in configs.values():
            measure.Stretch(corpus, config, compare.contexts, name)
    planned = budget.plan(_CONFIG.value, output)
    for run in planned:
        check(run, output, corpora[results.OWN])
    for number, run in enumerate(planned, start=1):
        if results.has_diverged(run.folder):
            print(f"{run.folder}: has diverged before, and stays as it is (smallgpt_jax.main goes on with it)",
                  flush=True)
            continue
        if not workdir.is_finished(run.folder, run.config, corpora[results.OWN]):
            print(f"\n[{number}/{len(planned)}] {run.name}, seed {run.config.train.seed}", flush=True)
            if trouble := train_one(run):
                print(trouble, flush=True)
                continue
        with locked(run.folder / workdir.LOCK_FILE, wait=True):  # another process may be measuring it too
            measure.measure_texts(run.folder, texts, compare.contexts)
            if compare.decoding:
                measure.measure_decoding(run.folder)
    return [(run.name, run.folder) for run in planned if (run.folder / workdir.STORE_FILE).exists()]


def tell_own_fields() -> None:
    """Says which fields that were set for all are not those of a run, since it has its own."""
    for path, value in config_flags.get_override_values(flags.FLAGS["config"]).items():
        group, _, field = path.partition(".")
        for name in budget.names(_CONFIG.value):
            own = _CONFIG.value.runs[name].get(group, {})
            if field in own:
                print(f"--config.{path}={value}: not for {name}, which has its own, {own[field]!r}: "
                      + shlex.quote(f"--config.runs.{name}.{path}"))


def check(run: budget.Planned, output: Path, text: data.Corpus) -> None:
    """Raises UserError if there is another run in the folder of this one, or one of another text."""
    try:
        workdir.check(run.folder, run.config)
        workdir.check_text(run.folder, text)
    except UserError as error:
        told = str(error).removeprefix("--workdir=").replace("another --workdir", "another --output")
        raise UserError(f"--output={output}: {told}") from None


def train_one(run: budget.Planned) -> str:
    """Trains a run to its end; returns why it has not come there, "" if it has."""
    try:
        train.train(run.config, str(run.folder))
    except InTraining as other:
        return f"Left to {other.by}, which is training in it"
    except Diverged as diverged:
        return f"{diverged}\nIt stays as it is; the comparison goes on without it"
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from None
    finally:
        jax.clear_caches()  # this run's programs
    return ""


def about(found: list[tuple[str, Path]]) -> dict[str, str]:
    """What a report says of the comparison as a whole."""
    command = shlex.join(["python", "-m", "smallgpt_jax.compare", *sys.argv[1:]])
    if _CONFIG.value is None:
        names = dict.fromkeys(name for name, _ in found)
        return {"title": "Comparison" if len(names) > 1 else next(iter(names)), "command": command,
                "budget": "Trained one by one, each as its config says." if len(found) > 1 else
                          "One run, trained as its config says."}
    compare, count = _CONFIG.value.compare, len(budget.names(_CONFIG.value))
    return {"title": f"{count} model{'s' * (count != 1)} at equal {compare.budget}",
            "budget": EQUAL[compare.budget].format(**compare), "command": command}


if __name__ == "__main__":
    cli.run(main)
