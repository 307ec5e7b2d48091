"""Compares architectures at one budget: trains them with several seeds, and writes a report with plots.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report

The first form trains what is not trained yet, one run after another, each in a workdir of its own below
--output; the same command again goes on where it was stopped. Started several times at once, the processes
share the runs. The second takes runs that are there. Both leave report.html, report.md and results.json.
What is equal, how many seeds, which texts: configs/compare/base.py.
"""

import shlex
import sys
from pathlib import Path

import jax
from absl import flags

from smallgpt_jax import cli, train, workdir
from smallgpt_jax.comparison import budget, measure, results
from smallgpt_jax.errors import Diverged, InTraining, UserError

_CONFIG = cli.define_config()
_WORKDIRS = flags.DEFINE_list("workdirs", None, "Instead of --config: the workdirs of runs that are there.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the comparison; made if it is not there.")
_LOGGED = flags.DEFINE_string("logged", None, "A table model,step,val_loss, as the paper's authors logged their "
                              "runs of 524,288 tokens a step: drawn along in the plot against tokens.")
flags.mark_flags_as_required(["output"])
FLAGS = flags.FLAGS

BUDGETS = {
    "tokens": "All runs are trained on as many tokens",
    "flops": "All runs take as many FLOPs of training",
    "parameters": "All runs have as many parameters within 2%, by their widths, and are trained on as many tokens",
    "seconds": "All runs are trained for as long on this machine"}


def main() -> None:
    try:
        from smallgpt_jax.comparison import figures, report
    except ImportError:
        raise UserError("comparing needs matplotlib: pip install -e '.[compare]'") from None
    if (_CONFIG.value is None) == (_WORKDIRS.value is None):
        raise UserError("name what to compare: --config, a comparison to make, or --workdirs, runs that are there")
    logged = figures.read_logged(Path(_LOGGED.value)) if _LOGGED.value else None
    output = Path(_OUTPUT.value).expanduser()
    if _WORKDIRS.value is not None:
        found = results.named([Path(folder).expanduser() for folder in _WORKDIRS.value if folder])
        if not found:
            raise UserError("--workdirs: names no run")
        about = {"title": "Comparison", "budget": "These runs were trained one by one, each as its config says."}
    else:
        planned = budget.plan(_CONFIG.value, output)
        make(planned)
        compare = _CONFIG.value.compare
        found = [(run.name, run.folder) for run in planned if (run.folder / workdir.CONFIG_FILE).exists()]
        equal = BUDGETS[compare.budget] + (f": {compare.seconds:g} s." if compare.budget == "seconds" else
                                           f" as {compare.reference}'s recipe has.")
        about = {"title": f"{len(budget.names(_CONFIG.value))} models at equal {compare.budget}", "budget": equal}
    runs = [results.read_run(name, folder) for name, folder in found]
    results.check_comparable(runs)
    about["command"] = shlex.join(["python", "-m", "smallgpt_jax.compare", *sys.argv[1:]])
    print(f"\n{report.write(output, runs, about, logged)}\n\n{output / 'report.html'}")


def make(planned: list[budget.Planned]) -> None:
    """Trains what is not trained yet, and measures of each finished run what the comparison asks for."""
    compare = _CONFIG.value.compare
    texts = measure.named_sources(compare.texts)
    for run in planned:
        workdir.check(run.folder, run.config)
    for number, run in enumerate(planned, start=1):
        title = f"[{number}/{len(planned)}] {run.name}, seed {run.config.train.seed}"
        if not train.is_finished(run.folder, run.config.train.steps):
            print(f"\n{title}", flush=True)
            try:
                train.train(run.config, str(run.folder))
            except InTraining as other:
                print(f"{other}. Left to it", flush=True)
                continue
            except Diverged as diverged:
                print(f"{diverged}\nLeft as it is; the comparison goes on without it", flush=True)
                continue
            except UserError as error:
                raise UserError(f"{run.name}: {error}") from None
            jax.clear_caches()  # programs of this run
        measure.measure_texts(run.folder, texts, compare.contexts)
        if compare.decoding:
            measure.measure_decoding(run.folder)


if __name__ == "__main__":
    cli.run(main)
