"""Tests of the heads that predict further tokens: their losses by the formulas of the papers, in
float64.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import build, init
from float64_model import plain_attention, plain_blocks, plain_mlp, plain_norm
from run_helpers import program_of
from scipy.special import log_softmax, softmax

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.objectives.examples import Examples, with_prefixes
from smallgpt_jax.objectives.future_tokens import future_terms, head_config, weights_ahead
from smallgpt_jax.objectives.objective import Objective, Outputs
from smallgpt_jax.run.config import TrainConfig
from smallgpt_jax.training.step import microbatch_loss

ROWS, TIME, VOCABULARY = 2, 13, 19
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TIME + 1), np.int32)
EXAMPLES = Examples(Batch(TOKENS))
TRAIN = TrainConfig(future_tokens=3, pseudo_length=4, loss_chunks=1)
GPT = dict(
    vocab_size=VOCABULARY, context_length=TIME, num_layers=2, num_heads=2, d_model=8, use_bias=True
)


def random_parameters(term, seed: int = 1):
    rng = np.random.default_rng(seed)
    shapes = Objective(terms={"term": term}).abstract_heads()["term"]
    return jax.tree.map(
        lambda p: np.float32((p.name == "scale") + rng.normal(0, 0.3, p.shape)), shapes
    )


def random_outputs(config) -> Outputs:
    rng = np.random.default_rng(2)
    x, head, embedding = (
        np.float32(rng.standard_normal(shape))
        for shape in (
            (ROWS, TIME, config.output_width),
            (VOCABULARY, config.output_width),
            (VOCABULARY, config.d_model),
        )
    )
    return Outputs(x, head, embedding, {})


def rms(x, weights, epsilon=1e-5):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weights["scale"]


def losses(x, head, targets):
    return -np.take_along_axis(log_softmax(x @ head.T, axis=-1), targets[:, None], 1)[:, 0]


def multi_token_loss(config, depth, weights, outputs, tokens):
    """Returns the sum over one row (arXiv 2412.19437, equations 21 to 25, with i from 0 to T −
    1).
    """
    h, total = outputs.x_BxTxW, 0.0
    for k in range(1, depth + 1):
        module, end = weights[str(k)], TIME - k  # t_{i+k+1} exists for i < T − k
        embedded = outputs.embedding_VxD[tokens[k : k + end]]
        joint = np.concatenate(
            [rms(h[:end], module["hidden_norm"]), rms(embedded, module["embedding_norm"])], axis=1
        )
        h = plain_blocks(
            config, module["blocks"], joint @ module["joint"]["kernel"], None
        )  # equations 21 and 22
        x = plain_norm(config, module["final_norm"], h)
        total += losses(
            x, outputs.head_VxW, tokens[k + 1 : k + 1 + end]
        ).sum()  # equations 23 and 24
    return total / depth  # equation 25, without λ


def future_loss(config, count, discount, weights, outputs, tokens):
    """Returns the sum over one row (arXiv 2410.18160; docs/objectives.md says what the paper leaves
    open).
    """
    first, total = tokens[:TIME].sum() % count, 0.0
    positions = [first + count * i for i in range(TIME // count)]
    for i in positions:
        pseudo = np.einsum("w,wpv->pv", outputs.x_BxTxW[i], weights["pseudo_sequence"]["kernel"])
        pseudo = pseudo + weights["pseudo_sequence"]["bias"]
        following = tokens[i : i + count + 1]  # shorter at the end of the row
        known = len(following) - 1
        y = (
            rms(outputs.embedding_VxD[following[:known]], weights["tokens_norm"])
            @ weights["tokens"]["kernel"]
        )
        y = y + weights["places"][:known]
        norms = {
            name: functools.partial(plain_norm, config, weights[f"{name}_norm"])
            for name in ("attention", "cross_attention", "mlp", "final")
        }
        y = y + plain_attention(config, weights["attention"], norms["attention"](y), 2, known, None)
        y = y + cross_attention(weights["cross_attention"], norms["cross_attention"](y), pseudo)
        y = norms["final"](y + plain_mlp(config, weights["mlp"], norms["mlp"](y)))
        total += (discount ** np.arange(known) * losses(y, outputs.head_VxW, following[1:])).sum()
    return total / (discount ** np.arange(count)).sum() * TIME / len(positions)


def cross_attention(weights, x, pseudo):
    y = weights["out"]["bias"]
    for head in range(2):
        q, k, v = (
            inputs @ weights[name]["kernel"][:, head] + weights[name]["bias"][head]
            for name, inputs in (("query", x), ("key", pseudo), ("value", pseudo))
        )
        y = y + softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1) @ v @ weights["out"]["kernel"][head]
    return y


@pytest.mark.parametrize(
    "kind, architecture, fields",
    [
        ("mtp", "gpt", dict(position="rope", attention_windows=(0, 4))),
        ("ftp", "lgpt", dict(blocks_per_stage=1)),
    ],
)
def test_the_losses_match_the_formulas(kind, architecture, fields):
    model = build(architecture, **GPT, **fields)
    term = future_terms(TRAIN.replace(future_head=kind), model)[kind]
    weights, outputs = random_parameters(term), random_outputs(model.config)
    formula = functools.partial(
        *{
            "mtp": (multi_token_loss, term.head.config, 3),
            "ftp": (future_loss, term.head.config, 3, 0.8),
        }[kind]
    )
    exact = jax.tree.map(np.float64, (weights, outputs))
    expected = sum(
        formula(exact[0], exact[1]._replace(x_BxTxW=exact[1].x_BxTxW[row]), TOKENS[row])
        for row in range(ROWS)
    ) / (ROWS * TIME)
    found = jax.jit(
        lambda weights: term(outputs, weights, EXAMPLES, EXAMPLES.weights(ROWS * TIME))
    )(weights)
    assert float(found) == pytest.approx(expected, rel=2e-5)


D, N, P, V = 8, 3, 4, VOCABULARY  # widths, further tokens, pseudo-sequence, vocabulary
PER_ROW = {
    # joint projection, block with attention to all positions, output head and the target's row of it
    "mtp": TIME * N * (2 * D * D + 12 * D * D + 2 * TIME * D + V * D + D),
    # per trained position: pseudo-sequence, embeddings, attention to N, attention to P, MLP, head
    "ftp": 4
    * (
        D * P * D
        + N * D * D
        + N * (4 * D * D + 2 * N * D)
        + 2 * N * D * D
        + 2 * P * D * D
        + 2 * N * P * D
        + N * 8 * D * D
        + N * (V * D + D)
    ),
}


@pytest.mark.parametrize("kind, attention", [("mtp", "xla"), ("mtp", "splash"), ("ftp", "xla")])
def test_the_flops_of_heads_count(kind, attention):
    """By hand, in multiplications with additions; the backward pass has twice as many. Kernels
    cannot be counted, and change nothing.
    """
    model = build("gpt", **GPT, attention=attention, remat="full")
    terms = future_terms(TRAIN.replace(future_head=kind), model).values()
    of_heads = train_flops_per_token(model, terms) - train_flops_per_token(model)
    assert of_heads * TIME == pytest.approx(3 * 2 * PER_ROW[kind], rel=1e-12)


def test_targets_ahead_are_in_the_row_the_document_and_the_loss():
    """The positions inside a prefix see the tokens of the prefix, so they must not predict what
    follows it.
    """
    segments = np.int32([[1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0]])
    batch = Batch(TOKENS[:1], segments, segments > 0)
    examples = with_prefixes(batch, np.where(segments == 1, 4, 0))
    weights = examples.weights(1)
    assert np.array_equal(weights[0], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    assert np.array_equal(
        weights_ahead(examples, weights, 2)[0], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]
    )


@pytest.mark.slow
def test_with_weight_zero_the_gradients_are_those_of_the_plain_model():
    model = build("gpt", **{**GPT, "num_layers": 1})
    train, params = TRAIN.replace(future_tokens=1, pseudo_length=2), init(model)
    terms = {
        kind: future_terms(train.replace(future_head=kind), model)[kind] for kind in ("mtp", "ftp")
    }
    heads = {name: random_parameters(term) for name, term in terms.items()}

    def loss(trained, terms):
        program = program_of(model, Objective(terms=terms))
        loss_function = microbatch_loss(program, jax.random.key(0), ROWS * TIME)
        return loss_function(trained, {}, 0, EXAMPLES)[0]

    @jax.jit
    def gradients(trained, weight):
        return jax.grad(loss)(
            trained,
            {name: dataclasses.replace(term, weight=weight) for name, term in terms.items()},
        )

    plain, found = (
        jax.jit(jax.grad(lambda params: loss(params, {})))(params),
        gradients({**params, **heads}, 0.0),
    )
    assert not any(np.any(x) for name in heads for x in jax.tree.leaves(found.pop(name)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), found, plain)
    changed = gradients({**params, **heads}, 0.1)
    assert all(np.any(x) for name in heads for x in jax.tree.leaves(changed[name]))
    assert not np.allclose(changed["token_embedding"], plain["token_embedding"], rtol=1e-3)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(future_head="mpt"),
            r"future_head='mpt': must be one of mtp, ftp, .*; did you mean 'mtp'",
        ),
        (
            dict(objective="masked"),
            "future_tokens=2: must be 0 with config.train.objective='masked'",
        ),
        (
            dict(future_tokens=13),
            "future_tokens=13: must be less than config.model.context_length=13",
        ),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(UserError, match=message):
        future_terms(TRAIN.replace(**{"future_tokens": 2, **fields}), build("gpt", **GPT))


STAGES = dict(GPT, d_model=32, num_layers=4, num_heads=4, blocks_per_stage=2)


@pytest.mark.parametrize(
    "fields, heads, width",
    [
        # stages of widths 32 and 16, whose output has width 8
        (dict(stage_heads="fixed"), 4, 8),
        (dict(stage_heads="scaled"), 2, 8),
        (dict(stage_heads="scaled", num_kv_heads=2), 2, 8),
        (dict(stage_heads="scaled", compress_last_stage=False), 2, 16),
        (dict(stage_heads="fixed", head_dim=3), 4, 8),
    ],
)
@pytest.mark.parametrize("architecture", ["lgpt", "cgpt"])
def test_the_block_of_a_head_is_like_the_last_block(architecture, fields, heads, width):
    config = build(architecture, **{**STAGES, **fields}).config
    head = head_config(config)
    assert (head.num_heads, head.d_model) == (heads, width)
    assert head.kv_heads == (config.num_kv_heads // 2 or heads)


@pytest.mark.parametrize("architecture", ["lgpt", "cgpt"])
@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(position="rope", num_heads=8),
            r"future_tokens=3: .* width 8 .*needs an even head width.* have 1; change",
        ),
        (
            dict(mlp_ratio=0.05),
            r"future_tokens=3: .* \(config.model.mlp_ratio=0.05: rounds to an MLP width of 0",
        ),
    ],
)
def test_refuses_heads_whose_block_is_not_valid(architecture, fields, message):
    """The model itself is valid."""
    model = build(architecture, **{**STAGES, **fields})
    with pytest.raises(UserError, match=message):
        future_terms(TRAIN, model)
