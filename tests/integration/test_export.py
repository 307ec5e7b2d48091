"""Tests of exported models: their logits and texts in PyTorch, and their import."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call, forward, init
from conversion_helpers import GPT2, export, load_in_torch, random_tokens
from run_helpers import assert_bitwise_equal

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import gpt2, hugging_face, smallgpt
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import layers
from smallgpt_jax.run.workdir import ImportedModel, write_imported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

EXPERTS = dict(
    mlp="moe",
    mlp_ratio=0.5,
    num_experts=6,
    experts_per_token=2,
    expert_scale=2.5,
    expert_bias_rate=0.2,
    scan_layers=False,
)
# The variants cover every part with PyTorch code, every cache and every kind of position. Random
# models (test_random_models.py) compare the logits of all other settings. Where norm_epsilon is
# large, a wrong value would change the logits. The attention windows repeat in different ways,
# because this determines how blocks are stacked (models/block.py).
VARIANTS = {
    "gpt of GPT-2's shape": ("gpt", GPT2),
    "gpt with Llama's block and windows": (
        "gpt",
        dict(
            position="rope",
            rope_base=300.0,
            norm="rms",
            norm_epsilon=1e-3,
            mlp="gated",
            mlp_ratio=8 / 3,
            activation="silu",
            num_kv_heads=2,
            qk_norm=True,
            num_layers=4,
            attention_windows=(5, 0),
        ),
    ),
    "post-norm gpt without position encoding": (
        "gpt",
        dict(
            position="none",
            mlp_ratio=2.0,
            norm_position="post",
            norm_epsilon=1e-3,
            activation="relu2",
            num_kv_heads=1,
            head_dim=12,
            num_layers=4,
            attention_windows=(6, 6, 3),
        ),
    ),
    "gpt with Gated DeltaNet": (
        "gpt",
        dict(
            position="rope",
            mixers=("delta", "attention"),
            use_bias=True,
            delta_head_dim=6,
            norm_epsilon=1e-3,
            norm_position="post",
            input_mix=True,
            residual_scales=True,
            attention_gate=True,
            context_length=72,
        ),
    ),
    "cgpt with Mamba-2 and gated convolutions": (
        "cgpt",
        dict(
            mixers=("mamba", "conv"),
            conv_taps=2,
            mamba_expand=1,
            mamba_state=6,
            conv_kernel=3,
            norm="rms",
            use_bias=True,
        ),
    ),
    "pgpt with four paths": (
        "pgpt",
        dict(
            num_layers=4,
            num_paths=4,
            use_bias=True,
            parallel_block=True,
            value_embeddings=(1,),
            logit_softcap=2.0,
        ),
    ),
    "DeepNorm pgpt with equal path weights and RoPE": (
        "pgpt",
        dict(
            path_weights="equal",
            position="rope",
            tie_embeddings=True,
            norm_position="deepnorm",
            norm="rms",
            num_layers=4,
            attention_windows=(4, 0),
            **EXPERTS,
            expert_mlp="gated",
            num_shared_experts=2,
            balance_loss=0.01,
        ),
    ),
    "post-norm lgpt with scaled stage heads and ALiBi": (
        "lgpt",
        dict(
            position="alibi",
            stage_heads="scaled",
            compress_last_stage=False,
            norm_position="post",
            num_kv_heads=2,
            head_dim=6,
            qk_norm=True,
            num_layers=8,
            blocks_per_stage=4,
            attention_windows=(4, 4, 0, 0, 4, 0, 4, 0),
        ),
    ),
}


def build_variant(variant: str) -> models.LanguageModel:
    name, fields = VARIANTS[variant]
    stages = dict(blocks_per_stage=1) if name in ("lgpt", "cgpt") else {}
    return build(
        name,
        **{
            **dict(num_layers=2, d_model=32, num_heads=4, context_length=32, vocab_size=96),
            **stages,
            **fields,
        },
    )


def random_state(model):
    """Returns a model state with biases that affect which experts are chosen."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.float32(rng.uniform(0, 0.3, x.shape)), models.abstract_model_state(model)
    )


def biases_of(model_state) -> list:
    """All of a state that logits depend on."""
    leaves = jax.tree.leaves_with_path(model_state)
    return [np.asarray(x) for path, x in leaves if path[-1].key == "bias"]


def test_refuses_architectures_without_pytorch_code(tmp_path):
    config = dataclasses.replace(build("gpt").config, architecture="mine")
    with pytest.raises(UserError, match="architecture='mine': no PyTorch code"):
        hugging_face.export_folder(tmp_path, models.LanguageModel(config), {}, None)
    assert not any(tmp_path.iterdir())


