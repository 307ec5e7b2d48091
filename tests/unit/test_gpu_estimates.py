"""Tests of estimates for GPUs: the roofline of hand-made programs, collectives, memory, and the GPU
compiler itself.
"""

import dataclasses
import importlib.util
import json
import math
import re
from types import SimpleNamespace

import jax
import pytest
from conftest import load_config, run

from smallgpt_jax.devices import chips
from smallgpt_jax.devices.platform import step_options
from smallgpt_jax.errors import UserError
from smallgpt_jax.planning import determinism, estimate, gpus, hlo, topologies
from smallgpt_jax.planning.compilation import CompiledProgram, Compiler
from smallgpt_jax.planning.plan import remedies
from smallgpt_jax.planning.roofline import PLAIN_PRODUCTS, Clock, Roofline, ring_bytes
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.training.build import build_program

# The data sheet of H100 SXM: FLOP/s, bytes/s of the memory, of NVLink in one direction, and of the
# network.
PEAK, BANDWIDTH, NVLINK, NETWORK = 989e12, 3350e9, 450e9, 50e9
VECTOR_PEAK = 2 * 132 * 128 * 1.98e9  # FLOP/s of float32 without matrix units
MATMUL = (
    'custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)
ATTENTION = (
    'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": '
    '["2", "3", "8", "8"]}, "mask_type": "CAUSAL", "sliding_window_length": WINDOW}}'
)
# A loop of 5 iterations, and after it the matrix product %plain in a plain loop.
PROGRAM = f"""HloModule jit_train_step, is_scheduled=true, num_partitions=16

%fused_slice (p: f32[10,1000], i: s32[]) -> f32[1000] {{
  %p = f32[10,1000]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %slice = f32[1,1000]{{1,0}} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,1000}}
  ROOT %row = f32[1000]{{0}} bitcast(%slice)
}}

%fused_update (stack: f32[10,1000], row: f32[1000], j: s32[]) -> f32[10,1000] {{
  %stack = f32[10,1000]{{1,0}} parameter(0)
  %new = f32[1000]{{0}} parameter(1)
  %j = s32[] parameter(2)
  %as_row = f32[1,1000]{{1,0}} bitcast(%new)
  ROOT %updated = f32[10,1000]{{1,0}} dynamic-update-slice(%stack, %as_row, %j, %j)
}}

%fused_dot (a: f32[20,30], b: f32[30,40]) -> f32[20,40] {{
  %a = f32[20,30]{{1,0}} parameter(0)
  %b = f32[30,40]{{1,0}} parameter(1)
  ROOT %dot = f32[20,40]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (t: (s32[], f32[10,1000])) -> (s32[], f32[10,1000]) {{
  %t = (s32[], f32[10,1000]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %all = f32[10,1000]{{1,0}} get-tuple-element(%t), index=1
  %left = bf16[4096,2048]{{1,0}} constant({{...}})
  %right = bf16[2048,1024]{{1,0}} constant({{...}})
  %product = (bf16[4096,1024]{{1,0}}, s8[4194304]{{0}}) custom-call(%left, %right), {MATMUL}
  %read = f32[1000]{{0}} fusion(%all, %n), kind=kLoop, calls=%fused_slice
  %written = f32[10,1000]{{1,0}} fusion(%all, %read, /*index=2*/%n), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[10,1000]{{1,0}}) tuple(%n, %written)
}}

%condition (s: (s32[], f32[10,1000])) -> pred[] {{
  %s = (s32[], f32[10,1000]{{1,0}}) parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (x: f32[10,1000], y: f32[20,30], z: f32[30,40]) -> f32[20,40] {{
  %x = f32[10,1000]{{1,0}} parameter(0)
  %y = f32[20,30]{{1,0}} parameter(1)
  %z = f32[30,40]{{1,0}} parameter(2)
  %zero = s32[] constant(0)
  %first = (s32[], f32[10,1000]{{1,0}}) tuple(%zero, %x)
  %loop = (s32[], f32[10,1000]{{1,0}}) while(%first), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  %copied = f32[20,30]{{1,0}} copy(%y)
  ROOT %plain = f32[20,40]{{1,0}} fusion(%copied, %z), kind=kLoop, calls=%fused_dot
}}
"""
PRODUCT_SECONDS = 2 * 4096 * 2048 * 1024 / PEAK
needs_gpu_compiler = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, topologies.CUDA_PLUGINS)),
    reason="needs the GPU compiler: pip install -c constraints.txt -e '.[plan-gpu]'",
)


