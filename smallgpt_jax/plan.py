"""Estimates the memory and speed of a recipe on given hardware, by compiling the recipe for this
hardware.

    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=v5e:4x4
    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=v5e:4x4 --search
    python -m smallgpt_jax.plan --config=configs/gpt.py --topology=h100:8

TPU topologies need no TPU, but the TPU compiler (pip install -c constraints.txt -e '.[plan]'). GPU
topologies need no GPU, but the GPU compiler (extra plan-gpu). --search finds the largest batch size
that fits. --inference estimates decoding on one of the devices instead of training. The exit status
is 1 if training or evaluation does not fit into the memory of the devices.
"""

import dataclasses
import json

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.errors import UserError
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
_JSON = flags.DEFINE_bool(
    "json", False, "Print the estimate as one JSON object, without the table."
)
flags.mark_flags_as_required(["config", "topology"])


def main() -> None:
    if _INFERENCE.value and _SEARCH.value:
        raise UserError(
            "--search: cannot be combined with --inference, which shows the largest batch; remove "
            "it"
        )
    # also during a compilation of minutes, in which Python itself handles no signals
    with preemption.handle_signals("stopped"):
        if _INFERENCE.value:
            result = plan_inference(_CONFIG.value, _TOPOLOGY.value, batch=_BATCH.value)
            table = format_inference(result, _CONFIG.value.model.architecture)
            print(json.dumps(dataclasses.asdict(result)) if _JSON.value else table)
            return
        planned = plan(_CONFIG.value, _TOPOLOGY.value, search=_SEARCH.value)
        print(json.dumps(dataclasses.asdict(planned.estimate)) if _JSON.value else planned)
        planned.require_fit()


if __name__ == "__main__":
    cli.run(main)
