"""Compares models at an equal budget: trains them with several seeds and writes a report.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper
    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper --dry_run
    python -m smallgpt_jax.compare --workdirs=runs/gpt,runs/pgpt --output=runs/report
    python -m smallgpt_jax.compare --results=a/results.json,b/results.json --output=runs/merged
    python -m smallgpt_jax.compare --config=configs/compare/paper.py --results=a/results.json --output=runs/more
    python -m smallgpt_jax.compare --verify=a/results.json --output=runs/check --sample=3
    python -m smallgpt_jax.compare --results=a/results.json --bundle=a/bundle
    python -m smallgpt_jax.compare --config=CANDIDATE --against=a/results.json --output=runs/gate

The first form trains the runs of a comparison one after another, each in its own workdir under
--output, and updates the report as they finish. Rerun the same command to resume. Several processes
with the same command divide the runs among themselves. The second form only says what this will
cost. The third form reports on one or more existing runs. The fourth form merges the results of
comparisons, without the workdirs of their runs. The fifth form continues a comparison: it takes the
finished runs over from results that were made elsewhere, and trains the others. These forms write
report.html, report.md and results.json.

The last three forms (docs/records.md) check a record that somebody else has made, by training some
of its runs again (exit status 0: reproduced, 1: not reproduced, 2: cannot tell); write a folder with
all that such a check needs; and ask whether one config is better than a model of a record, at a
level that holds for all questions of a search (exit status 0: better, 1: worse, 2: not told).

smallgpt_jax/comparison/config.py documents the fields of a comparison: its budget, seeds and
measurements.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from smallgpt_jax import cli
from smallgpt_jax.output import best_effort
from smallgpt_jax.storage.paths import as_path

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
    "CSV file with the columns model,step,val_loss: losses that the paper's authors logged (524,288 "
    "tokens per step), which are added to the plot of loss against tokens.",
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
_VERIFY = flags.DEFINE_string(
    "verify", None, "results.json, or folder of --bundle: check this record. Needs only --output."
)
_SAMPLE = flags.DEFINE_integer("sample", 3, "With --verify: number of runs to train again.")
_FRACTION = flags.DEFINE_float(
    "fraction",
    0.1,
    "With --verify: fraction of the steps of these runs that is trained, at least up to the first "
    "evaluation.",
)
_ONLY = flags.DEFINE_string(
    "only",
    "*",
    "With --verify: pattern of the names of runs to train again, such as *@45k. With --against: name "
    "of the run to compare with. Default: the record's reference.",
)
_NONCE = flags.DEFINE_string(
    "nonce", "", "With --verify: word that, with the record, draws the runs. Default: a random one."
)
_AGAINST = flags.DEFINE_string(
    "against", None, "With --config of one run, the candidate: results.json to compare it with."
)
_BUNDLE = flags.DEFINE_string(
    "bundle", None, "With one --results: new folder for all that a check of the record needs."
)


# Purpose of the command → the sets of source flags (--config, --workdirs, --results) that it takes,
# and the message about any other set.
_SOURCES = {
    "bundle": ([{"results"}], "--bundle: needs one --results, and no --config or --workdirs"),
    "verify": ([set()], "--verify: cannot be combined with --config, --workdirs or --results"),
    "against": ([{"config"}], "--against: needs --config, and no --workdirs or --results"),
    "compare": (
        [{"config"}, {"workdirs"}, {"results"}, {"config", "results"}],
        "give either --config (a comparison to train), --workdirs (existing runs) or "
        "--results (results to merge); --results may be combined with --config",
    ),
}
# {flag: purposes that it belongs to}
_OPTIONS = {
    "sample": ("verify",),
    "fraction": ("verify",),
    "nonce": ("verify",),
    "only": ("verify", "against"),
    "logged": ("compare",),
    "dry_run": ("compare",),
    "topology": ("compare",),
}


@best_effort("stdout")
def main() -> None:
    named = [flag.name for flag in (_BUNDLE, _VERIFY, _AGAINST) if flag.value is not None]
    sources = {flag.name for flag in (_CONFIG, _WORKDIRS, _RESULTS) if flag.value is not None}
    purpose = _one_purpose(named, sources)
    _check_options(purpose, [name for name in _OPTIONS if flags.FLAGS[name].present])
    config, results = _CONFIG.value, _RESULTS.value or ()
    if purpose == "bundle":
        _write_bundle(results, _BUNDLE.value)
        return
    if _OUTPUT.value is None:
        cli.fail("--output must be given; see --help", status=2)
    if purpose == "verify":
        sample = {
            "size": _SAMPLE.value,
            "fraction": _FRACTION.value,
            "names": _ONLY.value,
            "nonce": _NONCE.value,
        }
        sys.exit(_verify(_VERIFY.value, _OUTPUT.value, sample, flags.FLAGS.trust_custom_code))
    if purpose == "against":
        sys.exit(_ask_gate(config, _AGAINST.value, _OUTPUT.value, _ONLY.value))
    # Here, because the other purposes need no trainer and no plots.
    from smallgpt_jax.comparison import comparing

    if _DRY_RUN.value and config is None:
        cli.fail("--dry_run: needs --config, a comparison to train", status=2)
    if _TOPOLOGY.value and not _DRY_RUN.value:
        cli.fail("--topology: needs --dry_run", status=2)
    command, output = _repeating_command(), _OUTPUT.value
    if config is not None:
        overrides = config_flags.get_override_values(flags.FLAGS["config"])
        _print_hints(config, overrides, command)
    described = {"command": command, "logged": _LOGGED.value}
    if _DRY_RUN.value:
        print(comparing.plan_comparison(config, output, results=results, topology=_TOPOLOGY.value))
        return
    if config is not None:
        report = comparing.compare(config, output, results=results, **described)
    elif _WORKDIRS.value is not None:
        trust = flags.FLAGS.trust_custom_code
        report = comparing.compare_runs(
            _WORKDIRS.value, output, **described, trust_custom_code=trust
        )
    else:
        report = comparing.merge_results(results, output, **described)
    print(f"\n{report}\n{as_path('--output', output) / 'report.html'}")


def _one_purpose(purposes: Sequence[str], sources: set[str]) -> str:
    """Returns a key of _SOURCES. Exits with status 2 if the flags do not fit together.

    `purposes` are the names of the purpose flags that the user has set, `sources` those of the
    source flags, such as {"config", "results"}.
    """
    if len(purposes) > 1:
        cli.fail(f"--{purposes[0]}: cannot be combined with --{purposes[1]}", status=2)
    purpose = purposes[0] if purposes else "compare"
    allowed_sets, message = _SOURCES[purpose]
    if sources not in allowed_sets:
        cli.fail(message, status=2)
    return purpose


def _check_options(purpose: str, options: Sequence[str]) -> None:
    """Exits with status 2 for an option, a key of _OPTIONS, that does not belong to the purpose."""
    for option in options:
        purposes = _OPTIONS[option]
        if purpose not in purposes:
            needed = " or ".join(f"--{name}" for name in purposes if name != "compare")
            advice = f"needs {needed}" if needed else f"cannot be combined with --{purpose}"
            cli.fail(f"--{option}: {advice}", status=2)


def _print_hints(config: ConfigDict, overrides: Mapping[str, Any], command: str) -> None:
    """Prints which overrides have no effect, and how to train one run per GPU."""
    from smallgpt_jax.comparison import recipe

    for line in recipe.ignored_overrides(config, overrides):
        print(line)
    print(_commands_per_gpu(command), end="", flush=True)


def _commands_per_gpu(command: str) -> str:
    """Returns how to train one run per GPU at the same time, or "" with fewer than two GPUs."""
    import jax

    if jax.default_backend() != "gpu" or jax.local_device_count() < 2:
        return ""
    last = jax.local_device_count() - 1
    return (
        f"Each run is trained on all {last + 1} GPUs. To train one run per GPU, start a process "
        f"on each:\n    for i in $(seq 0 {last}); do CUDA_VISIBLE_DEVICES=$i {command} & done; "
        "wait\n"
    )


def _write_bundle(results: Sequence[str], folder: str) -> None:
    from smallgpt_jax.verification.bundle import write_bundle

    if len(results) != 1:
        cli.fail(_SOURCES["bundle"][1], status=2)
    print(write_bundle(results[0], folder))


def _verify(record: str, output: str, sample: dict, trust_custom_code: bool) -> int:
    """Returns the exit status of the verdict. `sample` are the fields of a `Sample`."""
    from smallgpt_jax.verification.sample import Sample
    from smallgpt_jax.verification.verification import verify

    verification = verify(record, output, Sample(**sample), trust_custom_code=trust_custom_code)
    print(f"\n{verification}")
    return verification.status


def _ask_gate(candidate: ConfigDict, against: str, output: str, only: str) -> int:
    """Returns the exit status of the answer."""
    from smallgpt_jax.verification import gate

    reference = "" if only == "*" else only
    question = gate.ask_gate(candidate, against, output, reference=reference)
    print(f"\n{question}")
    return gate.STATUS[question.verdict]


def _repeating_command() -> str:
    """Returns the command without flags that keep it from training."""
    others = re.compile(
        r"--config\.compare\.train=false|--dry_run(=true)?|--topology=.*", re.DOTALL
    )
    kept = [argument for argument in sys.argv[1:] if not others.fullmatch(argument)]
    return shlex.join(["python", "-m", "smallgpt_jax.compare", *kept])


if __name__ == "__main__":
    cli.run(main)