def roofline(text: str, gpus_per_host: int = 8) -> Roofline:
    return Roofline(hlo.HloModule(text), gpus.GPUS["h100"], gpus_per_host)


def test_the_roofline_of_each_kind_of_kernel():
    """A product takes as long as its FLOPs, other kernels as long as their traffic. Of an array
    that is sliced or updated in place, only the row counts: 1,000 float32 numbers and an index of 4
    bytes.
    """
    found = roofline(PROGRAM).kernels()
    sliced, updated = 4 * 1000 + 4 + 4 * 1000, 4 * 1000 + 4 + 4 * 1000
    plain = 2 * 20 * 30 * 40 / VECTOR_PEAK
    assert plain < 4 * (20 * 30 + 30 * 40 + 20 * 40) / BANDWIDTH  # so its traffic counts
    expected = {
        "cuBLASLt": (5, 5 * PRODUCT_SECONDS),
        "fusions": (10, 5 * (sliced + updated) / BANDWIDTH),
        "copies and others": (1, 2 * 4 * 20 * 30 / BANDWIDTH),
        PLAIN_PRODUCTS: (1, 4 * (20 * 30 + 30 * 40 + 20 * 40) / BANDWIDTH),
    }
    assert {
        kind: (kernels["count"], pytest.approx(kernels["seconds"]))
        for kind, kernels in found.items()
    } == expected
    assert roofline(PROGRAM).clock() == Clock(
        kernels=pytest.approx(sum(seconds for _, seconds in expected.values()))
    )


def test_the_speed_of_products():
    """Products of float32 arrays take twice as long. Those with the highest precision, and those in
    plain loops, use no matrix units.
    """
    in_float32 = PROGRAM.replace("bf16[", "f32[")
    assert roofline(in_float32).kernels()["cuBLASLt"]["seconds"] == pytest.approx(
        2 * 5 * PRODUCT_SECONDS
    )
    for precisions, slowdown in (
        ('["DEFAULT","DEFAULT"]', 2),
        ('["DEFAULT","HIGHEST"]', PEAK / VECTOR_PEAK),
    ):
        text = in_float32.replace(
            '"epilogue"', f'"precision_config":{{"operand_precision":{precisions}}},"epilogue"'
        )
        assert roofline(text).kernels()["cuBLASLt"]["seconds"] == pytest.approx(
            slowdown * 5 * PRODUCT_SECONDS
        )
    large = PROGRAM.replace("[20,", "[20000,").replace("40]", "40000]").replace("30", "3000")
    assert roofline(large).kernels()[PLAIN_PRODUCTS]["seconds"] == pytest.approx(
        2 * 20000 * 3000 * 40000 / VECTOR_PEAK
    )


@pytest.mark.parametrize("window, scores", [(0, 8 * 9 / 2), (3, 1 + 2 + 6 * 3), (100, 8 * 9 / 2)])
def test_the_roofline_of_attention(window, scores):
    """cuDNN's attention has 2 products forward and 5 backward, with the scores that the mask
    allows.
    """
    shape = "bf16[2,8,3,2000000]{3,2,1,0}"
    settings = ATTENTION.replace("WINDOW", str(window))
    text = f"""HloModule attention, is_scheduled=true

ENTRY %main (q: bf16[2,8,3,2000000]) -> bf16[2,8,3,2000000] {{
  %q = {shape} parameter(0)
  %forward = ({shape}, u8[7]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", {settings}
  ROOT %back = ({shape}) custom-call(%q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", {settings}
}}
"""
    slow_products = dataclasses.replace(gpus.GPUS["h100"], bandwidth=1e30)
    found = Roofline(hlo.HloModule(text), slow_products, 1).kernels()["cuDNN"]
    assert found == {
        "count": 2,
        "seconds": pytest.approx((2 + 5) * 2 * 2 * 3 * scores * 2_000_000 / PEAK),
    }


