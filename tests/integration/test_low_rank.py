"""Tests of models whose matrices are products of two factors (`config.model.rank_ratio`), and of
their conversion.
"""

import functools
import json
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, call, forward, init, load_config
from flax import linen as nn
from run_helpers import SMALL
from scipy.special import log_softmax

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import low_rank
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import attention, layers, parameters, structure
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.planning import memory_formula
from smallgpt_jax.training.build import build_program


def tokens_of(model, rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, 24))


def flatten(params) -> dict:
    return flax.traverse_util.flatten_dict(jax.tree.map(np.asarray, params))


@pytest.mark.parametrize("shape, rank", [((20, 12), 5), ((7, 30), 7), ((3, 10, 16), 1)])
def test_factors_match_the_truncated_svd(shape, rank):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    left, right = low_rank.factor(matrix, rank)
    assert left.shape == (*shape[:-1], rank) and right.shape == (*shape[:-2], rank, shape[-1])
    assert left.dtype == right.dtype == np.float32
    for w, a, b in zip(
        matrix.reshape(-1, *shape[-2:]),
        left.reshape(-1, *left.shape[-2:]),
        right.reshape(-1, *right.shape[-2:]),
    ):
        # The leading eigenvectors of WᵀW span the rows of the truncated decomposition.
        values, vectors = np.linalg.eigh(w.astype(np.float64).T @ w)
        leading = vectors[:, -rank:]
        np.testing.assert_allclose(a.astype(np.float64) @ b, w @ leading @ leading.T, atol=1e-5)
        # The factors share the singular values equally.
        s = np.sqrt(values[::-1][:rank])
        np.testing.assert_allclose(a.T @ a, np.diag(s), atol=1e-5)
        np.testing.assert_allclose(b @ b.T, np.diag(s), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("gpt", {"mlp": "moe", "num_experts": 4, "num_layers": 1, "head_dim": 8}),
        ("pgpt", {"num_kv_heads": 2, "mlp": "gated", "use_bias": True, "num_layers": 2}),
        (
            "cgpt",
            {
                "norm_position": "deepnorm",
                "num_layers": 2,
                "blocks_per_stage": 1,
                "scan_layers": False,
            },
        ),
    ],
)
def test_full_rank_reproduces_the_logits(architecture, fields, monkeypatch):
    """Factors of full rank give the model's logits, and their products are the model's matrices."""
    model = build(architecture, **fields)
    params = init(model)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), models.abstract_model_state(model))
    expected = forward(model, params, tokens_of(model), state)
    monkeypatch.setattr(layers, "factor_rank", lambda ratio, inputs, outputs: min(inputs, outputs))
    uncached = parameters.trace_variables.__wrapped__
    monkeypatch.setattr(
        parameters, "trace_variables", functools.cache(uncached)
    )  # apart from the usual shapes
    factored, factors = low_rank.with_rank_ratio(model, params, 0.5)
    assert jax.tree.map(np.shape, factors) == jax.tree.map(
        np.shape, models.abstract_params(factored), is_leaf=lambda x: hasattr(x, "shape")
    )
    np.testing.assert_allclose(
        forward(factored, factors, tokens_of(model), state), expected, atol=1e-4
    )
    again, full = low_rank.with_rank_ratio(factored, factors, 0.0)
    assert again.config == model.config and jax.tree.structure(full) == jax.tree.structure(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), full, params)


