"""Compares models at an equal budget: trains them with several seeds and writes a report with
plots.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper --dry_run
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report
    python -m smallgpt_jax.compare --results=a/results.json,b/results.json --output=runs/merged
    python -m smallgpt_jax.compare --config=configs/compare/paper.py --results=a/results.json --output=runs/more

The first form trains the runs of a comparison one after another, each in its own workdir under
--output, and updates the report as they finish. Rerun the same command to resume. Several processes
with the same command divide the runs among themselves. The second form only says what this will
cost. The third form reports on one or more existing runs. The fourth form merges the results of
comparisons, without the workdirs of their runs. The last form continues a comparison: it takes the
finished runs over from results that were made elsewhere, and trains the others. All write
report.html, report.md and results.json.

smallgpt_jax/comparison/config.py documents the fields of a comparison: its budget, seeds and
measurements.
"""

import shlex
import sys

from absl import flags
from ml_collections import config_flags

from smallgpt_jax import cli
from smallgpt_jax.output import best_effort
from smallgpt_jax.storage.paths import as_path, local_path

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
_DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Train nothing; print the runs, tokens, FLOPs and hours that are missing, at the speed of this "
    "machine, which is measured, or of --topology.",
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "With --dry_run: devices as in the command plan, such as h100:1 or v5e:2x2."
)
flags.mark_flags_as_required(["output"])


@best_effort("stdout")
def main() -> None:
    from smallgpt_jax.comparison import comparing, dry_run, recipe

    _check_flags()
    config, results = _CONFIG.value, _RESULTS.value or ()
    if config is not None:
        overrides = config_flags.get_override_values(flags.FLAGS["config"])
        for line in recipe.ignored_overrides(config, overrides):
            print(line)
    command = repeating_command()
    if config is not None:
        print(dry_run.commands_per_gpu(command), end="", flush=True)
    if _DRY_RUN.value:
        forecast = comparing.plan_comparison(
            config, _OUTPUT.value, results=results, topology=_TOPOLOGY.value
        )
        print(forecast)
        return
    report = comparing.compare(
        config,
        _OUTPUT.value,
        workdirs=_WORKDIRS.value,
        results=results,
        command=command,
        logged=local_path("--logged", _LOGGED.value) if _LOGGED.value else None,
        trust_custom_code=flags.FLAGS.trust_custom_code,
    )
    print(f"\n{report}\n{as_path('--output', _OUTPUT.value) / 'report.html'}")


def _check_flags() -> None:
    is_given = tuple(flag.value is not None for flag in (_CONFIG, _WORKDIRS, _RESULTS))
    if sum(is_given) != 1 and is_given != (True, False, True):
        cli.fail(
            "give either --config (a comparison to train), --workdirs (existing runs) or "
            "--results (results to merge); --results may be combined with --config",
            status=2,
        )
    if _DRY_RUN.value and _CONFIG.value is None:
        cli.fail("--dry_run: needs --config, a comparison to train", status=2)
    if _TOPOLOGY.value and not _DRY_RUN.value:
        cli.fail("--topology: needs --dry_run", status=2)


def repeating_command() -> str:
    """Returns the command without flags that keep it from training."""
    dropped = ("--config.compare.train=false", "--dry_run", "--dry_run=true")
    kept = [
        argument
        for argument in sys.argv[1:]
        if argument not in dropped and not argument.startswith("--topology=")
    ]
    return shlex.join(["python", "-m", "smallgpt_jax.compare", *kept])


if __name__ == "__main__":
    cli.run(main)
