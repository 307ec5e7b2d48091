"""Fine-tuning: starting weights, frozen parameters, LoRA, and the model that comes out."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import build, call, forward, init, load_config
from flax import linen as nn
from flax import traverse_util
from run_helpers import SMALL, assert_equal, start_from, state_of
from safetensors.numpy import load_file

from smallgpt_jax import inference
from smallgpt_jax.conversion import hugging_face, peft_adapter
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import Parameter, abstract_params
from smallgpt_jax.optim import lora
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.trainable import make_masks
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

MODEL = {
    **{
        name.removeprefix("model__"): value
        for name, value in SMALL.items()
        if name.startswith("model__")
    },
    "num_layers": 1,
    "vocab_size": 260,
    "use_bias": True,
    "tie_embeddings": True,
    "activation": "gelu_tanh",
}
RANK, ALPHA = 2, 8.0
LLAMA = dict(
    position="rope",
    norm="rms",
    mlp="gated",
    activation="silu",
    num_layers=2,
    d_model=32,
    num_heads=4,
    context_length=32,
    vocab_size=300,
    mlp_ratio=2.625,
)
NATIVE = {
    "Llama": {},
    "Qwen3": dict(qk_norm=True, num_kv_heads=2, head_dim=12, tie_embeddings=True),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns the workdir of an imported gpt, and a file with examples."""
    folder = tmp_path_factory.mktemp("tuning")
    model = build("gpt", **MODEL)
    write_imported(
        folder / "imported", ImportedModel(model, init(model), Bytes()), {"format": "run"}
    )
    rows = [
        {"prompt": f"question {i}", "completion": " yes" if i % 2 else " no"} for i in range(200)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder, **fields):
    return load_config(
        "gpt",
        **{
            **{f"model__{name}": value for name, value in MODEL.items()},
            "data__source": str(folder / "a.jsonl"),
            "data__format": "completion",
            "data__packing": "best_fit",
            "data__separate_documents": True,
            "data__tokenizer": "bytes",
            "train__batch_size": 8,
            "train__microbatches": 1,
            "train__loss_chunks": 1,
            "train__eval_every": 100,
            "train__eval_steps": 1,
            "train__checkpoint_every": 2,
            "train__steps": 4,
            "optimizer__warmup_steps": 0,
            "optimizer__decay_steps": 100,
            "optimizer__learning_rate": 1e-2,
            "optimizer__lora_rank": RANK,
            "optimizer__lora_alpha": ALPHA,
            **fields,
        },
    )


@pytest.fixture(scope="module")
def tuned(imported):
    """Returns the workdir of a run with LoRA from the imported weights, 4 steps without an
    interruption.
    """
    shutil.copytree(imported / "imported", imported / "tuned")
    train_and_evaluate(config_of(imported), str(imported / "tuned"))
    return imported / "tuned"


@pytest.mark.slow
def test_a_run_with_lora_changes_only_its_pairs_and_resumes(imported, tuned):
    resumed = shutil.copytree(tuned, imported / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "4")
    train_and_evaluate(config_of(imported), str(resumed))
    base, _ = state_of_step_0(imported / "imported")
    (params, opt_state), (params_resumed, opt_state_resumed) = (
        state_of(tuned, 4),
        state_of(resumed, 4),
    )
    assert_equal(params, base)
    assert_equal((params_resumed, opt_state_resumed), (params, opt_state))
    pairs, pairs_resumed = heads_of(tuned), heads_of(resumed)
    assert_equal(pairs, pairs_resumed)
    assert all(np.any(x) for x in jax.tree.leaves(pairs))
    # The optimizer has two moments of each pair, and nothing of the frozen weights.
    shapes = sorted(x.shape for x in jax.tree.leaves(opt_state) if x.ndim)
    assert shapes == sorted(2 * [x.shape for x in jax.tree.leaves(pairs)])


def state_of_step_0(workdir):
    trained = inference.load_trained(workdir)
    return jax.device_get((trained.params, trained.model_state))


def heads_of(workdir):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        tree = checkpoints.restore(4, args=ocp.args.Composite(heads=ocp.args.StandardRestore()))
    return jax.tree.map(np.asarray, tree["heads"][lora.NAME])


