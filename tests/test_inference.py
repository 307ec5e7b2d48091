"""Decoding: the cache against the whole forward pass, sampling against plain formulas, the API."""

import functools
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from absl import flags
from conftest import ROOT, build, forward, init, load_config, run, spaced_model, spaced_tokenizer

from smallgpt_jax import inference, models
from smallgpt_jax.comparison import measure
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling, filtered, sample
from smallgpt_jax.models.block import Block, layer_configs, stack_blocks
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.gpt import GPT
from smallgpt_jax.models.pgpt import path_weights, with_paths
from smallgpt_jax.summary import closing
from smallgpt_jax.train import train

CONTEXT = 24
VARIANTS = [
    ("gpt", {}),
    ("gpt", {"use_bias": True, "tie_embeddings": True}),
    ("pgpt", {}),
    ("pgpt", {"num_paths": 4}),
    ("pgpt", {"num_paths": 2, "path_weights": "equal"}),
    ("lgpt", {}),
    ("lgpt", {"compress_last_stage": False, "stage_heads": "scaled"}),
    ("cgpt", {}),
    ("cgpt", {"conv_kernel": 1}),
    ("cgpt", {"conv_kernel": 5, "blocks_per_stage": 1}),
    ("gpt", {"position": "rope"}),
    ("gpt", {"position": "alibi"}),
    ("gpt", {"position": "none"}),
    ("pgpt", {"position": "rope"}),
    ("lgpt", {"position": "alibi", "compress_last_stage": False, "stage_heads": "scaled"}),
    ("cgpt", {"position": "rope", "conv_kernel": 3}),
]


def small(architecture, **fields):
    model = build(architecture, context_length=CONTEXT, **fields)
    return model, init(model)


def random_rows(model, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n).tolist() for n in lengths]


def texts_of(model, params, ids, **settings):
    return decoder.Texts(model, layout.pack(model, params), model.config.vocab_size, ids, **settings)


def assert_cache_gives_the_whole_pass(model, params):
    """Three rows of different lengths, read as prompts of 1, 5 and 9 tokens, then a few at a time
    (each row another number), then one by one."""
    rows = random_rows(model, [CONTEXT - 4, CONTEXT, CONTEXT - 9])
    filled = np.zeros((3, CONTEXT), np.int32)
    for place, row in zip(filled, rows):
        place[:len(row)] = row
    whole = forward(model, params, filled)
    texts = texts_of(model, params, [row[:n] for row, n in zip(rows, (1, 5, 9))])
    if model.config.architecture != "cgpt":
        texts.reserve(CONTEXT)  # else the caches grow on the way
    compared, going_on = 0, [0, 1, 2]
    while going_on:
        _, logits = texts.draw_with_logits(Sampling())
        for i in going_on:
            np.testing.assert_allclose(logits[i], whole[i, len(texts.ids[i]) - 1], atol=1e-4, rtol=1e-4)
            compared += 1
        going_on = [i for i in going_on if len(texts.ids[i]) < len(rows[i])]
        for i in going_on:
            read = len(texts.ids[i])
            texts.ids[i] += rows[i][read:read + (i + 1 if read < 10 else 1)]
    assert compared == 20 + 17 + 5 and [len(ids) for ids in texts.ids] == [len(row) for row in rows]


@pytest.mark.parametrize("architecture, fields", VARIANTS)
def test_cached_logits_are_those_of_the_whole_pass(architecture, fields):
    assert_cache_gives_the_whole_pass(*small(architecture, **fields))


