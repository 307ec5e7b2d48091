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
import functools
import json
import sys
from contextlib import AbstractContextManager

import jax
from absl import flags

from smallgpt_jax import cli, models, output
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import parameter_count
from smallgpt_jax.models import memory
from smallgpt_jax.planning import compilation, inference, topologies
from smallgpt_jax.planning.estimate import Estimate, estimate, largest_batch
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import messages, preemption
from smallgpt_jax.training.program import Program, build_program

_CONFIG = cli.define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Devices to compile for: v5e:4x4, v5p:2x2x1, v6e:16x16, v4:2x2x1, other shapes of these chips; "
    f"h100:8, h100:2x8 (two hosts), other numbers of these GPUs: {', '.join(topologies.GPUS)}; or "
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

STEPS = 2  # training step and evaluation step
PREALLOCATED = 0.75  # JAX's default of XLA_PYTHON_CLIENT_MEM_FRACTION


def main() -> None:
    if _INFERENCE.value and _SEARCH.value:
        raise UserError(
            "--search: cannot be combined with --inference, which shows the largest batch; remove "
            "it"
        )
    devices = topologies.topology_devices(_TOPOLOGY.value)
    with jax.set_mesh(
        jax.sharding.Mesh(devices, ("device",))
    ):  # the dtype "auto" depends on the platform
        config = Config.of(_CONFIG.value)
    with preemption.handle_signals("stopped"):
        (plan_inference if _INFERENCE.value else plan)(config, devices)


def plan_inference(config: Config, devices: list[jax.Device]) -> None:
    with compilation_shown("decoding step"):
        found = inference.estimate_inference(
            models.LanguageModel(config.model), devices[0], _BATCH.value
        )
    print(
        json.dumps(dataclasses.asdict(found))
        if _JSON.value
        else inference.format_inference(found, config.model.architecture)
    )


def plan(config: Config, devices: list[jax.Device]) -> None:
    if _SEARCH.value:
        chip = chips.find_chip(devices[0].device_kind)
        if not chip:
            raise UserError(
                f"--topology={_TOPOLOGY.value}: --search needs chips whose memory size is known; "
                "choose TPUs or GPUs"
            )
        batch_size = largest_batch(
            lambda batch_size: build_program(
                config.replace(train={"batch_size": batch_size}), devices
            ),
            batch_divisor(config, devices),
            chip.hbm,
            functools.partial(print, file=sys.stderr, flush=True),
            compilation_shown,
        )
        config = config.replace(train={"batch_size": batch_size})
    program = build_program(config, devices)
    result = estimate(program, compilation_shown)
    print(json.dumps(dataclasses.asdict(result)) if _JSON.value else format_plan(program, result))
    if not result.fits:
        step = "training" if result.needed_bytes == result.peak_bytes else "evaluation"
        gib = result.peak_bytes / chips.GiB, result.hbm_bytes / chips.GiB
        raise UserError(
            f"does not fit: the {step} step needs {gib[0]:.2f} GiB, the chip has {gib[1]:.3g} GiB; "
            f"{' or '.join(remedies(program))}"
        )


def compilation_shown(name: str) -> AbstractContextManager:
    return output.elapsed_time_shown(f"compiling the {name} for {_TOPOLOGY.value}")


def remedies(program: Program) -> list[str]:
    """Returns the changes that reduce the memory per device, if this config leaves room for
    them.
    """
    config, mesh = program.config, program.mesh
    possible = {
        "increase config.train.microbatches": config.train.batch_size
        > batch_divisor(config, mesh.devices.ravel()),
        "increase config.mesh.fsdp": mesh.shape["fsdp"] < mesh.size,
        "set config.model.remat=full": config.model.remat != "full",
    }
    return [change for change, has_room in possible.items() if has_room] or [
        "use more devices with config.mesh.fsdp"
    ]


def batch_divisor(config, devices) -> int:
    return (
        sharding.num_batch_shards(sharding.make_mesh(config.mesh, devices))
        * config.train.microbatches
    )


def format_plan(program: Program, result: Estimate) -> str:
    config = program.config
    layout = " × ".join(
        f"{axis} {length}" for axis, length in program.mesh.shape.items() if length > 1
    )
    title = (
        f"{config.model.architecture} on {result.devices} × {result.device_kind}"
        + (f" ({layout})" if layout else "")
        + f", {config.train.batch_size} × {config.model.context_length} tokens per step"
        + (f" in {config.train.microbatches} microbatches" if config.train.microbatches > 1 else "")
    )
    sections = [
        [title, *messages.fallback_messages(program)],
        format_parameters(program, result),
        format_memory(result),
        [format_flops(result), format_compilation(result)],
    ]
    chip = chips.find_chip(result.device_kind)
    if result.collectives is not None:
        sections.append(
            [
                "Collectives per step and device:" if result.collectives else "No collectives.",
                *(
                    f"  {kind:20} {found['count']:>6,} ×   {found['bytes'] / 2**20:>10,.1f} MiB"
                    for kind, found in sorted(result.collectives.items())
                ),
            ]
        )
        if result.estimated_cycles is None and chip and chip.hertz:
            sections.append(
                ["Cycles are not available: the program calls a kernel whose cost is unknown"]
            )
    elif result.fits:
        sections.append(
            ["Cycles and collectives are not available: the compiled program cannot be read"]
        )
    if result.estimated_cycles:
        sections.append(
            [
                "Compiler estimates, not measurements; time spent waiting for collectives is not "
                "included:",
                f"  {result.estimated_cycles / 1e6:,.1f} M cycles, plus "
                f"{result.kernel_cycles / 1e6:,.1f} M in custom kernels (at the chip's peak speed)",
                format_speed(result),
            ]
        )
    if result.kernels:
        sections.append(format_roofline(result))
        if PREALLOCATED * result.hbm_bytes < result.peak_bytes <= result.hbm_bytes:
            sections.append(
                [
                    f"JAX reserves {PREALLOCATED:.0%} of a GPU's memory, and the program needs "
                    "more: set the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
                ]
            )
    return "\n\n".join(map("\n".join, sections))


