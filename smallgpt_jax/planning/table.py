"""The table that `plan` prints."""

from smallgpt_jax.devices import chips
from smallgpt_jax.formatting import format_bytes, parameter_count
from smallgpt_jax.models.components import components
from smallgpt_jax.planning import compilation
from smallgpt_jax.planning.estimate import Estimate
from smallgpt_jax.training import messages
from smallgpt_jax.training.program import Program

STEPS = 2  # training step and evaluation step
PREALLOCATED = 0.75  # JAX's default of XLA_PYTHON_CLIENT_MEM_FRACTION


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
    lines += [f"  {part:20} {count:>13,}" for part, count in components(program.model).items()]
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
    """Compares the compiler's figures per device with the formula of planning/memory.py."""
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
            f"{name:36}" + "".join(f" {format_bytes(size) if size else '':>11}" for size in sizes)
            for name, *sizes in rows
            if any(sizes)
        ),
        "compiled: what the compiler allocates; decides whether the run fits",
        "formula: an approximation; shows what the memory is used for",
    ]
