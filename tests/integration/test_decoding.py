"""Tests of decoding: cached logits are compared with logits of the full forward pass.

The tests also compare the rows of a batch with single rows, and calls of several steps with calls
of one step.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init, load_config

from smallgpt_jax import inference, models
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.block import Block
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.pgpt import with_paths
from smallgpt_jax.models.stacks import layer_configs, stack_blocks

CONTEXT = 24
GREEDY = Sampling(temperature=None)
# Masks, positions, and the caches of mixers and convolutions, because calls with several tokens can
# break them. test_random_models.py decodes all other options.
VARIANTS = [
    (
        "gpt",
        {
            "attention_mask": "prefix",
            "position": "alibi",
            "num_kv_heads": 2,
            "attention_windows": (5, 0),
        },
    ),
    ("gpt", {"mixers": ("delta", "mamba", "conv"), "num_layers": 3, "use_bias": True}),
    (
        "cgpt",
        {"conv_kernel": 5, "position": "rope", "qk_norm": True, "attention_windows": (6, 0)},
    ),
]


def small(architecture, **fields):
    """Returns a model of two blocks with a context of 24 tokens, and its parameters."""
    stages = {"blocks_per_stage": 1} if architecture in ("lgpt", "cgpt") else {}
    model = build(architecture, **{"context_length": CONTEXT, "num_layers": 2, **stages, **fields})
    return model, init(model)


def random_rows(model, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n).tolist() for n in lengths]


def session(model, params, ids, end_of_text=None, **settings):
    # The parameters are converted to NumPy arrays. Slicing NumPy arrays compiles nothing, unlike
    # slicing JAX arrays.
    weights = layout.pack(model, jax.device_get(params))
    compiled_for = decoder.Decoder(model, model.config.vocab_size, end_of_text)
    return decoder.DecodeSession(compiled_for, weights, ids, **settings)


def assert_cache_matches_forward(model, params):
    """Decodes three rows. After each call, compares the logits with those of a full forward pass.

    The prompts have 1, 5 and 9 tokens. Each later call adds 1 token to the first row, 2 to the
    second and 3 to the third. A row that has ten or more tokens gets only 1.
    """
    rows = random_rows(model, [CONTEXT - 4, CONTEXT, CONTEXT - 9])
    filled = np.zeros((3, CONTEXT), np.int32)
    for place, row in zip(filled, rows):
        place[: len(row)] = row
    is_prefix = model.config.attention_mask == "prefix"  # then the prompts are prefixes
    context = Context(
        prefix_BxT=np.arange(CONTEXT)[None] < np.array([[1], [5], [9]]) if is_prefix else None
    )
    full = jax.jit(model.apply)({"params": params}, filled, context)
    texts = session(model, params, [row[:n] for row, n in zip(rows, (1, 5, 9))])
    if model.config.architecture != "cgpt":
        texts.reserve(CONTEXT)  # except for cgpt, whose cache grows during the test
    compared, active = 0, [0, 1, 2]
    while active:
        _, logits = texts.sample_with_logits(GREEDY)
        for i in active:
            np.testing.assert_allclose(
                logits[i], full[i, len(texts.ids[i]) - 1], atol=1e-4, rtol=1e-4
            )
            compared += 1
        active = [i for i in active if len(texts.ids[i]) < len(rows[i])]
        for i in active:
            read = len(texts.ids[i])
            texts.ids[i] += rows[i][read : read + (i + 1 if read < 10 else 1)]
    assert compared == 20 + 17 + 5 and [len(ids) for ids in texts.ids] == [len(row) for row in rows]


@pytest.mark.parametrize(
    "architecture, fields",
    [VARIANTS[0], *(pytest.param(*variant, marks=pytest.mark.slow) for variant in VARIANTS[1:])],
)
def test_cached_logits_match_the_forward_pass(architecture, fields):
    assert_cache_matches_forward(*small(architecture, **fields))


@pytest.mark.slow
def test_samples_of_a_prompt_and_dropped_tokens_have_the_prefix_of_the_prompt():
    """The logits of every sample are those of the whole prompt. When the oldest tokens are dropped,
    the rest of the prompt is still a prefix.
    """
    model, params = small(
        "gpt", attention_mask="prefix", position="rope"
    )  # one layer would not show it
    (row,) = random_rows(model, [CONTEXT + 1])

    @jax.jit
    def logits(tokens_T, prefix):
        context = Context(prefix_BxT=jnp.arange(CONTEXT)[None] < prefix)
        return model.apply({"params": params}, tokens_T[None], context)[0]

    texts = session(model, params, [row[:20]])
    texts.repeat(2, GREEDY)
    expected = logits(np.pad(row[:20], (0, 4)), 20)[19]
    for found in texts.sample_with_logits(GREEDY)[1]:
        np.testing.assert_allclose(found, expected, atol=1e-5)
    texts.ids = [list(row), list(row)]
    expected = logits(np.pad(row[13:], (0, 12)), 7)[11]  # 13 tokens are dropped
    for found in texts.sample_with_logits(GREEDY)[1]:
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scores_of_a_prefix_model_have_the_context_as_prefix():
    model, params = small("gpt", attention_mask="prefix")
    (row,) = random_rows(model, [CONTEXT + 1])
    ((_, score),) = Scorer(model, params, devices=jax.devices()[:1]).score([TokenSequence(row, 5)])
    logits = jax.jit(model.apply)(
        {"params": params}, np.array([row[:-1]]), Context(prefix_BxT=np.arange(CONTEXT)[None] < 20)
    )
    log_p = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits[0])), np.array(row[1:])[:, None], 1
    )
    assert score.log_likelihood == pytest.approx(log_p[-5:].sum(), rel=1e-5)


@pytest.mark.slow
def test_a_cache_that_grows_into_a_rolling_one():
    """With a window of 20 tokens, the cache grows from 16 to 20 slots. Then, new tokens replace the
    oldest ones.
    """
    model, params = small(
        "gpt", context_length=64, num_layers=1, position="rope", attention_windows=(20,)
    )
    rows = random_rows(model, [50, 41])
    full = forward(model, params, np.stack([np.pad(row, (0, 64 - len(row))) for row in rows]))
    texts = session(model, params, [row[:3] for row in rows])
    for read in (3, 4, 9, 17, 18, 26, 40):
        texts.ids = [row[:read] for row in rows]
        _, logits = texts.sample_with_logits(GREEDY)
        for i in range(2):
            np.testing.assert_allclose(logits[i], full[i, read - 1], atol=1e-4, rtol=1e-4)


def test_a_long_prompt():
    """Decodes prompts of two chunks of queries, and then one more token.

    The attention window reaches from the second chunk into the first.
    """
    model, params = small(
        "gpt", context_length=192, num_layers=1, position="alibi", attention_windows=(100,)
    )
    rows = random_rows(model, [150, 170])
    full = forward(model, params, np.stack([np.pad(row, (0, 192 - len(row))) for row in rows]))
    texts = session(model, params, [row[:-1] for row in rows])
    for ids in (texts.ids, rows):
        texts.ids = [list(row) for row in ids]
        _, logits = texts.sample_with_logits(GREEDY)
        for i, row in enumerate(texts.ids):
            np.testing.assert_allclose(logits[i], full[i, len(row) - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_selected_paths():
    """The selected paths alone give the logits of the full model in which all other paths have
    weight zero.
    """
    model, params = small("pgpt", num_layers=4, num_paths=4)
    params = jax.device_get(params)  # since slicing JAX arrays compiles programs
    params["trunk"]["path_logits"] = np.float32([0.1, -0.3, 0.6])
    tokens = np.array(random_rows(model, [CONTEXT]))
    for chosen in ([2], [3, 1]):
        logits = np.append(params["trunk"]["path_logits"], 0.0)
        logits += [0.0 if path in chosen else -60.0 for path in range(4)]
        silenced = {
            **params,
            "trunk": {**params["trunk"], "path_logits": np.float32((logits - logits[-1])[:-1])},
        }
        config, kept, _ = with_paths(model.config, params, {}, chosen)
        part = models.LanguageModel(config)
        np.testing.assert_allclose(
            forward(part, kept, tokens), forward(model, silenced, tokens), atol=2e-5, rtol=1e-4
        )
        assert models.num_parameters(part) == sum(x.size for x in jax.tree.leaves(kept))


class IgnoresDecoding(nn.Module):
    """A trunk that ignores `context.decode`: its attention sees only the tokens of the current
    call.
    """

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        return Block(self.config, name="block")(x_BxTxD, Context(train=context.train))


class FailsInDecoding(nn.Module):
    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        assert not context.decode, "not written yet"
        return stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trunk, substrings",
    [
        (
            f"{__name__}:IgnoresDecoding",
            ["gives wrong logits", "no layer keeps a cache", "context.decode"],
        ),
        (f"{__name__}:FailsInDecoding", ["AssertionError: not written yet", "context.decode"]),
    ],
)
def test_refuses_custom_architectures_that_decode_wrongly(trunk, substrings, monkeypatch):
    """A model of a custom architecture is refused if its decoding gives wrong logits or raises an
    error.

    The models have no position encoding, so only attention can make the logits wrong.
    """
    model = models.build(
        **load_config(
            "gpt", model__architecture=trunk, model__num_layers=1, model__position="none"
        ).model
    )
    params = init(model)
    monkeypatch.setattr(
        inference.loading,
        "load_trained",
        lambda *_: inference.TrainedModel(model, params, {}, Bytes(), 1),
    )
    with pytest.raises(UserError, match=f"^config.model.architecture={trunk!r}: ") as error:
        inference.load("a workdir")
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_cache_bytes():
    """Of a cgpt, whose convolutions keep the same bytes for a text of any length."""
    model, params = small("cgpt")
    per_position, convolutions = 2 * (64 + 32), 2 * (64 + 32)
    texts = session(model, params, random_rows(model, [3, 8]))
    texts._cache = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), decoder.cache_shapes(model, texts.weights, 2, 16)
    )
    assert texts.cache_bytes() == 2 * 4 * (16 * per_position + convolutions)
    texts.reserve(14)
    assert texts.cache_bytes() == 2 * 4 * (CONTEXT * per_position + convolutions)


def test_bfloat16_weights_and_caches():
    model, params = small("gpt", num_layers=1, dtype="bfloat16")
    weights = layout.pack(model, params)
    assert weights["params"]["trunk"]["blocks"]["mlp"]["up"]["kernel"][0].dtype == jnp.bfloat16
    texts = session(model, params, random_rows(model, [5]))
    _, logits = texts.sample_with_logits(GREEDY)
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(texts._cache)} == {jnp.dtype("bfloat16")}
    assert texts.cache_bytes() == 2 * 16 * 2 * 64
    full = forward(model, params, np.array(texts.ids))[0, -1]
    np.testing.assert_allclose(logits[0], full, atol=0.05)


def test_nothing_is_compiled_twice():
    model, params = small("gpt", num_layers=1)
    weights = layout.pack(model, jax.device_get(params))
    compiled_for = decoder.Decoder(model, 300)

    def generate(length, count, temperature):
        texts = decoder.DecodeSession(compiled_for, weights, random_rows(model, [length]))
        texts.reserve(count)
        for _ in range(count):
            texts.ids[0].append(int(texts.sample(Sampling(temperature=temperature))[0]))

    before = decoder.decode_step._cache_size()
    generate(3, 1, 1.0)
    assert decoder.decode_step._cache_size() == before + 1  # compiled for the prompt
    generate(3, 10, 0.5)
    assert decoder.decode_step._cache_size() == before + 2  # compiled for one token
    generate(9, 7, 0.7)
    assert decoder.decode_step._cache_size() == before + 2


@pytest.mark.slow
def test_several_steps_draw_the_same_tokens_as_single_steps():
    """Calls of several steps sample the same tokens as calls of one step. They all use one compiled
    program.

    The texts are longer than the context. When the context is full, the newer half of its tokens is
    prefilled again.
    """
    model, params = small("cgpt", num_layers=1)
    sampling = Sampling(top_k=20, repetition_penalty=1.3)
    numbers = []

    def generate(sample_more):
        texts = session(model, params, random_rows(model, [1, 5]), seed=3)
        texts.reserve(30)
        tokens = [[], []]
        while (left := 30 - len(tokens[0])) > 0:
            sampled_BxN = sample_more(texts, left)
            numbers.append(len(sampled_BxN[0]))
            for row, so_far, sampled in zip(texts.ids, tokens, sampled_BxN):
                so_far += sampled
                row += sampled
        assert texts.dropped > 0
        return tokens

    before = decoder.decode_steps._cache_size()
    ahead = generate(lambda texts, left: texts.sample_steps(sampling, left).tolist())
    assert decoder.decode_steps._cache_size() == before + 1
    # `numbers` contains the number of steps of each call. Calls that prefill have one step: the
    # first call, and each call after a row has filled the context of 24 tokens. The row with 5
    # prompt tokens is full after 1 + 19 = 20 steps, and the row with 1 prompt token after 1 + 23 =
    # 24 steps.
    assert numbers == [1, 4, 4, 4, 4, 3, 1, 3, 1, 4, 1]
    assert ahead == generate(
        lambda texts, left: np.asarray(texts.sample(sampling))[:, None].tolist()
    )
    assert list(map(len, ahead)) == [30, 30]


@pytest.mark.slow
def test_end_of_text_within_several_steps():
    """If a row samples end-of-text within a multi-step call, no later token is cached. The row can
    be continued.

    The model has five tokens, so that the first end-of-text of some row is at each of the four
    steps.
    """
    model, params = small("cgpt", num_layers=1, vocab_size=5)
    rows = random_rows(model, [6] * 16)
    sampling, plain = Sampling(temperature=1.0), session(model, params, [row[:-1] for row in rows])
    plain.sample(sampling)
    plain.ids = [list(row) for row in rows]
    expected = plain.sample_steps(sampling, 4).tolist()
    texts = session(model, params, [row[:-1] for row in rows], end_of_text=0)
    texts.sample(sampling)
    texts.ids = [list(row) for row in rows]
    sampled = texts.sample_steps(sampling, 4).tolist()
    # The number of tokens before the first end-of-text; a last token is never cached.
    before = [tokens.index(0) if 0 in tokens else 3 for tokens in expected]
    assert set(before) == {0, 1, 2, 3} and any(0 not in tokens for tokens in expected)
    for found, tokens, count in zip(sampled, expected, before):
        assert found[: count + 1] == tokens[: count + 1]
    assert texts._cached_B.tolist() == [6 + count for count in before]
    texts.ids = [
        [*row, *tokens[:count], 3, 4, 1, 2, 3] for row, tokens, count in zip(rows, expected, before)
    ]
    _, logits = texts.sample_with_logits(sampling)
    fresh = session(model, params, texts.ids).sample_with_logits(sampling)[1]
    np.testing.assert_allclose(logits, fresh, atol=1e-5)


@pytest.mark.slow
def test_finished_rows_do_not_disturb_the_others():
    """A row gets the same tokens alone and in a batch with two rows that finish earlier.

    One of them finishes in the middle of a multi-step call, the other at the end of the context.
    """
    model, params = small("cgpt", num_layers=1)
    rows = random_rows(model, [3, 6, CONTEXT - 4])
    alone = session(model, params, rows[:1])
    together = session(model, params, rows)
    numbers = []
    while len(together.ids[0]) < 16:
        sampled_BxN = together.sample_steps(GREEDY, 16 - len(together.ids[0])).tolist()
        numbers.append(len(sampled_BxN[0]))
        ends = {1: 8, 2: CONTEXT}  # row → length at which it ends
        for i, (row, sampled) in enumerate(zip(together.ids, sampled_BxN)):
            row += sampled[: max(0, ends.get(i, CONTEXT) - len(row))]
    while len(alone.ids[0]) < 16:
        alone.ids[0].append(int(alone.sample(GREEDY)[0]))
    assert together.ids[0] == alone.ids[0]
    assert numbers == [1, 4, 4, 4] and list(map(len, together.ids)) == [16, 8, CONTEXT]


@pytest.mark.slow
def test_end_of_text_is_not_penalized():
    model, params = small("gpt", num_layers=1)
    texts = session(model, params, [[256, 7, 7, 9], [256, 3]], end_of_text=256)
    texts.sample(Sampling(repetition_penalty=2.0))
    assert [np.flatnonzero(row).tolist() for row in texts._seen] == [[7, 9], [3]]
    texts.ids = [[*row, 11] for row in texts.ids]
    texts.sample(Sampling())
    assert texts._seen is None
    texts.ids = [[*row, 12] for row in texts.ids]
    texts.sample(Sampling(repetition_penalty=2.0))
    assert [np.flatnonzero(row).tolist() for row in texts._seen] == [[7, 9, 11, 12], [3, 11, 12]]