def format_compilation(result: Estimate) -> str:
    compiled, seconds = result.compiled_programs, f"{result.compile_seconds:.0f} s"
    if compiled == STEPS:
        return f"compiled in {seconds}"
    return f"{compiled} of {STEPS} programs compiled in {seconds}; earlier compilations are in {compilation.folder()}"


def format_roofline(result: Estimate) -> list[str]:
    overlapped = max(
        0.0, result.collective_seconds - result.exposed_collective_seconds
    )  # without −0.00 from rounding
    return [
        "Roofline, not a measurement: kernels at the peak speed of products or memory; launches "
        "are not included:",
        *(
            f"  {kind:24} {kernels['count']:>8,} ×  {1000 * kernels['seconds']:>10,.2f} ms"
            for kind, kernels in sorted(
                result.kernels.items(), key=lambda item: -item[1]["seconds"]
            )
        ),
        f"  {'exposed collectives':24} {'':>8}    "
        f"{1000 * result.exposed_collective_seconds:>10,.2f} ms, and {1000 * overlapped:,.2f} ms "
        "beside kernels",
        format_speed(result),
    ]


def format_speed(result: Estimate) -> str:
    seconds = result.estimated_step_seconds
    mfu = "MFU unknown" if result.estimated_mfu is None else f"{result.estimated_mfu:.0%} MFU"
    return f"  {1000 * seconds:,.1f} ms per step, {result.tokens_per_step / seconds:,.0f} tokens/s, {mfu}"


def format_flops(result: Estimate) -> str:
    if result.flops_per_token is None:
        return f"FLOPs unknown: {result.flops_problem}"
    line = f"{result.flops_per_token:,.0f} FLOPs per token, {result.flops_per_step:.3e} per step"
    optimizer_flops = result.flops_per_step - result.flops_per_token * result.tokens_per_step
    if not optimizer_flops:
        return line
    return f"{line}, of which {optimizer_flops:.3e} ({optimizer_flops / result.flops_per_step:.1%}) by the optimizer"


def format_parameters(program: Program, result: Estimate) -> list[str]:
    c = program.model.config
    lines = [f"{parameter_count(result.parameters, result.active_parameters)} parameters"]
    lines += [
        f"  {part:20} {count:>13,}" for part, count in memory.components(program.model).items()
    ]
    if (
        c.architecture == "gpt"
        and set(c.mixers) == {"attention"}
        and c.mlp == "dense"
        and not c.num_kv_heads
        and not c.head_dim
    ):
        rule = (4 + 2 * c.mlp_ratio) * c.num_layers * c.d_model**2 + c.vocab_size * c.d_model
        lines.append(
            "  attention, MLP and token embedding: num_layers × (4 + 2 × mlp_ratio) × d_model² "
            f"+ vocab_size × d_model = {rule:,.0f}"
        )
    return lines


def format_memory(result: Estimate) -> list[str]:
    """Compares the compiler's figures per device with the formula of models/memory.py."""
    formula = result.account
    arguments = {
        name: formula[name]
        for name in ("weights", "moments", "average", "teacher")
        if name in formula
    }
    state, total = sum(arguments.values()), sum(formula.values())
    parts = {
        "gradients": "gradients",
        "gathered": "gathered weights",
        "activations": "activations",
        "logits": "logits of a chunk",
    }
    rows = [
        (f"state ({', '.join(arguments)}) and batch", result.argument_bytes, state),
        *((f"  {name}", None, size) for name, size in arguments.items()),
        ("temporaries", result.temp_bytes, total - state),
        *((f"  {shown}", None, formula[name]) for name, shown in parts.items()),
        ("total", result.needed_bytes, total),
        ("temporaries of an evaluation step", result.eval_temp_bytes, None),
        ("total in evaluation", result.eval_needed_bytes, None),
        ("memory of the chip", result.hbm_bytes, None),
    ]
    return [
        f"{'Memory per device':36} {'compiled':>11} {'formula':>11}",
        *(
            f"{name:36}"
            + "".join(f" {memory.format_bytes(size) if size else '':>11}" for size in sizes)
            for name, *sizes in rows
            if any(sizes)
        ),
        "compiled: what the compiler allocates; decides whether the run fits",
        "formula: an approximation; shows what the memory is used for",
    ]


if __name__ == "__main__":
    cli.run(main)