@pytest.mark.slow
def test_a_loaded_model_has_the_pairs_merged(imported, tuned):
    """y = x·W + (alpha / rank)·(x·A)·B in float64, as in equation 3 of arXiv 2106.09685."""
    base, _ = state_of_step_0(imported / "imported")
    merged, pairs = inference.load_trained(tuned).params, heads_of(tuned)
    x = np.random.default_rng(0).standard_normal((3, MODEL["d_model"]))
    sizes = {
        ("attention", "qkv"): (16, 48),
        ("attention", "out"): (16, 16),
        ("mlp", "up"): (16, 64),
    }
    for kernel, (m, n) in sizes.items():
        w, found, pair = (
            (tree["trunk"]["blocks"][kernel[0]][kernel[1]]["kernel"])
            for tree in (base, merged, pairs)
        )
        a, b = np.float64(pair["a"]).reshape(m, RANK), np.float64(pair["b"]).reshape(RANK, n)
        applied = x @ np.float64(w).reshape(m, n) + ALPHA / RANK * (x @ a) @ b
        np.testing.assert_allclose(x @ np.float64(found).reshape(m, n), applied, atol=1e-6)
        assert np.abs(applied - x @ np.float64(w).reshape(m, n)).max() > 1e-3
    assert_equal(jax.device_get(merged["token_embedding"]), base["token_embedding"])
    unmerged = inference.load_trained(tuned, merge_lora=False).params
    assert_equal(jax.device_get(unmerged), base)


def test_merged_weights_of_any_model_are_products_in_float64():
    """W + scale·A·B, of the output head, which the pattern names, and of both factors of matrices
    with a rank_ratio: A is (inputs, rank), B is (rank, outputs).
    """
    model = build("pgpt", **{**MODEL, "num_layers": 2, "tie_embeddings": False, "rank_ratio": 0.5})
    abstract, params, rng = abstract_params(model), init(model), np.random.default_rng(0)
    pairs = jax.tree.map(
        lambda x: np.float32(rng.normal(0, 0.1, x.shape)),
        lora.abstract_pairs(abstract, RANK, "kernel|head"),
    )
    merge = jax.jit(lambda params, pairs: lora.merge(abstract, params, pairs, scale=3.0))
    merged = traverse_util.flatten_dict(merge(params, pairs))
    factors = traverse_util.flatten_dict(pairs)
    adapted = {path[:-1] for path in factors}
    assert ("head",) in adapted and {"kernel_in", "kernel_out"} <= {path[-1] for path in adapted}
    for path, weight in traverse_util.flatten_dict(jax.device_get(params)).items():
        expected = np.float64(weight)
        if path in adapted:
            a, b = (np.float64(factors[*path, letter]) for letter in "ab")
            stack = a.shape[: 2 if "blocks" in path else 1 if "paths" in path else 0]
            a, b = a.reshape(*stack, -1, RANK), b.reshape(*stack, RANK, -1)
            expected = expected + 3 * (a @ b).reshape(weight.shape)
        np.testing.assert_allclose(merged[path], expected, atol=1e-6)


def test_pairs_begin_as_in_the_paper():
    """A is random with variance 1 / (number of inputs), and B is 0."""
    parameters = abstract_params(build("gpt", d_model=64, num_heads=2, num_layers=2, head_dim=48))
    draw = jax.jit(lambda key: nn.unbox(lora.init(parameters, 32, "kernel|head", key)))
    pairs = jax.device_get(draw(jax.random.key(0)))
    inputs = {"qkv": 64, "out": 2 * 48, "up": 64, "down": 4 * 64, "head": 512}
    for path, factor in traverse_util.flatten_dict(pairs).items():
        name = path[-3] if path[-2] == "kernel" else path[-2]
        expected = inputs[name] ** -0.5 if path[-1] == "a" else 0
        assert np.std(factor) == pytest.approx(expected, rel=0.03), path


def small_step(**fields):
    """Returns the parameters before a step on random tokens, and what it returns."""
    config = load_config(
        "gpt",
        **{f"model__{name}": value for name, value in {**MODEL, "context_length": 8}.items()},
        train__batch_size=2,
        train__microbatches=1,
        train__loss_chunks=1,
        optimizer__warmup_steps=0,
        optimizer__learning_rate=0.1,
        **fields,
    )
    program = build_program(config, jax.devices()[:1])
    params = init(program.model)
    if "smear" in params:
        params["smear"]["strength"] = np.zeros((), np.float32)
    state = start_from(program, params)
    state = state._replace(heads=jax.device_put(initial_pairs(program), program.shardings.heads))
    before = jax.device_get(state.params)
    batch = Batch(np.random.default_rng(0).integers(0, 100, (2, 9), np.int32))
    state, metrics = program.bind(config)(state, batch)
    return before, state, metrics