@pytest.mark.slow
def test_matrices_that_are_factored():
    """The matrices of attention and MLPs are factored, and no others. Each matrix of a stack is
    factored on its own.
    """
    model = build("pgpt")
    params = init(model)
    _, factors = low_rank.with_rank_ratio(model, params, 0.5)
    before, after = flatten(params), flatten(factors)
    names = {("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")}
    assert {path[-3:-1] for path in before.keys() - after.keys()} == names
    assert all(np.array_equal(before[path], after[path]) for path in before.keys() & after.keys())
    assert ("trunk", "paths", "dense", "kernel") in after
    # Queries, keys and values of all heads are the columns of one matrix.
    path, layer, width = 1, 0, model.config.d_model
    module = ("trunk", "paths", "blocks", "attention", "qkv")
    matrix = before[*module, "kernel"][path, layer].reshape(width, 3 * width).astype(np.float64)
    u, s, v = np.linalg.svd(matrix)
    rank = int(0.5 * width * 3 * width / (4 * width))
    product = np.tensordot(
        after[*module, "kernel_in"][path, layer], after[*module, "kernel_out"][path, layer], 1
    )
    np.testing.assert_allclose(
        product.reshape(matrix.shape), u[:, :rank] * s[:rank] @ v[:rank], atol=1e-6
    )
    # Heads and head width are the rows of one matrix.
    module = ("trunk", "paths", "blocks", "attention", "out")
    matrix = before[*module, "kernel"][path, layer].reshape(width, width).astype(np.float64)
    u, s, v = np.linalg.svd(matrix)
    rank = int(0.5 * width * width / (2 * width))
    product = np.tensordot(
        after[*module, "kernel_in"][path, layer], after[*module, "kernel_out"][path, layer], 1
    )
    np.testing.assert_allclose(
        product.reshape(matrix.shape), u[:, :rank] * s[:rank] @ v[:rank], atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, ratio", [(name, 0.33) for name in ARCHITECTURES] + [("gpt", 0.9)]
)
def test_parameters_and_flops(architecture, ratio):
    """Two factors have r·(m + n) parameters instead of m·n. Each parameter takes 6 FLOPs per
    token.
    """
    full, factored = build(architecture), build(architecture, rank_ratio=ratio)
    saved = 0
    for i in range(full.config.num_layers):
        stage = i // full.config.blocks_per_stage if architecture in ("lgpt", "cgpt") else 0
        width = full.config.d_model // 2**stage
        for m, n in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            rank = int(ratio * m * n / (m + n))
            assert 0 < rank * (m + n) <= ratio * m * n < (rank + 1) * (m + n)
            saved += m * n - rank * (m + n)
    assert models.num_parameters(full) - models.num_parameters(factored) == saved
    assert train_flops_per_token(full) - train_flops_per_token(factored) == 6 * saved


def test_rank_is_at_least_one():
    assert layers.factor_rank(1e-3, 16, 48) == 1


@pytest.mark.slow
def test_memory_estimate():
    """The estimate finds the same attention layers as without factors. It includes the outputs of
    the first factors.
    """
    config = load_config(
        "gpt", "paper", model__attention="xla", model__head_dim=32, train__microbatches=1
    )
    full = build_program(config.copy_and_resolve_references(), jax.devices()[:1])
    config.model.rank_ratio = 0.5
    factored = build_program(config, jax.devices()[:1])
    assert structure.attention_layers(full.model, full.mesh, False) == structure.attention_layers(
        factored.model, factored.mesh, False
    )
    activations = [
        memory_formula.memory_breakdown(
            program.model, program.mesh, program.abstract_state, 4, 8, False
        )["activations"]
        for program in (full, factored)
    ]
    ranks = [
        0.5 * m * n / (m + n) for m, n in ((768, 3 * 384), (384, 768), (768, 3072), (3072, 768))
    ]
    assert activations[1] - activations[0] == 4 * 1024 * 12 * sum(map(int, ranks)) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm_position, scaled", [("pre", 0.02), ("deepnorm", 0.02 * (8 * 8) ** -0.25)]
)
def test_initial_products_have_the_std_of_full_matrices(norm_position, scaled):
    model = build("gpt", d_model=128, num_layers=8, norm_position=norm_position, rank_ratio=0.5)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 64), int)))["params"]
    _, full = low_rank.with_rank_ratio(model, params, 0.0)
    block = full["trunk"]["blocks"]
    residual = 0.02 / math.sqrt(2 * 8) if norm_position == "pre" else scaled
    qkv = block["attention"]["qkv"]["kernel"]
    for weight, std in (
        (qkv[..., :-1, :], 0.02),
        (qkv[..., -1, :], scaled),
        (block["mlp"]["up"]["kernel"], scaled),
        (block["attention"]["out"]["kernel"], residual),
        (block["mlp"]["down"]["kernel"], residual),
    ):
        assert np.std(weight) == pytest.approx(std, rel=0.03)


@pytest.mark.slow
def test_scanned_unrolled_and_accelerator_forms_agree(monkeypatch):
    """On accelerators, queries, keys and values are computed by separate products."""
    model = build("gpt", rank_ratio=0.4, num_kv_heads=2, use_bias=True, scan_layers=True)
    params = init(model)
    expected = forward(model, params, tokens_of(model))
    unrolled = build("gpt", rank_ratio=0.4, num_kv_heads=2, use_bias=True, scan_layers=False)
    np.testing.assert_allclose(forward(unrolled, params, tokens_of(model)), expected, atol=1e-5)
    monkeypatch.setattr(attention, "one_product_is_faster", lambda decode: False)
    separate = jax.jit(model.apply)({"params": params}, tokens_of(model))
    np.testing.assert_allclose(separate, expected, atol=1e-5)


