"""Compares architectures at one budget: trains them with several seeds, and writes a report with plots.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report

The first form trains what is not trained yet, one run after another, each in a workdir of its own below
--output; the same command again goes on where it was stopped. Started several times at once, the processes
share the runs. The second takes runs that are there. Both leave report.html, report.md and results.json.
What is equal, how many seeds, which texts: configs/compare/base.py.
"""

import glob
import os
import shlex
import sys
from pathlib import Path

import jax
from absl import flags

from smallgpt_jax import cli, train, workdir
from smallgpt_jax.comparison import budget, measure, results
from smallgpt_jax.errors import Diverged, InTraining, UserError
from smallgpt_jax.files import locked

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


def main() -> None:
    try:
        from smallgpt_jax.comparison import figures, report
    except ImportError:
        raise UserError("comparing needs matplotlib: pip install -e '.[compare]'") from None
    if (_CONFIG.value is None) == (_WORKDIRS.value is None):
        cli.fail("give either --config, a comparison to make, or --workdirs, runs that are there", status=2)
    logged = figures.read_logged(Path(_LOGGED.value)) if _LOGGED.value else None
    output = Path(_OUTPUT.value).expanduser()
    found = make(output) if _WORKDIRS.value is None else find()
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / workdir.LOCK_FILE, wait=True):  # who writes last has seen all that is finished
        runs = [results.read_run(name, folder) for name, folder in found]
        results.check_comparable(runs)
        told = report.write(output, runs, about(), logged)
    print(f"\n{told}\n\n{output / 'report.html'}")


def find() -> list[tuple[str, Path]]:
    """The runs of --workdirs, with names."""
    patterns = [os.path.expanduser(pattern) for pattern in _WORKDIRS.value if pattern]
    folders = [Path(folder) for pattern in patterns for folder in sorted(glob.glob(pattern)) or [pattern]]
    if not folders:
        raise UserError("--workdirs: names no run")
    return results.named(folders)


def make(output: Path) -> list[tuple[str, Path]]:
    """Trains what is not trained yet of --config, and measures of each finished run what the comparison asks
    for. Returns the runs that have begun, with their names."""
    planned, compare = budget.plan(_CONFIG.value, output), _CONFIG.value.compare
    texts = measure.named_sources(compare.texts)
    for run in planned:
        check(run, output)
    for name, corpus in measure.corpora(planned[0].config, texts).items():  # now, not when the first run has ended
        for config in {run.name: run.config for run in planned}.values():
            measure.Stretch(corpus, config, compare.contexts, name)
    for number, run in enumerate(planned, start=1):
        if results.has_diverged(run.folder):
            print(f"{run.folder}: has diverged before, and stays as it is (smallgpt_jax.main goes on with it)",
                  flush=True)
            continue
        if not train.is_finished(run.folder, run.config.train.steps):
            print(f"\n[{number}/{len(planned)}] {run.name}, seed {run.config.train.seed}", flush=True)
            if trouble := train_one(run):
                print(trouble, flush=True)
                continue
        with locked(run.folder / workdir.LOCK_FILE, wait=True):  # another process may be measuring it too
            measure.measure_texts(run.folder, texts, compare.contexts)
            if compare.decoding:
                measure.measure_decoding(run.folder)
    return [(run.name, run.folder) for run in planned if (run.folder / workdir.STORE_FILE).exists()]


def check(run: budget.Planned, output: Path) -> None:
    """Raises UserError if there is another run in the folder of this one."""
    done, steps = results.steps_done(run.folder), run.config.train.steps
    if done > steps:
        raise UserError(f"--output={output}: {run.name} was trained for {done} steps there, now {steps} are asked for; "
                        "use another --output")
    try:
        workdir.check(run.folder, run.config)
    except UserError as error:
        raise UserError(f"--output={output}: holds the runs of another comparison; use another one. {error}") from None


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


def about() -> dict[str, str]:
    """What a report says of the comparison as a whole."""
    command = shlex.join(["python", "-m", "smallgpt_jax.compare", *sys.argv[1:]])
    if _CONFIG.value is None:
        return {"title": "Comparison", "budget": "Runs that were trained one by one, each as its config says.",
                "command": command}
    compare, count = _CONFIG.value.compare, len(budget.names(_CONFIG.value))
    return {"title": f"{count} models at equal {compare.budget}", "budget": EQUAL[compare.budget].format(**compare),
            "command": command}


if __name__ == "__main__":
    cli.run(main)
