"""Estimates memory and speed of a recipe on given hardware, by compiling it for this hardware.

    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=v5e:4x4
    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=v5e:4x4 --search
    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=h100:8

TPU topologies need no TPU, but the TPU compiler (pip install -c constraints.txt -e '.[plan]'). GPU
topologies need no GPU, but the GPU compiler (extra plan-gpu). --search finds the largest batch size
that fits. Of a sized recipe, the first line says what the size means, before the compilation.
--price shows hours and cost of the training, --hours finds the size that takes so long. --results
shows the loss to expect, by the runs of smaller or similar sizes in a comparison. --inference
estimates decoding on one of the devices instead of training. The exit status is 1 if training or
evaluation does not fit into the memory of the devices.
"""

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from smallgpt_jax import cli
from smallgpt_jax.analysis import record
from smallgpt_jax.errors import UserError, command_line, config_arguments
from smallgpt_jax.planning.expected_loss import expected_loss_message
from smallgpt_jax.planning.hours import cost_message, plan_for_hours
from smallgpt_jax.planning.inference import format_inference
from smallgpt_jax.planning.plan import plan, plan_inference
from smallgpt_jax.planning.topologies import GPUS
from smallgpt_jax.training import preemption

_CONFIG = cli.define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Devices to compile for: v5e:4x4, v5p:2x2x1, v6e:16x16, v4:2x2x1, other shapes of these chips; "
    f"h100:8, h100:2x8 (two hosts), other numbers of these GPUs: {', '.join(GPUS)}; or "
    "cpu:8.",
)
_SEARCH = flags.DEFINE_bool(
    "search", False, "Find the largest batch size that fits; compiles many times."
)
_INFERENCE = flags.DEFINE_bool(
    "inference", False, "Estimate decoding on one device, instead of training."
)
_BATCH = flags.DEFINE_integer(
    "batch", 1, "With --inference: texts that are decoded together.", lower_bound=1
)
_PRICE = flags.DEFINE_float(
    "price",
    None,
    "Also show the hours and the cost of the training, at this price per device and hour.",
    lower_bound=0.0,
)
_HOURS = flags.DEFINE_float(
    "hours",
    None,
    "Find the size of the recipe whose training takes about these hours.",
    lower_bound=0.01,
)
_RESULTS = flags.DEFINE_string(
    "results", None, "results.json of a comparison: also show the loss to expect, if its runs tell."
)
_JSON = flags.DEFINE_bool(
    "json", False, "Print the estimate as one JSON object, without the table."
)
flags.mark_flags_as_required(["config", "topology"])


def main() -> None:
    about_training = [_SEARCH, _HOURS, _PRICE, _RESULTS]
    given = [flag.name for flag in about_training if flag.value not in (None, False)]
    if _INFERENCE.value and given:
        raise UserError(f"--{given[0]}: is about training; it cannot be combined with --inference")
    if not _INFERENCE.value and _BATCH.present:
        raise UserError("--batch: is about decoding; add --inference, or remove the flag")
    # before minutes of compiling
    if _PRICE.value is not None and not math.isfinite(_PRICE.value):
        raise UserError(f"--price={_PRICE.value}: must be a finite number")
    if _RESULTS.value is not None:
        record.read(Path(_RESULTS.value))
    # also during a compilation of minutes, in which Python itself handles no signals
    with preemption.handle_signals("stopped"):
        if _INFERENCE.value:
            result = plan_inference(_CONFIG.value, _TOPOLOGY.value, batch=_BATCH.value)
            as_json = json.dumps(dataclasses.asdict(result))
            print(as_json if _JSON.value else format_inference(result))
            return
        beside = sys.stderr if _JSON.value else sys.stdout  # standard output is one JSON object
        log = functools.partial(print, file=beside, flush=True)
        if _HOURS.value is not None:
            file = config_flags.get_config_filename(flags.FLAGS["config"])
            recipe = _recipe_alone(file, {"--search": _SEARCH.value})
            recipe, planned = plan_for_hours(recipe, _TOPOLOGY.value, _HOURS.value)
        else:
            recipe = ""
            planned = plan(_CONFIG.value, _TOPOLOGY.value, search=_SEARCH.value, log=log)
        print(json.dumps(dataclasses.asdict(planned.estimate)) if _JSON.value else planned)
        if recipe or _PRICE.value is not None:
            print(f"\n{cost_message(planned, _PRICE.value)}", file=beside)
        if recipe or _PRICE.value is not None or _RESULTS.value is not None:
            print(expected_loss_message(_RESULTS.value, planned), file=beside)
        if recipe:
            command = command_line("main", f"--config={recipe}", "--workdir=runs/sized")
            print(f"To train it: {command}", file=beside)
        planned.require_fit()


def _recipe_alone(file: str, others: dict[str, bool]) -> str:
    """Returns the recipe. Raises UserError for what --hours would ignore."""
    ignored = [argument for argument in config_arguments() if argument.startswith("--config.")]
    ignored += [name for name, value in others.items() if value]
    if ignored:
        raise UserError(f"--hours: cannot be combined with {ignored[0]}; remove it")
    recipe, colon, size = file.rpartition(":")
    if colon:
        advice = "name a recipe, not a run" if recipe == "run" else f"remove :{size} from --config"
        raise UserError(f"--hours: finds the size of a recipe; {advice}")
    return file


if __name__ == "__main__":
    cli.run(main)