@pytest.mark.parametrize("position", ["learned", "rope", "alibi"])
def test_a_long_prompt(position):
    """One that is read in parts, and a token after it."""
    model = build("gpt", context_length=192, num_layers=2, position=position)
    params = init(model)
    rows = random_rows(model, [150, 170])
    whole = forward(model, params, np.stack([np.pad(row, (0, 192 - len(row))) for row in rows]))
    texts = texts_of(model, params, [row[:-1] for row in rows])
    for more in (0, 1):
        if more:
            texts.ids = [list(row) for row in rows]
        _, logits = texts.draw_with_logits(Sampling())
        for i, row in enumerate(texts.ids):
            np.testing.assert_allclose(logits[i], whole[i, len(row) - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_paths, chosen", [
    (2, [0]), (2, [1]), (2, [1, 0]), (4, [2]), (4, [3, 1]), (4, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_chosen_paths(num_paths, chosen):
    """A path that is left out is one whose weight is zero."""
    model, params = small("pgpt", num_paths=num_paths)
    logits = np.append(params["trunk"]["path_logits"], 0.0)
    logits += [0.0 if path in chosen else -60.0 for path in range(num_paths)]
    silenced = {**params, "trunk": {**params["trunk"], "path_logits": jnp.array((logits - logits[-1])[:-1])}}
    tokens = np.array(random_rows(model, [CONTEXT]))
    config, kept = with_paths(model.config, params, chosen)
    part = models.LanguageModel(config)
    np.testing.assert_allclose(forward(part, kept, tokens),
                               forward(model, silenced, tokens), atol=2e-5, rtol=1e-4)
    assert models.num_parameters(part) == sum(x.size for x in jax.tree.leaves(kept))
    assert_cache_gives_the_whole_pass(part, kept)


def test_the_heaviest_path():
    model, params = small("pgpt", num_paths=4)
    params["trunk"]["path_logits"] = jnp.array([0.1, -0.3, 0.6])
    expected = np.exp([0.1, -0.3, 0.6, 0.0]) / np.exp([0.1, -0.3, 0.6, 0.0]).sum()
    np.testing.assert_allclose(path_weights(params), expected, rtol=1e-6)
    assert inference.chosen_paths(model, params, "best") == [2]
    assert inference.chosen_paths(model, params, "3, 1") == [3, 1]


def test_layers_that_are_shared_have_a_cache_for_each_use(monkeypatch):
    """The README's architecture, whose blocks are passed through twice."""
    names = {}
    readme = (ROOT / "README.md").read_text()
    exec(re.search(r"```python\n(# my_models/twice\.py.*?)```", readme, re.DOTALL)[1], names)
    monkeypatch.setitem(models.ARCHITECTURES, "twice", names["Twice"])
    config = load_config("gpt", model__architecture="twice", model__context_length=CONTEXT)
    model = models.build(**config.model)
    assert_cache_gives_the_whole_pass(model, init(model))


class IgnoresDecoding(nn.Module):
    """Blocks that are computed as in training: attention sees the tokens of one call only."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        for i in range(2):
            x_BxTxD = Block(self.config, name=f"block_{i}")(x_BxTxD, Context(train=context.train))
        return x_BxTxD


class FailsInDecoding(nn.Module):
    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        assert not context.decode, "not written yet"
        return stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)


@pytest.mark.parametrize("trunk, words", [
    (IgnoresDecoding, ["gives wrong logits", "no layer keeps a cache", "context.decode"]),
    (FailsInDecoding, ["AssertionError: not written yet", "context.decode"]),
    (GPT, None)])
def test_an_own_architecture_that_decodes_wrongly_is_refused(trunk, words, monkeypatch):
    """Untrained, without learned positions, so that only attention tells the positions apart."""
    monkeypatch.setitem(models.ARCHITECTURES, "own", trunk)
    monkeypatch.setattr(models, "BUILT_IN", ())
    model = models.build(**load_config("gpt", model__architecture="own", model__num_layers=1,
                                       model__position="none").model)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 64), int)))["params"]
    monkeypatch.setattr(inference, "load_trained", lambda *_: inference.Trained(model, params, {}, Bytes(), 1))
    if words is None:
        inference.load("a workdir")
        return
    with pytest.raises(UserError, match=r"^config\.model\.architecture='own': ") as error:
        inference.load("a workdir")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_architecture_that_cannot_be_decoded_is_trained_and_compared_all_the_same(monkeypatch, tmp_path, capsys):
    def refuse(folder):
        raise UserError("no layer keeps a cache")

    monkeypatch.setattr(inference, "load", refuse)
    closing(str(tmp_path))
    assert "(none: no layer keeps a cache)" in capsys.readouterr().out
    said = []
    measure.measure_decoding(tmp_path, said.append)
    assert said == [f"{tmp_path.name}: decoding is not measured: no layer keeps a cache"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architecture, fields, numbers_a_position, extra", [
    ("gpt", {}, 2 * 4 * 64, 0), ("pgpt", {}, 2 * 4 * 64, 0), ("lgpt", {}, 2 * (2 * 64 + 2 * 32), 0),
    ("cgpt", {"conv_kernel": 3}, 2 * (2 * 64 + 2 * 32), 2 * (64 + 32))])
def test_bytes_of_the_cache(architecture, fields, numbers_a_position, extra):
    model, params = small(architecture, **fields)
    texts = texts_of(model, params, random_rows(model, [3, 8]))
    texts.draw(Sampling())
    assert texts.cache_bytes() == 2 * 4 * (16 * numbers_a_position + extra)
    texts.reserve(14)
    assert texts.cache_bytes() == 2 * 4 * (CONTEXT * numbers_a_position + extra)


def test_bfloat16_weights_and_caches():
    model, params = small("gpt", dtype="bfloat16")
    weights = layout.pack(model, params)
    assert weights["params"]["trunk"]["blocks"]["mlp"]["up"]["kernel"][3].dtype == jnp.bfloat16
    texts = texts_of(model, params, random_rows(model, [5]))
    _, logits = texts.draw_with_logits(Sampling())
    assert logits.dtype == jnp.float32
    whole = forward(model, params, np.array(texts.ids))[0, -1]
    np.testing.assert_allclose(logits[0], whole, atol=0.05)


def test_nothing_is_compiled_twice():
    model, params = small("gpt", num_layers=1)
    weights = layout.pack(model, params)

    def generate(length, count, temperature):
        texts = decoder.Texts(model, weights, 300, random_rows(model, [length]))
        texts.reserve(count)
        for _ in range(count):
            texts.ids[0].append(int(texts.draw(Sampling(temperature=temperature))[0]))

    before = decoder.advance._cache_size()
    generate(3, 1, 1.0)
    assert decoder.advance._cache_size() == before + 1  # the prompt
    generate(3, 10, 0.5)
    assert decoder.advance._cache_size() == before + 2  # one token
    generate(9, 7, 0.7)
    assert decoder.advance._cache_size() == before + 2


@pytest.mark.parametrize("architecture, fields", [("gpt", {}), ("pgpt", {}), ("cgpt", {"conv_kernel": 3})])
def test_tokens_drawn_ahead_are_those_drawn_one_by_one(architecture, fields):
    """Also past the end of the context, where half of it is read again; in one program."""
    model, params = small(architecture, **fields)
    sampling = Sampling(top_k=20, repetition_penalty=1.3)
    numbers = []

    def written(draw):
        texts = texts_of(model, params, random_rows(model, [1, 5]), seed=3)
        texts.reserve(30)
        tokens = [[], []]
        while (left := 30 - len(tokens[0])) > 0:
            drawn_BxN = draw(texts, left)
            numbers.append(len(drawn_BxN[0]))
            for row, so_far, drawn in zip(texts.ids, tokens, drawn_BxN):
                so_far += drawn
                row += drawn
        assert texts.forgotten > 0
        return tokens

    before = decoder.advance_ahead._cache_size()
    ahead = written(lambda texts, left: texts.draw_ahead(sampling, left).tolist())
    assert decoder.advance_ahead._cache_size() == before + 1
    # Of 24 positions the longer prompt has 5: 20 tokens later nothing more can be read, and then of the other row.
    assert numbers == [1, 4, 4, 4, 4, 3, 1, 3, 1, 4, 1]
    assert ahead == written(lambda texts, left: np.asarray(texts.draw(sampling))[:, None].tolist())
    assert list(map(len, ahead)) == [30, 30]


def test_rows_that_end_leave_the_others_alone():
    """Three rows, of which one ends in the middle of what is drawn ahead and one with the context full."""
    model, params = small("cgpt", conv_kernel=3)
    rows, greedy = random_rows(model, [3, 6, CONTEXT - 4]), Sampling(temperature=None)
    alone = texts_of(model, params, rows[:1])
    together = texts_of(model, params, rows)
    numbers = []
    while len(together.ids[0]) < 16:
        drawn_BxN = together.draw_ahead(greedy, 16 - len(together.ids[0])).tolist()
        numbers.append(len(drawn_BxN[0]))
        ends = {1: 8, 2: CONTEXT}  # where rows end, by their lengths
        for i, (row, drawn) in enumerate(zip(together.ids, drawn_BxN)):
            row += drawn[:max(0, ends.get(i, CONTEXT) - len(row))]
    while len(alone.ids[0]) < 16:
        alone.ids[0].append(int(alone.draw(greedy)[0]))
    assert together.ids[0] == alone.ids[0]
    assert numbers == [1, 4, 4, 4] and list(map(len, together.ids)) == [16, 8, CONTEXT]


def test_lengths_are_rounded_up():
    lengths = (1, 16, 17, 33, 64, 65, 96, 97, 128, 129, 700, 1000)
    assert [decoder.bucket(n, 1000) for n in lengths] == [
        16, 16, 32, 48, 64, 96, 96, 128, 128, 192, 768, 1000]


# ---------------------------------------------------------------------- sampling

def test_filters_are_those_of_the_formulas():
    logits = np.array([[2.0, -1.0, 0.5, 1.5, 0.0], [0.0, 3.0, -2.0, 1.0, 2.9]], np.float32)
    seen = np.array([[True, True, False, False, False], [False, False, True, True, False]])
    penalised = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)

    def check(expected, **settings):
        found = np.asarray(filtered(jnp.array(logits), jnp.array(seen), Sampling(**settings)))
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    check(logits)
    check(logits / 0.7, temperature=0.7)
    check(penalised, temperature=None, repetition_penalty=1.3)
    check(penalised / 0.5, temperature=0.5, repetition_penalty=1.3)
    inf = -np.inf
    check([[2.0, inf, inf, 1.5, inf], [inf, 3.0, inf, inf, 2.9]], top_k=2)
    # Probabilities: .49 .02 .11 .30 .07 and .02 .47 .00 .06 .43.
    check([[2.0, inf, inf, 1.5, inf], [inf, 3.0, inf, inf, 2.9]], top_p=0.5)
    check([[2.0, inf, inf, inf, inf], [inf, 3.0, inf, inf, inf]], top_p=0.1)
    check([[2.0, inf, 0.5, 1.5, inf], [inf, 3.0, inf, inf, 2.9]], top_p=0.8)
    check([[2.0, inf, inf, inf, inf], [inf, 3.0, inf, inf, inf]], top_k=2, top_p=0.3)


def test_draws_have_the_distribution():
    logits = jnp.tile(jnp.array([[1.0, 0.0, -1.0, 2.0]]), (20_000, 1))
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.bincount(sample(logits, None, Sampling(temperature=0.5), keys), minlength=4) / 20_000
    expected = np.exp([2, 0, -2, 4]) / np.exp([2, 0, -2, 4]).sum()
    np.testing.assert_allclose(drawn, expected, atol=0.01)


# ---------------------------------------------------------------------- texts

@pytest.fixture(scope="module")
def workdir(text_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    train(load_config("pgpt", data__source=str(text_file), train__steps=20), str(workdir))
    return workdir


@pytest.fixture(scope="module")
def model(workdir):
    return inference.load(workdir)


def test_greedy_text_is_the_likeliest_token_each_time(workdir, model):
    trained, params, *_ = inference.load_trained(workdir)
    ids = [256, *b"the dog"]
    for _ in range(12):
        logits = forward(trained, params, np.array([ids + (20 - len(ids)) * [0]]))[0, len(ids) - 1]
        ids.append(int(np.argmax(logits[:257])))
    assert model.generate("the dog", 12, temperature=0) == bytes(ids[8:]).decode(errors="replace")


def test_settings(model):
    def text(**settings):
        return model.generate("the", 30, **settings)

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(top_k=1, seed=1) == text(temperature=0, seed=2) == text(top_p=1e-6, seed=3)
    assert len(set(text(temperature=50.0, seed=3))) > len(set(text(temperature=0.5, seed=3)))
    assert len(set(text(temperature=0, repetition_penalty=9.0))) > len(set(text(temperature=0)))


def test_a_batch_is_its_texts_one_by_one(model):
    prompts = ["the", "the cat sat on a mat while", "dog"]
    alone = [model.generate(prompt, 20, seed=4, top_k=20) for prompt in prompts]
    assert model.generate_batch(prompts, 20, seed=4, top_k=20) == [[text] for text in alone]
    sampled = model.generate_batch(prompts, 20, seed=4, top_k=20, samples=3)
    assert [texts[0] for texts in sampled] == alone
    assert all(len(set(texts)) == 3 for texts in sampled)
    assert len({text for texts in sampled for text in texts}) == 9
    assert "".join(model.stream("the", 20, seed=4, top_k=20)) == alone[0]


def test_stop_strings(model):
    text = model.generate("the", 40, seed=1)
    stop = text[20:23]
    cut = text[:text.index(stop)]
    assert model.generate("the", 40, seed=1, stop=[stop]) == cut
    assert "".join(model.stream("the", 40, seed=1, stop=["never", stop])) == cut
    assert model.generate_batch(["the"], 40, seed=1, stop=[stop]) == [[cut]]
    assert model.generate("the", 40, seed=1, stop=[text + "!"]) == text


def test_characters_of_several_tokens_come_whole():
    written = inference.Written(Bytes(), stop=["né!"])
    assert [written.add(byte) for byte in "né§né".encode()] == ["", "", "", "", "né§", "", "", ""]
    assert (written.rest(), written.is_done) == ("né", False)


@pytest.fixture(scope="module", params=[True, False])
def spaced(request):
    """A model whose tokenizer puts a space in front of each text, and drops others or keeps them."""
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=request.param)
    model, params = spaced_model(tokenizer, context_length=CONTEXT)
    return inference.TextModel(model, layout.pack(model, params), tokenizer)


def test_text_keeps_the_space_that_it_begins_with(spaced):
    prompts, greedy, alone = ["the model is", "a cat", "on text"], {"temperature": 0}, []
    for prompt in prompts:
        conversation = spaced.conversation()
        first = "".join(conversation.say(prompt, 6, **greedy))
        assert prompt + first == spaced.tokenizer.decode(conversation._text.ids[0])
        assert first == spaced.generate(prompt, 6, **greedy) == "".join(spaced.stream(prompt, 6, **greedy))
        second = "".join(conversation.say("ed on", 4, **greedy))
        third = "".join(conversation.say(" text", 4, **greedy))
        written = spaced.tokenizer.decode(conversation._text.ids[0])
        assert f"{prompt}{first}ed on{second} text{third}".endswith(written)
        assert conversation.forgotten or f"{prompt}{first}ed on{second} text{third}" == written
        alone.append(first)
    assert spaced.generate_batch(prompts, 6, **greedy) == [[text] for text in alone]
    assert all(text.startswith(" ") for text in alone), "these weights do not show the difference"


@pytest.mark.parametrize("text", ["ed on", " on text", "on  text", ""])
def test_a_turn_is_encoded_without_a_space_of_its_own(spaced, text):
    tokenizer = spaced.tokenizer
    ids = [*tokenizer.encode(["the model is"])[0], *tokenizer.encode_continuation(text)]
    assert tokenizer.decode(ids) == "the model is" + tokenizer.decode(tokenizer.encode([f"x{text}"])[0])[1:]


def test_a_space_that_the_prompt_shows_is_not_shown_again():
    """The tokenizer drops the prompt's last space; the first token that follows brings it."""
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=True)
    before, new = (tokenizer.encode([text])[0].tolist() for text in ("the model ", "is"))
    for prompt, text in (("the model ", "is"), ("the model\n", "is"), ("the model", " is")):
        written = inference.Written(tokenizer, (), before, prompt)
        assert "".join([*map(written.add, new), written.rest()]) == text


def test_a_character_begun_in_the_turn_before_is_completed():
    written = inference.Written(Bytes(), (), [256, *b"n", "é".encode()[0]])
    assert [written.add(byte) for byte in ("é".encode()[1], *b"e!")] == ["é", "e", "!"]


@pytest.fixture(scope="module")
def cgpt():
    """One with convolutions that look back, whose cache is not a matter of positions alone."""
    model, params = small("cgpt", conv_kernel=3)
    return inference.TextModel(model, layout.pack(model, params), Bytes())


@pytest.mark.parametrize("settings", [
    {"temperature": 0}, {"seed": 3}, {"temperature": 0, "repetition_penalty": 1.5}])
def test_a_batch_with_convolutions(cgpt, settings):
    """Also of an empty prompt, and long enough for rows to be forgotten at different times."""
    prompts = ["", "abc", "the cat sat"]
    alone = [cgpt.generate(prompt, 30, **settings) for prompt in prompts]
    assert cgpt.generate_batch(prompts, 30, **settings) == [[text] for text in alone]
    assert [texts[0] for texts in cgpt.generate_batch(prompts, 30, samples=2, **settings)] == alone


def test_a_conversation_with_convolutions(cgpt):
    def text(turns):
        conversation = cgpt.conversation()
        for turn in turns:
            list(conversation.say(turn, 3, temperature=0))
        return conversation._text

    said = text(["ab", "", "cde"])
    fresh = decoder.Texts(cgpt.model, cgpt.weights, 257, said.ids)
    _, logits = said.draw_with_logits(Sampling())
    np.testing.assert_allclose(logits, fresh.draw_with_logits(Sampling())[1], atol=1e-4, rtol=1e-4)


def test_a_turn_that_adds_nothing(model):
    conversation = model.conversation()
    pieces = conversation.say("the cat", 5, temperature=0)
    next(pieces)
    pieces.close()  # what was computed ahead is not written
    assert "".join(conversation.say("", 4, temperature=0)) == model.generate("the cat", 5, temperature=0)[1:]


def test_a_refused_turn_changes_nothing(model):
    conversation = model.conversation()
    for refused in ({"max_new_tokens": -1}, {"stop": "END"}, {"temperature": -1}):
        with pytest.raises(UserError):
            conversation.say("the", **refused)
    assert conversation._text.ids == [[256]]


def test_end_of_text_is_not_penalised():
    model, params = small("gpt", num_layers=1)
    texts = texts_of(model, params, [[256, 7, 7, 9], [256, 3]], unpenalised=256)
    texts.draw(Sampling(repetition_penalty=2.0))
    assert [np.flatnonzero(row).tolist() for row in texts._seen] == [[7, 9], [3]]
    texts.ids = [[*row, 11] for row in texts.ids]
    texts.draw(Sampling())
    assert texts._seen is None
    texts.ids = [[*row, 12] for row in texts.ids]
    texts.draw(Sampling(repetition_penalty=2.0))
    assert [np.flatnonzero(row).tolist() for row in texts._seen] == [[7, 9, 11, 12], [3, 11, 12]]


def test_text_goes_on_past_the_context(model):
    """Beyond it, what is left of the context is read as a text of its own."""
    text = decoder.Texts(model.model, model.weights, 257, [[256, *b"the cat sat " * 5]])
    greedy = Sampling(temperature=None)
    while len(text.ids[0]) <= 64:
        text.ids[0].append(int(text.draw(greedy)[0]))
    rest = text.ids[0][-32:]
    drawn = int(text.draw(greedy)[0])
    assert text.ids[0] == rest and text.forgotten == 33
    assert drawn == int(decoder.Texts(model.model, model.weights, 257, [rest]).draw(greedy)[0])
    assert len(model.generate("the cat sat " * 5, 100)) > 50


def test_a_turn_computes_only_its_own_tokens(model, monkeypatch):
    computed = []
    advance = decoder.advance

    def counting(params, cache, seen, tokens_BxT, start_B, count_B, *rest, **static):
        computed.append(int(count_B.sum()))
        result = advance(params, cache, seen, tokens_BxT, start_B, count_B, *rest, **static)
        logits.append(np.asarray(result[3]))
        return result

    monkeypatch.setattr(decoder, "advance", counting)
    logits = []
    conversation = model.conversation()
    first = "".join(conversation.say("the cat\n", 6, temperature=0))
    assert computed == [9, 1, 1, 1, 1, 1]  # end-of-text and 8 bytes; then each token but the last
    computed.clear()
    logits.clear()
    second = "".join(conversation.say("a dog ran\n", 3, temperature=0))
    assert computed == [11, 1, 1]  # the last token of the first answer, and 10 bytes

    ids = conversation._text.ids[0]
    monkeypatch.undo()
    fresh = decoder.Texts(model.model, model.weights, 257, [ids[:-3]])
    np.testing.assert_allclose(logits[0], fresh.draw_with_logits(Sampling())[1], atol=1e-4, rtol=1e-4)
    assert bytes(ids[1:]).decode(errors="replace") == f"the cat\n{first}a dog ran\n{second}"


def test_a_long_conversation_forgets(model):
    conversation = model.conversation()
    for _ in range(4):
        assert "".join(conversation.say("the cat sat on a mat\n", 10))
    assert conversation.forgotten > 0
    with pytest.raises(UserError, match=r"33 tokens at once: at most 32"):
        list(conversation.say("x" * 33))


def test_what_the_readme_shows(workdir):
    example = re.search(r"```python\n(from smallgpt_jax import inference.*?)```",
                        (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(example.replace("runs/pgpt-quickstart", str(workdir)), names)
    assert [len(texts) for texts in names["texts"]] == [2, 2]
    assert "".join(names["turn"])


# ---------------------------------------------------------------------- refusals

@pytest.mark.parametrize("settings, words", [
    ({"temperature": -1.0}, ["temperature=-1.0"]),
    ({"temperature": float("nan")}, ["temperature=nan"]),
    ({"top_k": 0}, ["top_k=0"]),
    ({"top_p": 0.0}, ["top_p=0.0"]),
    ({"top_p": 1.5}, ["top_p=1.5"]),
    ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0"]),
    ({"max_new_tokens": -1}, ["max_new_tokens=-1"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"stop": "END"}, ["stop='END'", "list"]),
    ({"prompt": "x" * 64}, ["64 tokens", "ends at 64"]),
    ({"prompt": "a\udcffb"}, ["character 2", "UTF-8"]),
])
def test_impossible_texts_are_refused(model, settings, words):
    with pytest.raises(UserError) as error:
        model.generate(**{"prompt": "the", "max_new_tokens": 5, **settings})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_misspelt_setting_names_the_method(model):
    for method in (model.generate, model.stream, model.generate_batch, model.conversation().say):
        with pytest.raises(TypeError, match=rf"\.{method.__name__}\(\) got .* 'max_tokens'"):
            method("the", max_tokens=3)


def test_a_text_that_is_stopped_ends_its_line(capsys, monkeypatch):
    # Commands and benchmarks define flags of the same names: this one's are its own.
    own = flags.FlagValues()
    for name in ("DEFINE_string", "DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_multi_string",
                 "mark_flag_as_required", "mark_flags_as_required"):
        monkeypatch.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=own))
    from smallgpt_jax import generate

    def pieces():
        yield " cat"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate.show("the", pieces())
    assert capsys.readouterr().out == "the cat\n"


def test_batches_that_are_none(model):
    for prompts, samples in (("the", 1), ([], 1), (["the"], 0)):
        with pytest.raises(UserError, match=r"prompts=|samples=0"):
            model.generate_batch(prompts, samples=samples)


def test_characters_without_a_piece(model, tmp_path):
    from smallgpt_jax.data import tokenizers

    (tmp_path / "text").write_text("abc abd abe\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=12,
        hard_vocab_limit=False, minloglevel=2)
    tokenizer = tokenizers.read_sentencepiece(tmp_path / "tokenizer.model")
    narrow = inference.TextModel(model.model, model.weights, tokenizer)
    with pytest.raises(UserError, match="no piece for 'x', 'é'"):
        narrow.generate("abcxé")


@pytest.mark.parametrize("paths", ["2", "0,0", "first", "", [-1]])
def test_paths_that_do_not_exist(workdir, paths):
    with pytest.raises(UserError, match="different numbers from 0 to 1"):
        inference.load(workdir, paths=paths)


def test_paths_of_a_model_without_paths():
    gpt, params = small("gpt")
    with pytest.raises(UserError, match="only pgpt has paths, this model is a gpt"):
        inference.chosen_paths(gpt, params, "best")


def test_workdirs_without_a_model(workdir, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        inference.load(tmp_path / "nothere")
    with pytest.raises(UserError, match=r"config\.json"):
        inference.load(tmp_path)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        inference.load(tmp_path)
    with pytest.raises(UserError, match="there are: 20"):
        inference.load(workdir, step=7)


@pytest.mark.slow
def test_the_command(workdir):
    def generate(*flags, text=None):
        return run("generate", f"--workdir={workdir}", *flags, input=text)

    several = generate("--prompt=the", "--prompt=a dog", "--samples=2", "--paths=best", "--max_new_tokens=10")
    assert (several.returncode, several.stderr) == (0, "")
    assert re.findall("=== .*", several.stdout) == [
        f"=== {prompt!r}, sample {i}" for prompt in ("the", "a dog") for i in (0, 1)]
    turns = generate("--interactive", text="the cat\na dog\n")
    assert turns.returncode == 0 and len(turns.stdout.splitlines()) >= 2
    assert turns.stderr == ""  # two lines and their answers fit into the context
    for given, message in [
            (["--prompt="], "error: --prompt is empty; leave it out to begin a new document\n"),
            (["--temperature=-1"], "error: temperature=-1.0: must be a number, not negative\n")]:
        refused = generate(*given)
        assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", message)
