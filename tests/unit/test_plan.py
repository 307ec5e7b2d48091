"""Tests of estimates before a run: parameters, FLOPs, memory, compiler reports, batch size search,
chips.
"""

import dataclasses
import json
import os
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import call, load_config

from smallgpt_jax import models
from smallgpt_jax.config import recipes
from smallgpt_jax.devices import chips
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import structure
from smallgpt_jax.models.components import components
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.layers import norm
from smallgpt_jax.models.mixers import MIXERS
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.ops.attention import splash_kernel
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.planning import compilation, estimate, hlo, kernels, memory_formula, topologies
from smallgpt_jax.planning import plan as plans
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import messages
from smallgpt_jax.training.build import build_program

# Sizes of the models at size `paper`: V is the vocabulary size, S the context length, D the width,
# L the number of layers. WIDTHS are the widths of the stages of lgpt and cgpt.
V, S, D, L = 50_304, 1024, 768, 12
WIDTHS = [D // 2**i for i in range(6)]
# Multiplications per token outside attention: one per weight of a matrix product, and 2·D for the
# weighted sum of pgpt's two paths.
MULTIPLIED = {
    "gpt": 12 * L * D**2 + V * D,
    "pgpt": 12 * L * D**2 + V * D + 2 * D**2 + 2 * D,
    "lgpt": sum(2 * 12 * w**2 + w * w // 2 for w in WIDTHS) + V * 12,
}
MULTIPLIED["cgpt"] = MULTIPLIED["lgpt"]
PARAMETERS = {
    "gpt": MULTIPLIED["gpt"] + (V + S) * D + (2 * L + 1) * D,
    # pgpt's weighted sum has 2·D multiplications but 1 parameter. Its dense layers have 2·D biases,
    # which multiply nothing. So the 2·D cancel, and only the 1 remains.
    "pgpt": MULTIPLIED["pgpt"] + (V + S) * D + (2 * L + 1) * D + 1,
    "lgpt": MULTIPLIED["lgpt"] + (V + S) * D + sum(4 * w + w // 2 for w in WIDTHS) + 12,
}
PARAMETERS["cgpt"] = PARAMETERS["lgpt"]
ATTENTION = {"gpt": L * D, "pgpt": L * D, "lgpt": 2 * sum(WIDTHS), "cgpt": 2 * sum(WIDTHS)}
LITERAL_COUNTS = {"gpt": 163_007_232, "pgpt": 164_188_417, "lgpt": 59_293_248, "cgpt": 59_293_248}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LITERAL_COUNTS)
def test_counts_match_the_formulas(architecture):
    model = models.build(**load_config(architecture, "paper").model)
    assert models.num_parameters(model) == PARAMETERS[architecture] == LITERAL_COUNTS[architecture]
    assert sum(components(model).values()) == PARAMETERS[architecture]
    flops = 6 * MULTIPLIED[architecture] + 12 * S * ATTENTION[architecture]
    assert train_flops_per_token(model) == flops


@pytest.mark.parametrize(
    "attention_mask, window, keys",
    [
        ("causal", 0, 64),
        ("causal", 8, 8),
        ("bidirectional", 0, 64),
        ("bidirectional", 8, 15),  # on both sides
        ("bidirectional", 40, 64),
    ],
)
def test_flops_of_attention_windows(attention_mask, window, keys):
    model = models.build(
        **load_config(
            "gpt",
            model__attention_mask=attention_mask,
            model__attention_windows=(window,),
            model__num_layers=2,
            model__d_model=16,
        ).model
    )
    weights = 2 * 12 * 16**2 + 16 * 512
    assert train_flops_per_token(model) == 6 * weights + 12 * 2 * 16 * keys


def test_components():
    parts = components(models.build(**load_config("gpt", "paper").model))
    assert parts == {
        "token embedding": V * D,
        "position embedding": S * D,
        "attention": 4 * L * D**2,
        "MLP": 8 * L * D**2,
        "head": V * D,
        "LayerNorms": 25 * D,
    }


def test_components_of_a_custom_architecture(monkeypatch):
    """Parameters of custom modules are listed under the names of these modules.

    Other parameters are listed under the components that all models have, such as "attention" and
    "LayerNorms".
    """

    class Shift(nn.Module):
        config: models.ModelConfig

        @nn.compact
        def __call__(self, x_BxTxD, context):
            return nn.Dense(D, use_bias=False, dtype=self.config.dtype)(
                jnp.roll(x_BxTxD, 1, axis=1)
            )

    class Forgetful(nn.Module):  # a block with its own weight and its own name of the norm
        config: models.ModelConfig

        @nn.compact
        def __call__(self, x_BxTxD, context):
            forget_D = self.param("forget", nn.initializers.ones, (D,))
            h_BxTxD = norm(self.config, "norm_mixer")(x_BxTxD)
            return x_BxTxD + h_BxTxD * forget_D[None, None].astype(h_BxTxD.dtype)

    class Own(nn.Module):
        config: models.ModelConfig

        Config = models.ModelConfig

        @nn.compact
        def __call__(self, x_BxTxD, context):
            configs = layer_configs(self.config, self.config.num_layers)
            x_BxTxD = stack_blocks(configs, context, "usual")(x_BxTxD)
            pattern = [dataclasses.replace(configs[0], attention_windows=(i,)) for i in (8, 16)]
            x_BxTxD = stack_blocks(2 * pattern, context, block=Forgetful)(x_BxTxD)
            shifts = [dataclasses.replace(config, mixers=("shift",)) for config in configs[:2]]
            x_BxTxD = stack_blocks(shifts, context, "more")(x_BxTxD)
            for _ in range(2):
                x_BxTxD = nn.LayerNorm()(nn.Dense(D)(x_BxTxD))
            return x_BxTxD * self.param("gate", nn.initializers.ones, (1, 1, D))

    monkeypatch.setitem(models.ARCHITECTURES, "own", Own)
    monkeypatch.setitem(MIXERS, "shift", Shift)
    gpt, own = (
        components(models.build(**load_config("gpt", "paper", model__architecture=name).model))
        for name in ("gpt", "own")
    )
    assert own == {
        **gpt,
        "MLP": gpt["MLP"] + 2 * 8 * D**2,
        "LayerNorms": gpt["LayerNorms"] + (8 + 4) * D,
        "forget": 4 * D,
        "Dense": 2 * (D**2 + D),
        "gate": D,
        "Shift": 2 * D**2,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "position, fallback",
    [
        ("rope", []),
        (
            "alibi",
            [
                "warning: config.model.attention='splash' has no effect: attention with head "
                "width 64 uses plain XLA: splash attention does not support ALiBi"
            ],
        ),
    ],
)
def test_positions_without_an_embedding(position, fallback):
    config = load_config("gpt", "paper", model__position=position, model__attention="splash")
    program = build_program(config, jax.devices()[:1])
    parts = components(program.model)
    assert sum(parts.values()) == PARAMETERS["gpt"] - S * D and "position embedding" not in parts
    assert train_flops_per_token(program.model) == 6 * MULTIPLIED["gpt"] + 12 * S * ATTENTION["gpt"]
    assert messages.fallback_messages(program) == fallback
    (layers,) = structure.attention_layers(program.model, program.mesh, separate_documents=False)
    assert layers.backend == ("xla" if fallback else "splash")


@pytest.mark.parametrize(
    "fields, kept",
    [({}, 4 + 12 / 2), ({"model__remat": "dots"}, 3 + 8 / 2), ({"model__remat": "full"}, 1)],
)
def test_activation_memory_matches_the_formula(fields, kept):
    """The estimated memory matches formulas.

    The model has 12 blocks in bfloat16. A microbatch has 4 sequences per device. Tensor parallelism
    splits most arrays over 2 devices.
    """
    config = load_config(
        "gpt",
        "paper",
        mesh__data=4,
        mesh__tensor=2,
        train__batch_size=32,
        train__microbatches=2,
        **fields,
    )
    program = build_program(config, jax.devices()[:8])
    found = memory_formula.memory_breakdown(
        program.model, program.mesh, program.abstract_state, 4, 8, False
    )
    # CPUs use XLA's attention. For every chunk of 128 queries, it saves the attention weights of
    # all keys up to the chunk's last query.
    scores = (
        0 if fields else L * 4 * sum(128 * keys for keys in range(128, S + 1, 128)) * 12 * 2 / 2
    )
    assert found["activations"] == L * 4 * S * D * 2 * kept + scores
    assert found["logits"] == 4 * S / 8 * V * (4 + 2) / 2
    whole = (S + 25) * D  # parameters that tensor parallelism does not split
    assert found["gradients"] == 4 * ((PARAMETERS["gpt"] - whole) / 2 + whole)
    assert found["gathered"] == found["gradients"] / 2  # in bfloat16
    assert (
        found["weights"] == (found["gradients"] - 4 * 25 * D) / 4 + 4 * 25 * D
    )  # all but the 25 scales are divided
    assert found["moments"] == 2 * found["weights"] + 2 * 4  # plus the optimizer's two counters


# ---------------------------------------------------------------------- compiled programs

PROGRAM = """HloModule step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %gathered = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, dimensions={0}
  ROOT %r = f32[4]{0} add(%p, %p), backend_config={"window_config":{"estimated_cycles":"1000000"}}
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %kernel = f32[4]{0} custom-call(%t), custom_call_target="tpu_custom_call"
  %summed = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%kernel, %t), channel_id=3, to_apply=%add
  ROOT %next = (s32[], f32[4]{0}) fusion(%t), calls=%fused, backend_config={"estimated_cycles":"50"}
}

%condition (t: (s32[], f32[4])) -> pred[] {
  %t.1 = (s32[], f32[4]{0}) parameter(0)
  %limit = s32[] constant(6)
  ROOT %less = pred[] compare(%t.1, %limit), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), backend_config={"estimated_cycles":"7"}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), channel_id=9
  %done = f32[8]{0} all-gather-done(%start), channel_id=9
  %piece = f32[4]{0} fusion(%a), kind=kOutput, calls=%fused
  %psum.1 = f32[5]{0} all-reduce(%a), channel_id=4, to_apply=%add
  %psum.2 = f32[5]{0} all-reduce(%a), channel_id=4, to_apply=%add
  %loop = (s32[], f32[4]{0}) while(%a), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""
SPLASH_PROGRAM = PROGRAM.replace(
    '="tpu_custom_call"',
    '="tpu_custom_call", name="splash_mha_fwd", '
    "operand_layout_constraints={s8[1,2,2]{2,1,0}, bf16[8,4,16,64]{3,2,1,0}}",
)


@pytest.fixture(scope="module")
def tiny():
    """Returns (program, estimate) of a tiny model on one device. Further estimates of the program
    are fast: the compiled steps are stored.
    """
    program = build_program(
        load_config("gpt", model__num_layers=1, model__d_model=16), jax.devices()[:1]
    )
    return program, estimate.estimate(program)


OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.90G of 15.75G hbm."
)


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [None, OUT_OF_MEMORY])
def test_evaluation_that_does_not_fit(tiny, monkeypatch, refusal):
    """`estimate` reports that a program does not fit if its evaluation step needs too much memory.

    Covers a step that does not fit into memory together with the optimizer state, and a step that
    does not compile.
    """
    program, known = tiny
    compile_program = Compiler.compile

    def compile_or_refuse(compiler, lowered):
        if refusal and lowered is not program.lowered_train_step:
            raise jax.errors.JaxRuntimeError(refusal)
        return compile_program(compiler, lowered)

    monkeypatch.setattr(Compiler, "compile", compile_or_refuse)
    monkeypatch.setattr(
        chips, "find_chip", lambda kind: chips.Chip(1.0, known.eval_needed_bytes - 1)
    )
    planned = estimate.estimate(program)
    assert known.fits and not planned.fits and planned.temp_bytes == known.temp_bytes
    if refusal:
        moments = 2 * 4 * planned.parameters
        assert planned.eval_temp_bytes is None
        assert planned.peak_bytes == pytest.approx(26.9 * 2**30 + moments, abs=100)


def test_plan_of_a_step_that_does_not_fit(monkeypatch):
    """`plan` reports the size that the TPU compiler's out-of-memory error states."""

    def refuse(compiler, lowered):
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(Compiler, "compile", refuse)
    monkeypatch.setattr(topologies, "topology_devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(chips, "find_chip", lambda kind: chips.CHIPS["TPU v5e"])
    result = call("plan", "--config=configs/gpt.py:tiny", "--topology=v5e:1x1", "--json")
    planned = json.loads(result.stdout)
    assert result.returncode == 1 and not planned["fits"] and planned["estimated_cycles"] is None
    assert "training step needs 26.90 GiB, the chip has 16 GiB" in result.stderr
    assert "config.train.microbatches" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, missing",
    [
        (None, "Cycles and collectives are not available: the compiled program cannot be read"),
        (PROGRAM, "Cycles are not available: the program calls a kernel whose cost is unknown"),
        (SPLASH_PROGRAM, None),
    ],
)
def test_cycles_that_are_not_available(tiny, monkeypatch, text, missing):
    program, known = tiny
    compile_program = Compiler.compile
    monkeypatch.setattr(
        Compiler,
        "compile",
        lambda compiler, lowered: dataclasses.replace(
            compile_program(compiler, lowered), text=text
        ),
    )
    monkeypatch.setattr(chips, "find_chip", lambda kind: chips.CHIPS["TPU v4"])
    planned = estimate.estimate(program)
    assert planned.fits and planned.temp_bytes == known.temp_bytes
    assert (planned.collectives is None) == (text is None)
    message = format_plan(program, planned)
    if missing:
        assert planned.estimated_cycles is planned.kernel_cycles is planned.estimated_mfu is None
        assert missing in message and "M cycles" not in message
    else:
        assert planned.estimated_cycles == 7 + 6 * 50 and planned.kernel_cycles > 0
        assert "M cycles" in message and "not available" not in message


@pytest.mark.parametrize(
    "flags, substrings",
    [
        (["--topology=v9:4x4"], ["v9:4x4", "v5e:4x4", "v5p:2x2x1", "cpu:N"]),
        (["--topology=cpu:0"], ["cpu:0", "cpu:N"]),
        (["--topology=v5e-16"], ["v5e-16: unknown; choose v5e:4x4\n"]),
        (["--topology=v5litepod-8"], ["choose v5e:2x4\n"]),
        (["--topology=v4-64"], ["choose v4:2x4x4\n"]),  # 64 cores are 32 chips
        (
            ["--topology=V6E"],
            ["choose v6e:1x1, v6e:2x2, v6e:2x4, v6e:4x4, v6e:4x8, v6e:8x8, v6e:8x16, v6e:16x16\n"],
        ),
        (["--topology=v5e:2x2x1"], ["v5e:2x2x1", "no such slice", "choose v5e:2x2\n"]),
        (
            ["--topology=v5e:3x5"],
            ["v5e:3x5", "no such slice", "(no topology)", "v5e:4x4", "v5e:16x16"],
        ),
        (
            ["--topology=tpu"],
            ["tpu: unknown", "v5e:4x4", "h100:8", "a100-80:8", "h200:8", "l4:8", "rtx4090:8"],
        ),
        (["--topology=a100:8"], ["a100-40:1", "a100-40:2x8", "a100-80:8"]),
        (["--topology=H100-8"], ["choose h100:1, h100:8, h100:2x8\n"]),
        (["--topology=h100:16"], ["choose h100:2x8\n"]),
        (["--topology=l40s:2x8"], ["choose l40s:1, l40s:8\n"]),  # no published network
        (["--topology=h100:0"], ["h100:0: unknown"]),
    ],
)
def test_refuses_unknown_topologies(monkeypatch, flags, substrings):
    def refuse(**_):
        raise RuntimeError("no topology\nand more")

    monkeypatch.setattr(topologies.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(topologies, "importlib", fake_importlib("libtpu"))
    before = dict(os.environ), jax.config.jax_enable_compilation_cache
    assert_refused(call("plan", "--config=configs/gpt.py:tiny", *flags), substrings)
    assert (dict(os.environ), jax.config.jax_enable_compilation_cache) == before


@pytest.mark.parametrize(
    "devices, flags, substrings",
    [
        (2, ["--search"], ["--search needs chips"]),
        (3, ["--config.mesh.data=2"], ["data=2", "which is 3"]),
        (2, ["--config.train.batch_size=7"], ["batch_size=7", "multiple of 2"]),
    ],
)
def test_refuses_impossible_plans(monkeypatch, devices, flags, substrings):
    monkeypatch.setattr(topologies, "topology_devices", lambda topology: jax.devices()[:devices])
    assert_refused(
        call("plan", "--config=configs/gpt.py:tiny", f"--topology=cpu:{devices}", *flags),
        substrings,
    )


def test_more_cpu_devices_than_the_process_has():
    count = len(jax.devices()) + 1
    assert_refused(
        call("plan", "--config=configs/gpt.py:tiny", f"--topology=cpu:{count}"),
        [f"cpu:{count}: JAX already runs in this process, with fewer CPU devices ({count - 1})"],
    )


def fake_importlib(spec):
    """Returns a fake importlib whose `find_spec` returns `spec` for any package."""
    return SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: spec))


def assert_refused(result, substrings):
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") <= 2, result.stderr
    assert all(s in result.stderr for s in substrings), result.stderr


def test_names_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(topologies, "importlib", fake_importlib(None))
    with pytest.raises(UserError, match=r"pip install -c constraints.txt -e '\.\[plan\]'"):
        topologies.tpu_devices("v5e:2x2")


class UnreadableProgram:
    """A compiled program whose `as_text` fails, which can happen for TPU v5p and v6e."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError(
            "RET_CHECK failure: async-update instruction should have 1 operands"
        )


def test_reads_the_dump_of_a_program_without_text(tmp_path):
    readable = jax.jit(lambda x: x).lower(1.0).compile()
    assert hlo.HloModule(compilation.read_hlo(readable, tmp_path)).computations
    assert compilation.read_hlo(UnreadableProgram(), tmp_path) is None
    (tmp_path / "module_0000.jit_train_step.cl_1.after_codegen.txt").write_text(PROGRAM)
    (tmp_path / "module_0002.extracted.cl_1.after_codegen.txt").write_text("")
    assert compilation.read_hlo(UnreadableProgram(), tmp_path) == PROGRAM


def test_reading_a_program():
    program = hlo.HloModule(PROGRAM)
    assert (
        program.cycles() == 7 + 6 * 50
    )  # the cycles of a fusion include those of its instructions
    assert [times for times, _ in program.kernels()] == [6]
    assert program.collectives() == {
        "all-reduce": {"count": 6 + 2, "bytes": 6 * (4 * 4 + 2 * 6) + 2 * 4 * 5},
        "all-gather": {"count": 7, "bytes": 8 * 4 + 6 * 2 * 8 * 16},
    }
    noted = PROGRAM.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    )
    assert hlo.HloModule(noted).cycles() == 7 + 4 * 50


def test_roofline_of_a_kernel():
    """The estimated time of an attention kernel is the time of its matrix products at the peak
    speed of the chip.

    Splash attention computes two matrix products per head. Rows have 1024 positions, and the head
    width is padded to
    128. The causal mask excludes one of the 4 blocks of (512 × 512) scores.
    """
    line = (
        '%splash_mha_fwd_residuals.1 = custom-call(%a), custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={s8[1,2,2]{2,1,0}, bf16[8,12,64,1024]{3,2,1,0}}"
    )
    products = 2 * 2 * 8 * 12 * 0.75 * 1024**2 * 128
    assert kernels.kernel_seconds(line, 1024, chips.CHIPS["TPU v5 lite"]) == products / 197e12
    of_paths = line.replace("bf16[8,12,64,1024]{3,2,1,0}", "bf16[2,4,12,1024,64]{4,3,2,1,0}")
    assert kernels.kernel_seconds(of_paths, 1024, chips.CHIPS["TPU v5 lite"]) == products / 197e12
    plain = (
        "%online-softmax = f32[2,4,1024,16]{3,2,1,0} custom-call(%a, %b), "
        'custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={f32[2,4,1024,1024]{3,2,1,0}, f32[2,4,1024,16]{3,2,1,0}}"
    )
    assert (
        kernels.kernel_seconds(plain, 1024, chips.CHIPS["TPU v5 lite"])
        == 2 * 2 * 4 * 1024**2 * 128 / 197e12
    )
    assert (
        kernels.kernel_seconds("%other.1 = custom-call()", 1024, chips.CHIPS["TPU v5 lite"]) is None
    )


@pytest.mark.parametrize(
    "rule, shared, widths, forward, gradient",
    [
        ("gated_delta", 12, (48, 96), 2441, 3725),
        ("gated_delta", 12, (128, 256), 2754, 5132),
        ("state_space", 1, (32, 64), 482, 993),
        ("state_space", 1, (128, 128), 708, 1175),
    ],
)
def test_cycles_of_recurrences(rule, shared, widths, forward, gradient):
    """The loop over chunks of two heads has so many instructions in the compiler's schedule for
    v5e.

    The grid adds 62 cycles per chunk and head.
    """
    keys, values = (
        f"bf16[2,{shared},{widths[0]},1024]{{3,2,1,0}}",
        f"bf16[2,12,{widths[1]},1024]{{3,2,1,0}}",
    )
    for name, instructions in (("forward", forward), ("gradient", gradient)):
        line = (
            f'%{rule}_{name}.1 = custom-call(%a), custom_call_target="tpu_custom_call", '
            f"operand_layout_constraints={{{keys}, {keys}, {values}}}"
        )
        cycles = kernels.kernel_seconds(line, 1024, chips.CHIPS["TPU v5 lite"]) * 1.5e9
        assert cycles / (2 * 12 * 8) == pytest.approx(62 + instructions / 2, rel=0.1)


@pytest.mark.parametrize(
    "kernel, width, chip, scores_seconds, products",
    [
        (
            "flash_attention_forward",
            64,
            "TPU v5 lite",
            3 / 1024 / 1.5e9,
            1,
        ),  # the softmax takes longer than the product
        ("flash_attention_forward", 2, "TPU v5p", 3 / 1024 / (2 * 1.75e9), 1),
        ("flash_attention_forward", 256, "TPU v5 lite", 2 * 256 / 197e12, 1),
        ("flash_attention_gradient", 64, "TPU v5 lite", 2 * 2 * 128 / 197e12, 3),
        ("flash_attention_gradient", 256, "TPU v6 lite", 4 / 1024 / 1.75e9, 3),
    ],
)
def test_roofline_of_flash_attention(kernel, width, chip, scores_seconds, products):
    """The kernels compute 3 of 4 blocks of (512 × 512) scores. Head widths below 16 take as long as
    16.
    """
    line = (
        f'%{kernel}_0.1 = custom-call(%a), custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{bf16[8,12,{width},1024]{{3,2,1,0}}, bf16[8,6,{width},1024]{{3,2,1,0}}}}"
    )
    expected = (
        8
        * 12
        * 0.75
        * 1024**2
        * (scores_seconds + products * 2 * max(width, 16) / chips.CHIPS[chip].flops)
    )
    assert kernels.kernel_seconds(line, 1024, chips.CHIPS[chip]) == pytest.approx(
        expected, rel=2e-3
    )


def test_roofline_of_a_grouped_product():
    """1,000 rows are 8 tiles of 128 rows. At most 15 tiles are computed twice, at the 15 borders
    between 16 groups.
    """
    line = (
        "%ragged-dot-none.5 = bf16[16,64,256] custom-call(%a), "
        'custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={s32[1]{0}, s32[17]{0}, s32[23]{0}, s32[23]{0}, s32[1]{0}, "
        "bf16[1000,64]{1,0}, "
        'OPERAND}, frontend_attributes={ragged_dot_tiling="128,64,256"}'
    )
    for operand in (
        "bf16[16,64,256]{2,1,0}",
        "bf16[1000,256]{1,0}",
    ):  # forward pass, gradient of the matrices
        seconds = kernels.kernel_seconds(
            line.replace("OPERAND", operand), 1024, chips.CHIPS["TPU v5 lite"]
        )
        assert seconds == 2 * 23 * 128 * 64 * 256 / 197e12
    metadata = line.replace("ragged-dot-none", "ragged-dot-metadata")
    assert kernels.kernel_seconds(metadata, 1024, chips.CHIPS["TPU v5 lite"]) == 0


@pytest.mark.parametrize("window", [0, 1, 256, 257, 258, 512, 513, 514, 1500, 2047])
def test_the_roofline_counts_the_blocks_that_the_kernel_computes(window):
    """Blocks have 256 × 256 scores for windows of up to 512 positions, otherwise 512 × 512. Masked
    blocks do not count.

    For splash attention, a block of 512 × 512 scores counts if the mask of JAX's kernel is nonzero
    there.
    """
    distances = np.subtract.outer(np.arange(2048), np.arange(2048))
    allowed = (distances >= 0) & (distances < (window or 2048))
    length, forward_cycles, gradient_cycles = (256, 3.5, 5) if 0 < window <= 512 else (512, 3, 4)
    blocks = np.count_nonzero(
        allowed.reshape(2048 // length, length, 2048 // length, length).any(axis=(1, 3))
    )
    chip = chips.CHIPS["TPU v5 lite"]
    for name, vector_cycles, products in (
        ("forward", forward_cycles, 1),
        ("gradient", gradient_cycles, 3),
    ):
        line = (
            f"%jvp_flash_attention_{name}_{window}_.1 = custom-call(%a), "
            "operand_layout_constraints={bf16[3,2,64,2048]{3,2,1,0}}"
        )
        seconds = (
            2 * 3 * length**2 * (vector_cycles / 1024 / chip.hertz + products * 2 * 64 / chip.flops)
        )
        assert kernels.kernel_seconds(line, 2048, chip) == pytest.approx(blocks * seconds)
    kernel = splash_kernel(2, 2048, 64, AttentionMask(window), True)
    for name, info in (
        ("fwd", kernel.fwd_mask_info),
        ("dq", kernel.dq_mask_info),
        ("dkv", kernel.dkv_mask_info),
    ):
        shape = ",".join(map(str, info.data_next.shape))
        line = (
            f"%splash_mha_{name}.1 = custom-call(%a), "
            f"operand_layout_constraints={{s8[{shape}]{{2,1,0}}, "
            f"s8[{shape}]{{2,1,0}}, bf16[3,2,64,2048]{{3,2,1,0}}}}"
        )
        products = {"fwd": 2, "dq": 3, "dkv": 4}[name] * 2 * 3 * 2 * 512**2 * 128
        assert kernels.kernel_seconds(line, 2048, chips.CHIPS["TPU v5 lite"]) == pytest.approx(
            np.count_nonzero(info.block_mask) * products / 197e12
        )


@pytest.mark.parametrize(
    "message, needed",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm.",
            18.5 * 2**30,
        ),
        (
            "the total memory required for HLO temporaries (1.25T) exceeds available HBM.",
            1280 * 2**30 + 7,
        ),
    ],
)
def test_parses_the_compilers_memory_errors(message, needed):
    assert estimate.bytes_needed(RuntimeError(message), 7) == needed


@pytest.mark.parametrize("largest", [1, 2, 3, 37, 64, 100])
def test_search_finds_the_largest_batch_in_few_compilations(monkeypatch, largest):
    """The search finds `largest`, the largest number of sequences that fit, with at most 12
    compilations.

    In this test, the memory grows linearly with the batch size, except for one jump.
    """
    hbm = 3e9 + largest * 1e8 + 5e7
    sizes = []

    def fake_estimate(batch_size, progress):
        assert batch_size % 16 == 0
        sizes.append(batch_size // 16)
        needed = 3e9 + sizes[-1] * 1e8 + (2e7 if sizes[-1] > 40 else 0)
        return type("Estimate", (), {"peak_bytes": needed, "fits": needed <= hbm})

    monkeypatch.setattr(estimate, "estimate", fake_estimate)
    assert estimate.largest_batch(lambda batch_size: batch_size, 16, hbm) == 16 * largest
    assert len(sizes) == len(set(sizes)) <= 12


def test_steps_and_rate_follow_the_batch_that_a_search_finds(monkeypatch):
    monkeypatch.setattr(plans, "_find_largest_batch", lambda *_: 32)
    lines = []
    found = plans.plan("llama:20k", "cpu:1", search=True, log=lines.append).config
    expected = Config.of(recipes.load_config("llama:20k", {"train.batch_size": 32}))
    assert (found.train.steps, found.optimizer) == (expected.train.steps, expected.optimizer)
    assert "steps of 1,024 tokens" in lines[0] and "steps of 8,192 tokens" in lines[-1]


def test_search_when_nothing_fits(monkeypatch):
    monkeypatch.setattr(
        estimate, "estimate", lambda *_: type("Estimate", (), {"peak_bytes": 2, "fits": False})
    )
    with pytest.raises(UserError, match="not even one sequence"):
        estimate.largest_batch(lambda batch_size: batch_size, 1, 1.0)


# ---------------------------------------------------------------------- chips


@pytest.mark.parametrize(
    "device_kind, flops, hbm",
    [
        ("TPU v4", 275e12, 32 * 2**30),
        ("TPU v5e", 197e12, 16 * 2**30),
        ("TPU v5 lite", 197e12, 16 * 2**30),
        ("TPU v5p", 459e12, 95 * 2**30),
        ("TPU v5", 459e12, 95 * 2**30),
        ("TPU v6e", 918e12, 32 * 2**30),
        ("TPU v6 lite", 918e12, 32 * 2**30),
        ("NVIDIA A100-SXM4-80GB", 312e12, 80e9),
        ("NVIDIA H100 80GB HBM3", 989e12, 80e9),
        ("NVIDIA H100 PCIe", 756.5e12, 80e9),
        ("NVIDIA H100 NVL", 835.5e12, 94e9),
        ("NVIDIA H200", 989e12, 141e9),
        ("NVIDIA H200 NVL", 835.5e12, 141e9),
        ("NVIDIA A100-SXM4-40GB", 312e12, 40e9),
        ("NVIDIA L4", 121e12, 24e9),
        ("NVIDIA L40S", 362e12, 48e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 24e9),
    ],
)
def test_finds_chips_by_device_kind(device_kind, flops, hbm):
    found = chips.find_chip(device_kind)
    assert (found.flops, found.hbm) == (flops, hbm)


@pytest.mark.parametrize(
    "device_kind", ["cpu", "TPU v4 lite", "TPU v50", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_unknown_chips(device_kind):
    assert chips.find_chip(device_kind) is None