def with_collectives(groups: str) -> str:
    """Returns a program with an all-gather of 2 arrays beside one product, and an all-reduce after
    it.
    """
    small, large = "bf16[1000,32]{1,0}", "bf16[8000,32]{1,0}"
    return f"""HloModule jit_train_step, is_scheduled=true, num_partitions=16

ENTRY %main (p: {small}, l: bf16[4096,2048], r: bf16[2048,1024]) -> f32[5000000] {{
  %p = {small} parameter(0)
  %l = bf16[4096,2048]{{1,0}} parameter(1)
  %r = bf16[2048,1024]{{1,0}} parameter(2)
  %sum = f32[5000000]{{0}} parameter(3)
  %start = (({small}, {small}), ({large}, {large})) all-gather-start(%p, %p), channel_id=1, replica_groups={groups}
  %product = (bf16[4096,1024]{{1,0}}, s8[64]{{0}}) custom-call(%l, %r), {MATMUL}
  %done = ({large}, {large}) all-gather-done(%start)
  %start.1 = f32[5000000]{{0}} all-reduce-start(%sum), channel_id=2, replica_groups={groups}, to_apply=%add
  ROOT %done.1 = f32[5000000]{{0}} all-reduce-done(%start.1)
}}
"""


@pytest.mark.parametrize(
    "groups, devices, link",
    [
        ("{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", 8, NVLINK),
        ("[2,8]<=[16]", 8, NVLINK),
        ("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 8, NVLINK),
        ("[8,2]<=[2,8]T(1,0)", 2, NETWORK),
        ("mesh['axis_0'=2,'axis_1'=8] {'axis_0'}", 2, NETWORK),
        ("{}", 16, NETWORK),
        ("mesh['x'=2,'y'=1,'z'=8] {'x','z'}", 16, NETWORK),
    ],
)
def test_exposed_collectives(groups, devices, link):
    """The all-gather runs while the product does; the all-reduce delays the end of the step. Both
    send their bytes around a ring of the devices of a group, on two hosts with 8 GPUs each.
    """
    found = roofline(with_collectives(groups))
    gathered, reduced = (
        2 * 2 * 1000 * 32 * (devices - 1) / link,
        2 * 4 * 5e6 * (devices - 1) / devices / link,
    )
    clock = found.clock()
    assert clock.collectives == pytest.approx(gathered + reduced)
    assert clock.exposed == pytest.approx(max(0, gathered - PRODUCT_SECONDS) + reduced)
    assert clock.total == pytest.approx(max(gathered, PRODUCT_SECONDS) + reduced)
    assert found.module.collectives() == {
        "all-gather": {"count": 1, "bytes": 2 * 2 * 8000 * 32},
        "all-reduce": {"count": 1, "bytes": 4 * 5_000_000},
    }


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{3,5},{2,4}}", [3, 5]),
        ("[4,2]<=[8]", [0, 1]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=4] {'a'}", [0, 4]),
    ],
)
def test_the_first_group_of_a_collective(groups, first):
    line = (
        f"%sum = f32[3]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    )
    assert hlo.Instruction("sum", "f32[3]{0}", "all-reduce", "%x", line).group == first


@pytest.mark.parametrize("groups", ["mesh['x'=16,'y'=1] {'y'}", "[16,1]<=[16]", "{{0},{1}}"])
def test_collectives_of_single_devices_send_nothing(groups):
    found = roofline(with_collectives(groups))
    assert found.module.collectives() == {} and found.clock().collectives == 0


def test_a_ring_sends_what_the_collectives_need():
    """Every one of 4 devices starts with 12 bytes. A ring sends each part from device to device, in
    turns.
    """
    parts, turns = 12 // 4, 4 - 1
    assert ring_bytes("reduce-scatter", 12, 4) == ring_bytes("all-to-all", 12, 4) == parts * turns
    assert ring_bytes("all-reduce", 12, 4) == 2 * parts * turns
    assert ring_bytes("all-gather", 12, 4) == 12 * turns
    assert ring_bytes("collective-permute", 12, 4) == 12


# ---------------------------------------------------------------------- memory


@pytest.fixture
def planned(monkeypatch):
    """Returns a function: bytes of the training step, and of the evaluation step → program, its
    estimate on one H100.

    The compiled program is PROGRAM.
    """

    def plan(training: float, evaluation: float):
        step = CompiledProgram(
            argument_bytes=0, temp_bytes=training, output_bytes=5, alias_bytes=5, text=PROGRAM
        )
        monkeypatch.setattr(Compiler, "compile", lambda compiler, lowered: step)
        memory = estimate.StepMemory(argument_bytes=0, temp_bytes=7, needed_bytes=evaluation)
        monkeypatch.setattr(estimate, "evaluation_memory", lambda program, compiler: memory)
        program = build_program(load_config("gpt"), jax.devices()[:1])
        return program, estimate.estimate(program)

    monkeypatch.setattr(gpus, "find_gpu", lambda kind: gpus.GPUS["h100"])
    monkeypatch.setattr(chips, "find_chip", lambda kind: chips.CHIPS["NVIDIA H100"])
    return plan


@pytest.mark.parametrize(
    "training, evaluation, fits", [(80e9, 79e9, True), (80e9 + 1, 1e9, False), (1e9, 81e9, False)]
)
def test_fits_into_a_gpu(planned, training, evaluation, fits):
    """The GPU compiler compiles programs that are too large. They fit if both steps need at most
    the GPU's memory.
    """
    assert planned(training, evaluation)[1].fits == fits


@pytest.mark.parametrize(
    "training, evaluation, is_reserved",
    [(60e9, 60e9, True), (60e9 + 1, 1e9, False), (1e9, 80e9, False), (81e9, 1e9, True)],
)
def test_the_report_of_a_gpu(planned, training, evaluation, is_reserved):
    """JAX reserves 60 of 80 GB. Of a program that needs more and fits, the report says so."""
    program, result = planned(training, evaluation)
    seconds = roofline(PROGRAM).clock().total
    assert result.estimated_step_seconds == pytest.approx(seconds)
    assert result.estimated_mfu == pytest.approx(
        result.flops_per_token * result.tokens_per_step / seconds / PEAK
    )
    assert result.estimated_cycles is result.kernel_cycles is None
    report = format_plan(program, result)
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" not in report) == is_reserved
    assert re.search(r"cuBLASLt +5 × +0\.09 ms", report) and "not a measurement" in report


@pytest.mark.parametrize(
    "devices, fields, expected",
    [
        (1, {"train__batch_size": 8}, ["microbatches", "remat"]),
        (4, {"train__batch_size": 8, "train__microbatches": 2}, ["fsdp", "remat"]),
        (
            4,
            {"train__batch_size": 4, "mesh__data": 1, "mesh__fsdp": 4, "model__remat": "full"},
            ["use more devices"],
        ),
    ],
)
def test_remedies_for_too_little_memory(devices, fields, expected):
    program = build_program(load_config("gpt", **fields), jax.devices()[:devices])
    found = remedies(program)
    assert len(found) == len(expected) and all(
        word in change for word, change in zip(expected, found)
    )


def test_names_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(
        topologies, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    )
    with pytest.raises(UserError, match=r"pip install -c constraints.txt -e '\.\[plan-gpu\]'"):
        topologies.gpu_devices("h100", "8")


def test_the_figures_of_a_gpu_agree():
    """Peak, cores and clock agree: a core computes a power of two FLOPs per cycle. The clock of
    H100 and B200 is lower in products than the boost clock, by up to 8%.
    """
    for name, gpu in gpus.GPUS.items():
        of_core = math.log2(gpu.chip.flops / gpu.cores / gpu.hertz)
        assert abs(of_core - round(of_core)) < math.log2(1.09), name
        assert f"device_memory_size: {gpu.chip.hbm:.0f}" in gpus.target_config(gpu)


SCATTERS = """HloModule jit_train_step

%scatter (p: f32[9,4], i: s32[3], u: f32[3,4]) -> f32[9,4] {
  %p = f32[9,4]{1,0} parameter(0)
  %i = s32[3]{0} parameter(1)
  %u = f32[3,4]{1,0} parameter(2)
  ROOT %s = f32[9,4]{1,0} scatter(%p, %i, %u), FLAGS, metadata={op_name="jit(f)/take/add"}
}

%counts (p: s32[9], i: s32[3], u: s32[3]) -> s32[9] {
  %q = s32[9]{0} parameter(0)
  %j = s32[3]{0} parameter(1)
  %v = s32[3]{0} parameter(2)
  ROOT %t = s32[9]{0} scatter(%q, %j, %v), index_vector_dim=1
}

ENTRY %main (a: f32[9,4]) -> f32[9,4] {
  %a = f32[9,4]{1,0} parameter(0)
  %one = f32[9,4]{1,0} fusion(%a), kind=kInput, calls=%scatter
  %two = s32[9]{0} fusion(%a), kind=kInput, calls=%counts
  ROOT %b = (f32[9,4]{1,0}) custom-call(%one), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
"""


def test_operations_without_a_fixed_order():
    """Sums of floats at indices that may be equal, and attention; not sums of integers."""
    attention = "cuDNN's backward pass of attention"
    module = hlo.HloModule(SCATTERS.replace("FLAGS", "index_vector_dim=1"))
    found = determinism.unordered_operations(module, deterministic=False)
    assert found == {"scatter of take/add": 1, attention: 1}
    unique = hlo.HloModule(SCATTERS.replace("FLAGS", "unique_indices=true"))
    assert determinism.unordered_operations(unique, deterministic=False) == {attention: 1}
    assert determinism.unordered_operations(unique, deterministic=True) == {}


# ---------------------------------------------------------------------- the compiler


def planned_for(topology: str, recipe: str, *flags: str) -> dict:
    """Returns the JSON of `plan` for the size quickstart in bfloat16."""
    result = run(
        "plan",
        f"--config=configs/{recipe}.py:quickstart",
        "--config.model.dtype=bfloat16",
        f"--topology={topology}",
        "--json",
        *flags,
        XLA_FLAGS="",
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    "recipe, attention_calls",
    [("gpt", 2 * 4), ("pgpt", 2 * 2), ("lgpt", 2 * 4), ("llama", 2 * 4), ("moe", 2 * 4)],
)  # forward, backward; by block
def test_gpu_programs(recipe, attention_calls):
    """The estimate of quickstart for one H100: memory of the compiled programs, kernels, no faster
    than the peak. The two paths of pgpt share calls of the attention kernel.
    """
    planned = planned_for("h100:1", recipe)
    assert planned["fits"] and planned["hbm_bytes"] == 80e9 and planned["collectives"] == {}
    assert planned["argument_bytes"] == pytest.approx(
        12 * planned["parameters"], rel=0.01
    )  # weights and moments
    assert planned["needed_bytes"] == pytest.approx(
        planned["argument_bytes"] + planned["temp_bytes"], rel=0.01
    )
    assert planned["argument_bytes"] < planned["eval_needed_bytes"] < planned["needed_bytes"]
    assert planned["kernels"]["cuDNN"]["count"] == attention_calls
    assert planned["kernels"]["cuBLASLt"]["count"] >= 3 * (4 * attention_calls // 2 + 1)
    assert PLAIN_PRODUCTS not in planned["kernels"]
    kernel_seconds = sum(kernels["seconds"] for kernels in planned["kernels"].values())
    assert planned["estimated_step_seconds"] == pytest.approx(kernel_seconds)
    assert 0 < planned["estimated_mfu"] < 1


@pytest.mark.slow
@needs_gpu_compiler
def test_fsdp_on_gpus_sums_gradients_with_reduce_scatters():
    """Weights are gathered, and gradients are scattered, as bfloat16. Of the embedding, only the
    rows of the tokens are exchanged, forward and backward: 1 · 128 vectors of width 128 per device.
    """
    found = planned_for("h100:8", "gpt", "--config.mesh.data=1", "--config.mesh.fsdp=8")
    sent, weights = found["collectives"], found["parameters"] - 1024 * 128
    assert sent["all-gather"]["bytes"] == pytest.approx(2 * weights, rel=0.02)
    assert sent["reduce-scatter"]["bytes"] == pytest.approx(2 * weights / 8, rel=0.02)
    assert sent["all-to-all"]["bytes"] == 2 * 2 * 128 * 128
    assert sent["all-reduce"]["bytes"] < 4 * 10_000  # norms and scalars


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("recipe", ["gpt", "moe"])
def test_deterministic_programs_add_in_a_fixed_order(recipe):
    assert len(planned_for("h100:1", recipe)["unordered_operations"]) >= 2
    fixed = planned_for("h100:1", recipe, "--config.train.deterministic=true")
    assert fixed["unordered_operations"] == {}


def test_only_gpus_compile_with_the_option():
    assert step_options("gpu", True) == {"xla_gpu_deterministic_ops": True}
    assert (
        step_options("gpu", False) == step_options("cpu", True) == step_options("tpu", True) == {}
    )