@pytest.mark.parametrize(
    "ratio, rule",
    [
        (1.0, "must be at least 0 and below 1"),
        (-0.1, "must be at least 0"),
        (math.nan, "must be at least 0"),
    ],
)
def test_refused_ratios(ratio, rule):
    with pytest.raises(UserError, match=rf"config.model.rank_ratio={ratio}: {rule}"):
        build("gpt", rank_ratio=ratio)


class Plain(nn.Module):
    """A custom trunk whose only layer ignores `rank_ratio`."""

    config: models.ModelConfig
    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        return nn.Dense(self.config.d_model)(x_BxTxD)


def test_refuses_architectures_without_factors(monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "plain", Plain)
    model = build("gpt", architecture="plain")
    with pytest.raises(UserError, match=r"rank_ratio=0\.5: no layer of plain uses this field"):
        low_rank.with_rank_ratio(model, init(model), 0.5)
    with pytest.raises(
        UserError, match=r"rank_ratio=0\.5: no layer of plain uses this field; set it to 0"
    ):
        build_program(load_config("gpt", model__architecture="plain", model__rank_ratio=0.5))


def test_refuses_widths_at_which_factors_save_nothing():
    with pytest.raises(
        UserError, match=r"rank_ratio=0\.5: saves nothing for matrices of width 2; set it to 0"
    ):
        build("lgpt", d_model=8, num_heads=1, num_layers=3, blocks_per_stage=1, rank_ratio=0.5)
    with pytest.raises(
        UserError, match=r"rank_ratio=0\.5: saves nothing for matrices of width 1; set it to 0"
    ):
        build("gpt", num_heads=1, head_dim=1, rank_ratio=0.5)


@pytest.mark.slow
def test_converts_trains_and_exports(trained_run, text_file, tmp_path):
    """A trained run is factored, trained further, and exported."""
    source = trained_run("gpt", **SMALL)
    tokens = (
        inference.load(source)
        .tokenizer.encode([text_file.read_text()[:4000]])[0][:1980]
        .reshape(-1, 33)
    )

    def loss(folder) -> float:
        trained = inference.load_trained(folder)
        log_p = log_softmax(
            np.asarray(forward(trained.model, trained.params, tokens[:, :-1])), axis=-1
        )
        return -float(np.take_along_axis(log_p, tokens[:, 1:, None], 2).mean())

    folder = tmp_path / "0.2"
    result = call(
        "convert",
        "--from=run",
        f"--input={source}",
        f"--workdir={folder}",
        "--rank_ratio=0.2",
    )
    assert result.returncode == 0, result.stderr
    factored_loss = loss(folder)
    assert factored_loss > loss(source) + 0.01
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["rank_ratio"] == 0.2 and origin["format"] == "run"
    result = call(
        "main",
        f"--config=configs/run.py:{folder}",
        f"--workdir={folder}",
        "--config.train.steps=4",
        f"--config.data.source={text_file}",
        "--config.optimizer.learning_rate=1e-3",
        "--config.train.eval_steps=1",
    )
    assert result.returncode == 0, result.stderr
    trained = inference.load_trained(folder)
    assert trained.step == 4 and trained.model.config.rank_ratio == 0.2
    assert loss(folder) < factored_loss
    # An exported model has full matrices and the same logits.
    pytest.importorskip("safetensors")
    result = call("convert", "--to=hf", f"--workdir={folder}", f"--output={tmp_path / 'out'}")
    assert (
        result.returncode == 0
        and "low-rank matrices are exported as full matrices" in result.stdout
    ), result.stderr
    assert "| rank ratio | 0.2 |" in (tmp_path / "out" / "README.md").read_text()
    assert (
        call(
            "convert", "--from=hf", f"--input={tmp_path / 'out'}", f"--workdir={tmp_path / 'back'}"
        ).returncode
        == 0
    )
    back = inference.load_trained(tmp_path / "back")
    logits = forward(trained.model, trained.params, tokens[:, :-1])
    np.testing.assert_allclose(forward(back.model, back.params, tokens[:, :-1]), logits, atol=1e-4)
    assert models.num_parameters(back.model) == models.num_parameters(
        inference.load_trained(source).model
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--from=run", "--rank_ratio=1.5"],
            "config.model.rank_ratio=1.5: must be at least 0 and below 1",
        ),
        (["--from=hf", "--rank_ratio=0.5"], "--rank_ratio: cannot be combined with --from=hf"),
    ],
)
def test_bad_flags(flags, message, trained_run, tmp_path):
    result = call(
        "convert", *flags, f"--input={trained_run('gpt', **SMALL)}", f"--workdir={tmp_path / 'new'}"
    )
    assert result.returncode == 1 and message in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )
    assert not (tmp_path / "new").exists()