def initial_pairs(program):
    """Returns LoRA's pairs, if the program has any: A is random and B is 0."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        scale = 0.1 if path[-1].key == "a" else 0.0
        return np.float32(scale * rng.standard_normal(x.shape))

    return jax.tree_util.tree_map_with_path(draw, program.abstract_state.heads)


@pytest.mark.slow
def test_a_low_rank_model_is_trained_with_lora():
    before, state, metrics = small_step(model__rank_ratio=0.5, optimizer__lora_rank=RANK)
    assert_equal(jax.device_get(state.params), before)
    pairs = traverse_util.flatten_dict(jax.device_get(state.heads[lora.NAME]))
    assert ("trunk", "blocks", "mlp", "up", "kernel_in", "b") in pairs
    assert all(np.any(factor) for factor in pairs.values()) and metrics["is_finite"]


@pytest.mark.slow
def test_a_number_can_be_the_only_parameter_that_is_trained():
    """`smear` has a vector, and the number λ, which is 0 at first."""
    before, state, metrics = small_step(model__smear=True, optimizer__train_only="smear/strength")
    after = jax.device_get(state.params)
    assert after["smear"].pop("strength") != before["smear"].pop("strength")
    assert_equal(after, before)
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_train_only_freezes_all_but_one_path():
    """The other path, the embeddings and all norms keep each bit, with weight decay, and have no
    optimizer state. Norm and clipping of the gradient are those of the trained path alone.
    """
    config = load_config(
        "pgpt",
        model__d_model=16,
        model__num_heads=2,
        model__num_layers=2,
        model__context_length=8,
        train__batch_size=2,
        train__microbatches=1,
        train__loss_chunks=1,
        optimizer__warmup_steps=0,
        optimizer__train_only="(attention|dense)/.*path=1",
        optimizer__learning_rate=0.1,
        optimizer__clip_norm=0.01,
    )
    program = build_program(config, jax.devices()[:1])
    state = start_from(program, init(program.model))
    before = jax.tree.map(np.array, jax.device_get(state.params))
    before["head"][0, 0] = -0.0
    state = state._replace(params=jax.device_put(before, program.shardings.params))
    batch = program.abstract_batch()._replace(
        tokens_BxT1=np.random.default_rng(0).integers(0, 100, (2, 9), np.int32)
    )
    step = program.bind(config)
    squares = gradient_of_path_1(program.model, before, batch.tokens_BxT1)
    state, metrics = step(state, batch)
    assert float(metrics["grad_norm"]) == pytest.approx(squares**0.5, rel=1e-5)
    moments = jax.tree.leaves(optax.tree_utils.tree_get(jax.device_get(state.opt_state), "mu"))
    norm = np.linalg.norm([np.linalg.norm(x) for x in moments])
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-5)
    state, _ = step(state, batch)
    changed = {
        "/".join(p.path): (old.view(np.uint32) != np.asarray(new).view(np.uint32))
        for p, old, new in zip(
            *map(jax.tree.leaves, (abstract_params(program.model), before, state.params))
        )
    }
    trained = {path for path, is_changed in changed.items() if is_changed.any()}
    assert trained == {path for path in changed if "attention/" in path or "dense/" in path}
    assert all(not changed[path][0].any() and changed[path][1].all() for path in trained)
    kept = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if x.ndim
    ]
    assert len(kept) == 2 * len(trained) and not any(
        "mlp" in path or "embedding" in path for path in kept
    )


def gradient_of_path_1(model, params, tokens_BxT1) -> float:
    """Returns the squared norm of the gradient of the mean loss by path 1, without the train step."""

    def loss(params):
        logits = model.apply({"params": params}, tokens_BxT1[:, :-1])
        targets = tokens_BxT1[:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1))

    gradients = jax.device_get(jax.jit(jax.grad(loss))(params))
    gradients = traverse_util.flatten_dict(gradients, sep="/")
    return sum(
        float(np.sum(np.square(np.float64(gradient[1]))))
        for path, gradient in gradients.items()
        if re.search("paths/.*(attention|dense)/", path)
    )


def test_heads_are_trained_and_do_not_count_as_a_match():
    parameters = {
        name: {"kernel": Parameter((name, "kernel"), (2, 3), np.float32, (None, None))}
        for name in ("trunk", "mtp")
    }
    params, heads = ({name: parameters[name]} for name in ("trunk", "mtp"))
    masks = make_masks(params, heads, OptimizerConfig(train_only="trunk"))
    assert masks["trunk"]["kernel"].all() and masks["mtp"]["kernel"].all()
    with pytest.raises(UserError, match="matches no path"):
        make_masks(params, heads, OptimizerConfig(train_only="mtp"))


@pytest.mark.parametrize(
    "fields, expected",
    [
        (
            {"optimizer__train_only": "no_such", "optimizer__lora_rank": 0},
            "matches no path of a parameter; paths are such",
        ),
        (
            {"optimizer__train_only": "norm"},
            "matches no path of a matrix of attention, MLP or dense layer; paths are "
            "such .*mlp/up/kernel'",
        ),
        ({"optimizer__train_only": "("}, "not a regular expression"),
        ({"train__future_tokens": 1}, "lora_rank=2: cannot be combined with the objective's mtp"),
        ({"optimizer__schedule": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_patterns_without_a_match_are_refused(imported, fields, expected):
    with pytest.raises(UserError, match=expected):
        build_program(config_of(imported, **fields))


def test_the_exported_adapter_is_what_was_trained(imported, tuned):
    """In peft, where it is installed; elsewhere, only the products of its factors."""
    arguments = ["convert", "--to=peft", f"--workdir={tuned}", f"--output={imported / 'adapter'}"]
    assert "an adapter of a GPT2LMHeadModel" in call(*arguments).stdout
    stored = load_file(imported / "adapter" / "adapter_model.safetensors")
    base, tuned_params = (
        inference.load_trained(tuned, merge_lora=merge).params for merge in (False, True)
    )
    modes = {path.name: path.stat().st_mode for path in (imported / "adapter").iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]
    untrained = call(*arguments[:-1], f"--output={imported / 'untrained'}", "--step=0")
    assert "LoRA has changed no matrix at this step; choose a later --step" in untrained.stderr
    delta = (
        np.float64(tuned_params["trunk"]["blocks"]["mlp"]["up"]["kernel"])
        - np.float64(base["trunk"]["blocks"]["mlp"]["up"]["kernel"])
    )[0]
    a, b = (
        stored[f"base_model.model.transformer.h.0.mlp.c_fc.lora_{letter}.weight"] for letter in "AB"
    )
    np.testing.assert_allclose((b @ a).T, delta, atol=1e-6)
    assert (
        "not trained with LoRA"
        in call(
            "convert",
            "--to=peft",
            f"--workdir={imported / 'imported'}",
            f"--output={imported / 'none'}",
        ).stderr
    )


def test_the_adapter_loads_in_peft(imported, tuned):
    peft = pytest.importorskip("peft", reason="needs peft, which no extra installs")
    import torch
    import transformers

    for name, arguments in {
        "base": ("--to=hf", f"--workdir={imported / 'imported'}"),
        "peft_adapter": ("--to=peft", f"--workdir={tuned}"),
    }.items():
        done = call("convert", *arguments, f"--output={imported / name}")
        assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(imported / "base"))
    theirs = peft.PeftModel.from_pretrained(theirs, str(imported / "peft_adapter")).eval()
    tokens = np.random.default_rng(0).integers(0, 257, (2, 20))
    model = inference.load_trained(tuned)
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(model.model, model.params, tokens), logits, atol=1e-5)
    assert (
        np.abs(
            forward(model.model, inference.load_trained(imported / "imported").params, tokens)
            - logits
        ).max()
        > 0.01
    )


def with_sums(theirs, adapter):
    """Adds B·A to the weights that the adapter names, as peft does: its alpha equals its rank."""
    import torch

    factors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in {
            name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors
        }:
            a, b = (
                torch.tensor(factors[f"base_model.model.{name}.lora_{letter}.weight"])
                for letter in "AB"
            )
            theirs.get_submodule(name).weight += b @ a
    return theirs


def with_peft(theirs, adapter):
    return (
        pytest.importorskip("peft", reason="needs peft, which no extra installs")
        .PeftModel.from_pretrained(theirs, str(adapter))
        .eval()
    )


@pytest.mark.parametrize("apply", [with_sums, with_peft])
@pytest.mark.parametrize("name", NATIVE)
def test_adapters_of_llama_and_qwen3(name, apply, tmp_path):
    """With random pairs of all matrices and of the output head, which is adapted because the
    pattern names it.
    """
    torch, transformers = (pytest.importorskip(library) for library in ("torch", "transformers"))
    model = build("gpt", **LLAMA | NATIVE[name])
    abstract, params, rng = abstract_params(model), init(model), np.random.default_rng(0)
    pairs = jax.tree.map(
        lambda x: np.float32(rng.normal(0, 0.1, x.shape)),
        lora.abstract_pairs(abstract, RANK, "kernel|head"),
    )
    assert ("head" in pairs) == (name == "Llama") and "head" not in lora.abstract_pairs(
        abstract, RANK, ""
    )
    tuned = lora.merge(abstract, params, pairs, ALPHA / RANK)
    for folder in ("base", "adapter"):
        (tmp_path / folder).mkdir()
    hugging_face.export_folder(tmp_path / "base", model, params, None)
    assert (
        peft_adapter.write(tmp_path / "adapter", model, params, tuned, RANK) == f"{name}ForCausalLM"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    tokens = rng.integers(0, 300, (2, 20))
    with torch.no_grad():
        logits = apply(theirs, tmp_path / "adapter")(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(model, tuned, tokens), logits, atol=1e-5)
    assert np.abs(forward(model, params, tokens) - logits).max() > 0.1
