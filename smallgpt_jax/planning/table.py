"""The table that `plan` prints."""

from smallgpt_jax.devices import chips
from smallgpt_jax.formatting import format_bytes, parameter_count
from smallgpt_jax.models.components import components
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.planning import compilation
from smallgpt_jax.planning.estimate import Estimate
from smallgpt_jax.training import messages
from smallgpt_jax.training.program import Program

STEPS = 2  # training step and evaluation step
_PREALLOCATED = 0.75  # JAX's default of XLA_PYTHON_CLIENT_MEM_FRACTION


def format_plan(program: Program, result: Estimate) -> str:
    sections = [
        [_title(program, result), *messages.fallback_messages(program)],
        _parameters(program, result),
        _memory(result),
        [_flops(result), _compilation(result)],
        _collectives(result),
        _cycles(result),
        _roofline(result),
        _rerun(result),
        _reserved_memory(result),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _title(program: Program, result: Estimate) -> str:
    config, train = program.config, program.config.train
    title = f"{architecture_name(config.model)} on {result.devices} × {result.device_kind}"
    axes = [f"{axis} {length}" for axis, length in program.mesh.shape.items() if length > 1]
    if axes:
        title += f" ({' × '.join(axes)})"
    title += f", {train.batch_size} × {config.model.context_length} tokens per step"
    return f"{title} in {train.microbatches} microbatches" if train.microbatches > 1 else title


def _parameters(program: Program, result: Estimate) -> list[str]:
    c = program.model.config
    lines = [f"{parameter_count(result.parameters, result.active_parameters)} parameters"]
    for component, count in components(program.model).items():
        lines.append(f"  {component:20} {count:>13,}")
    has_usual_heads = not c.num_kv_heads and not c.head_dim
    is_gpt = c.architecture == "gpt" and set(c.mixers) == {"attention"} and c.mlp == "dense"
    if is_gpt and has_usual_heads:  # else the rule would not hold
        blocks = (4 + 2 * c.mlp_ratio) * c.num_layers * c.d_model**2
        rule = blocks + c.vocab_size * c.d_model
        lines.append(
            "  attention, MLP and token embedding: num_layers × (4 + 2 × mlp_ratio) × d_model² "
            f"+ vocab_size × d_model = {rule:,.0f}"
        )
    return lines


def _memory(result: Estimate) -> list[str]:
    """Compares the compiler's figures per device with the formula of planning/memory_formula.py."""
    formula, total = result.account, sum(result.account.values())
    # What a step gets as arguments; the other terms of the formula are its temporaries.
    arguments = [name for name in ("weights", "moments", "average", "teacher") if name in formula]
    state = sum(formula[name] for name in arguments)
    rows = [  # (name, bytes by the compiler, bytes by the formula)
        (f"state ({', '.join(arguments)}) and batch", result.argument_bytes, state),
        *((f"  {name}", None, formula[name]) for name in arguments),
        ("temporaries", result.temp_bytes, total - state),
        ("  gradients", None, formula["gradients"]),
        ("  gathered weights", None, formula["gathered"]),
        ("  activations", None, formula["activations"]),
        ("  logits of a chunk", None, formula["logits"]),
        ("total", result.needed_bytes, total),
        ("temporaries of an evaluation step", result.eval_temp_bytes, None),
        ("total in evaluation", result.eval_needed_bytes, None),
        ("memory of the chip", result.hbm_bytes, None),
    ]
    lines = [f"{'Memory per device':36} {'compiled':>11} {'formula':>11}"]
    for name, compiled, computed in rows:
        if compiled or computed:  # else 0 or unknown
            shown = [format_bytes(size) if size else "" for size in (compiled, computed)]
            lines.append(f"{name:36} {shown[0]:>11} {shown[1]:>11}")
    return [
        *lines,
        "compiled: what the compiler allocates; decides whether the run fits",
        "formula: an approximation; shows what the memory is used for",
    ]


def _flops(result: Estimate) -> str:
    if result.flops_per_token is None:
        return f"FLOPs unknown: {result.flops_problem}"
    line = f"{result.flops_per_token:,.0f} FLOPs per token, {result.flops_per_step:.3e} per step"
    by_optimizer = result.flops_per_step - result.flops_per_token * result.tokens_per_step
    if not by_optimizer:
        return line
    fraction = by_optimizer / result.flops_per_step
    return f"{line}, of which {by_optimizer:.3e} ({fraction:.1%}) by the optimizer"


def _compilation(result: Estimate) -> str:
    compiled, seconds = result.compiled_programs, f"{result.compile_seconds:.0f} s"
    if compiled == STEPS:
        return f"compiled in {seconds}"
    stored = f"earlier compilations are in {compilation.folder()}"
    return f"{compiled} of {STEPS} programs compiled in {seconds}; {stored}"


def _collectives(result: Estimate) -> list[str]:
    if result.collectives is None:
        if not result.fits:
            return []  # it says enough that the program does not fit
        return ["Cycles and collectives are not available: the compiled program cannot be read"]
    if not result.collectives:
        return ["No collectives."]
    lines = ["Collectives per step and device:"]
    for kind, sums in sorted(result.collectives.items()):
        mebibytes = sums["bytes"] / 2**20
        lines.append(f"  {kind:20} {sums['count']:>6,} ×   {mebibytes:>10,.1f} MiB")
    return lines


def _cycles(result: Estimate) -> list[str]:
    if result.estimated_cycles:
        return [
            "Compiler estimates, not measurements; time spent waiting for collectives is not "
            "included:",
            f"  {result.estimated_cycles / 1e6:,.1f} M cycles, plus "
            f"{result.kernel_cycles / 1e6:,.1f} M in custom kernels (at the chip's peak speed)",
            _speed(result),
        ]
    chip = chips.find_chip(result.device_kind)
    if chip and chip.hertz and result.collectives is not None:  # a readable program of a TPU
        return ["Cycles are not available: the program calls a kernel whose cost is unknown"]
    return []


def _roofline(result: Estimate) -> list[str]:
    if not result.kernels:
        return []
    lines = [
        "Roofline, not a measurement: kernels at the peak speed of products or memory; launches "
        "are not included:"
    ]
    for kind, sums in sorted(result.kernels.items(), key=lambda item: -item[1]["seconds"]):
        milliseconds = 1000 * sums["seconds"]
        lines.append(f"  {kind:24} {sums['count']:>8,} ×  {milliseconds:>10,.2f} ms")
    exposed = result.exposed_collective_seconds
    overlapped = max(0.0, result.collective_seconds - exposed)  # without −0.00 from rounding
    lines.append(
        f"  {'exposed collectives':24} {'':>8}    {1000 * exposed:>10,.2f} ms, and "
        f"{1000 * overlapped:,.2f} ms beside kernels"
    )
    return [*lines, _speed(result)]


def _speed(result: Estimate) -> str:
    seconds = result.estimated_step_seconds
    mfu = "MFU unknown" if result.estimated_mfu is None else f"{result.estimated_mfu:.0%} MFU"
    tokens_per_second = result.tokens_per_step / seconds
    return f"  {1000 * seconds:,.1f} ms per step, {tokens_per_second:,.0f} tokens/s, {mfu}"


def _rerun(result: Estimate) -> list[str]:
    """Says whether a rerun computes the same bits; nothing where it is unknown, as on TPUs."""
    if result.unordered_operations is None:
        return []
    if not result.unordered_operations:
        return ["The order of all sums is fixed: a rerun has the same bits."]
    count = sum(result.unordered_operations.values())
    return [
        f"{count} operations add in no fixed order, so that a rerun has other bits; with "
        "--config.train.deterministic=true, they have one:",
        *(f"  {times:>6,} ×  {name}" for name, times in result.unordered_operations.items()),
    ]


def _reserved_memory(result: Estimate) -> list[str]:
    """Warns of a program that fits into a GPU, but not into what JAX reserves of it."""
    is_gpu = bool(result.kernels)
    if is_gpu and _PREALLOCATED * result.hbm_bytes < result.peak_bytes <= result.hbm_bytes:
        return [
            f"JAX reserves {_PREALLOCATED:.0%} of a GPU's memory, and the program needs more: set "
            "the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        ]
    return []