def test_refuses_parts_without_pytorch_code(tmp_path, monkeypatch):
    monkeypatch.setitem(layers.NORMS, "mine", layers.rms_norm)
    with pytest.raises(
        UserError, match=r"config.model.norm='mine': no PyTorch code for the export; .* layer, rms"
    ):
        hugging_face.export_folder(tmp_path, build("gpt", norm="mine"), {}, None)
    assert not any(tmp_path.iterdir())


def test_refuses_fields_without_pytorch_code(tmp_path, monkeypatch):
    """If the PyTorch code lacks a field, the field must have its default value."""
    known = [name for name in smallgpt.known_fields() if name != "rope_base"]
    monkeypatch.setattr(smallgpt, "known_fields", lambda: known)
    assert "rope_base" not in smallgpt.to_config(build("gpt").config)
    with pytest.raises(
        UserError, match=r"config.model.rope_base=500.0: no PyTorch code .* only 10000.0"
    ):
        hugging_face.export_folder(tmp_path, build("gpt", rope_base=500.0), {}, None)
    assert not any(tmp_path.iterdir())


def test_only_models_of_gpt_2s_shape_are_exported_as_gpt_2():
    for position, form in (("learned", gpt2), ("rope", smallgpt)):
        assert hugging_face.find_format(build("gpt", **GPT2, position=position).config) is form


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_and_import(variant, tmp_path):
    """An exported model has the same loss and logits in PyTorch.

    This holds with cache, without cache, and after PyTorch has saved the model again. A left-padded
    row has the same logits and generates the same tokens as the row alone. The imported parameters
    are bitwise equal. The imported config is the same, except for scan_layers=False.
    """
    model, is_gpt2 = build_variant(variant), VARIANTS[variant][1] == GPT2
    params, model_state = init(model), random_state(model)
    folder = export(tmp_path / "out", model, params, model_state=model_state)
    theirs = load_in_torch(folder)
    assert type(theirs).__name__ == ("GPT2LMHeadModel" if is_gpt2 else "SmallGPTForCausalLM")
    assert theirs.generation_config.max_length == model.config.context_length
    tokens = random_tokens(model)
    ours = np.asarray(forward(model, params, jnp.asarray(tokens), model_state))
    with torch.no_grad():
        whole = theirs(torch.tensor(tokens), use_cache=False).logits
        np.testing.assert_allclose(whole, ours, atol=1e-4)
        # Four calls that share a cache give the same logits as one call without a cache.
        cache, pieces = None, []
        for start, end in ((0, 7), (7, 8), (8, 20), (20, tokens.shape[1])):
            output = theirs(
                torch.tensor(tokens[:, start:end]), past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            pieces.append(output.logits)
        np.testing.assert_allclose(torch.cat(pieces, 1), ours, atol=1e-4)
        # A left-padded row in a batch has the same logits and generates the same tokens as the row
        # alone.
        short, pad = tokens[:1, :9], 4
        rows = np.concatenate([np.pad(short, ((0, 0), (pad, 0))), tokens[1:2, : 9 + pad]])
        mask = np.ones_like(rows)
        mask[0, :pad] = 0
        if not is_gpt2:  # GPT2LMHeadModel infers positions from the mask only in `generate`
            padded = theirs(torch.tensor(rows), attention_mask=torch.tensor(mask)).logits
            np.testing.assert_allclose(padded[0, pad:], ours[0, :9], atol=1e-4)
            np.testing.assert_allclose(padded[1], ours[1, : 9 + pad], atol=1e-4)
        settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        batch = theirs.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **settings)
        alone = theirs.generate(torch.tensor(short), **settings)
        uncached = theirs.generate(torch.tensor(short), use_cache=False, **settings)
        assert batch[0, pad:].tolist() == alone[0].tolist() == uncached[0].tolist()
        loss = theirs(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
        log_p = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(ours))[:, :-1], tokens[:, 1:, None], 2
        )
        assert loss == pytest.approx(-log_p.mean(), abs=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(
            load_in_torch(tmp_path / "again")(torch.tensor(tokens), use_cache=False).logits, whole
        )
    for source in ("out", "again"):
        back = hugging_face.read_folder(str(tmp_path / source))
        assert_bitwise_equal(back.params, jax.tree.map(np.asarray, params))
        expected = {**vars(model.config), "scan_layers": False}
        assert vars(back.model.config) == expected
        assert jax.tree.structure(back.model_state) == jax.tree.structure(model_state)
        assert_bitwise_equal(biases_of(back.model_state), biases_of(model_state))


@pytest.mark.slow
@pytest.mark.parametrize("cast_after_loading", [False, True])
def test_routers_stay_in_float32(cast_after_loading, tmp_path):
    """A model in bfloat16 keeps the differences between its biases, which are steps of 0.001."""
    model = build("gpt", **EXPERTS, num_layers=1, num_heads=2, d_model=16)
    state = jax.tree.map(
        lambda x: 0.5 + 0.001 * np.arange(x.size, dtype=np.float32).reshape(x.shape),
        models.abstract_model_state(model),
    )
    params, folder = init(model), tmp_path / "out"
    export(folder, model, params, model_state=state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=True,
        dtype=torch.float32 if cast_after_loading else torch.bfloat16,
    )
    theirs = theirs.to(torch.bfloat16) if cast_after_loading else theirs
    router = theirs.trunk.blocks[0].mlp.router
    ours = params["trunk"]["blocks"]["mlp"]["router"]["kernel"][0]
    assert torch.equal(
        router.bias, torch.tensor(state["trunk"]["blocks"]["mlp"]["router"]["bias"][0])
    )
    assert torch.equal(router.weight, torch.tensor(np.asarray(ours).T))
    logits = theirs(torch.tensor(random_tokens(model))).logits
    assert logits.dtype == torch.bfloat16 and theirs.trunk.blocks[0].mlp.up.dtype == torch.bfloat16
    np.testing.assert_allclose(
        logits.detach().float(), forward(model, params, random_tokens(model), state), atol=0.05
    )


@pytest.mark.slow
def test_commands_keep_the_biases_of_experts(tmp_path):
    """The exported and the imported model have the biases of the run."""
    model = build("pgpt", **EXPERTS, num_layers=2, num_heads=2, d_model=16)
    model_state, run = random_state(model), tmp_path / "run"
    run.mkdir()
    write_imported(run, ImportedModel(model, init(model), tokenizers.Bytes(), model_state), {})
    biases = np.asarray(model_state["trunk"]["paths"]["blocks"]["mlp"]["router"]["bias"])
    for flag, paths in (("all", [0, 1]), ("1", [1])):
        out, back = tmp_path / f"out {flag}", tmp_path / f"back {flag}"
        for arguments in (
            ["--to=hf", f"--workdir={run}", f"--output={out}", f"--paths={flag}"],
            ["--from=hf", f"--workdir={back}", f"--input={out}"],
        ):
            result = call("convert", *arguments)
            assert result.returncode == 0 and not result.stderr, result.stderr
        router = inference.load_trained(back).model_state["trunk"]["paths"]["blocks"]["mlp"][
            "router"
        ]
        assert np.array_equal(router["bias"], biases[paths])


def test_variants_cover_the_pytorch_code():
    """Each architecture and each part with PyTorch code in conversion/exported/ needs an entry in
    VARIANTS.
    """
    configs = [build_variant(variant).config for variant in VARIANTS]
    for field, values in smallgpt.SUPPORTED_VALUES.items():
        used = [getattr(config, field) for config in configs]
        assert {
            part for value in used for part in (value if isinstance(value, tuple) else [value])
        } == set(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, fields, is_stateful",
    [
        ("gpt", {}, False),
        ("gpt", dict(mixers=("attention", "delta")), True),
        ("gpt", dict(mixers=("mamba",)), True),
        ("gpt", dict(mixers=("attention", "conv")), True),
        ("cgpt", dict(conv_kernel=3, blocks_per_stage=1), False),
    ],
    ids=["gpt", "delta", "mamba", "conv", "cgpt"],
)
def test_assisted_generation_is_right_or_refused(name, fields, is_stateful, tmp_path):
    """Assisted generation sets the cache back after a wrong guess, but a state cannot be set back."""
    settings = dict(num_layers=2, d_model=32, num_heads=4, context_length=64, vocab_size=32)
    model = build(name, **settings, **fields)
    theirs = load_in_torch(export(tmp_path / "out", model, init(model)))
    assert theirs._is_stateful == is_stateful
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter += 0.3 * torch.randn_like(parameter)
    settings = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    for prompt in ([1, 2, 3, 1, 2, 3, 1, 2], [5, 6] * 6, [7, 8, 9, 7, 8]):
        prompt = torch.tensor([prompt])
        if is_stateful:
            with pytest.raises(ValueError, match="not supported with stateful models"):
                theirs.generate(prompt, prompt_lookup_num_tokens=4, **settings)
        else:
            assert torch.equal(
                theirs.generate(prompt, prompt_lookup_num_tokens=4, **settings),
                theirs.generate(prompt, **settings),
            )
