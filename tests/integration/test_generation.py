"""Tests of generation with trained and random models: streams, batches, conversations, full
contexts.
"""

import math
import re
import shutil

import jax
import numpy as np
import pytest
from conftest import (
    build,
    call,
    forward,
    init,
    load_config,
    save_run,
    spaced_model,
    spaced_tokenizer,
)
from run_helpers import SMALL

from smallgpt_jax import inference, models
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout, text_model
from smallgpt_jax.inference.sampling import Sampling

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=None)


def letters_first(head_VxW, scale: float):
    """Returns factors of the output head with which a random model prefers letters, (V, 1)."""
    is_letter_V = np.isin(np.arange(len(head_VxW)), list(b"abcdefghijklmnopqrstuvwxyz"))
    return np.where(is_letter_V, scale, 0.01)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def workdir(text_file, tmp_path_factory):
    """Returns the workdir of a random model that prefers letters, some of them much."""
    config = load_config("pgpt", **SMALL, data__source=str(text_file))
    params = init(models.build(**config.model))
    params["head"] *= letters_first(params["head"], 30.0)
    return save_run(tmp_path_factory.mktemp("runs") / "pgpt", config, params)


@pytest.fixture(scope="module")
def model(workdir):
    return inference.load(workdir)


def test_greedy_text_matches_the_forward_pass(workdir, model):
    trained, params, *_ = inference.load_trained(workdir)
    ids = [256, *b"the dog"]
    for _ in range(12):
        logits = forward(trained, params, np.array([ids + (20 - len(ids)) * [0]]))[0, len(ids) - 1]
        ids.append(int(np.argmax(logits[:257])))
    assert model.generate("the dog", 12, temperature=0) == bytes(ids[8:]).decode(errors="replace")


def test_temperature_and_seed(model):
    def text(**settings):
        return model.generate("the", 20, **settings)

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(temperature=0.1, seed=3).isascii() and not text(temperature=50.0, seed=3).isascii()
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


def test_a_batch_gives_the_same_texts_as_single_prompts(model):
    prompts = ["the", "the cat sat on", "dog"]
    alone = [model.generate(prompt, 16, seed=4) for prompt in prompts]
    assert model.generate_batch(prompts, 16, seed=4) == [[text] for text in alone]
    sampled = model.generate_batch(prompts, 16, seed=4, samples=3)
    assert [texts[0] for texts in sampled] == alone
    assert len({text for texts in sampled for text in texts}) == 9
    assert "".join(model.stream("the", 16, seed=4)) == alone[0]


def test_stop_strings(model):
    text = model.generate("the", 20, seed=1)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    assert model.generate("the", 20, seed=1, stop=[stop]) == cut
    assert "".join(model.stream("the", 20, seed=1, stop=["never", stop])) == cut
    assert model.generate_batch(["the"], 20, seed=1, stop=[stop]) == [[cut]]
    assert model.generate("the", 20, seed=1, stop=[text + "!"]) == text


def test_text_keeps_its_leading_space():
    """A space at the start of a generated text is kept.

    Both tokenizers of this test add a space before each text that they encode. One of them also
    removes extra spaces.
    """
    prompts, greedy, loaded = ["the model is", "a cat", "on text"], {"temperature": 0}, None
    for remove_extra_whitespaces in (True, False):
        tokenizer = spaced_tokenizer(remove_extra_whitespaces)
        loaded = loaded or spaced_model(tokenizer, context_length=24)
        spaced, alone = inference.TextModel(loaded[0], layout.pack(*loaded), tokenizer), []
        for prompt in prompts:
            conversation = spaced.conversation()
            first = "".join(conversation.say(prompt, 6, **greedy))
            assert prompt + first == tokenizer.decode(conversation._session.ids[0])
            assert (
                first
                == spaced.generate(prompt, 6, **greedy)
                == "".join(spaced.stream(prompt, 6, **greedy))
            )
            second = "".join(conversation.say("ed on", 4, **greedy))
            third = "".join(conversation.say(" text", 4, **greedy))
            written = tokenizer.decode(conversation._session.ids[0])
            assert f"{prompt}{first}ed on{second} text{third}".endswith(written)
            assert conversation.dropped or f"{prompt}{first}ed on{second} text{third}" == written
            alone.append(first)
        assert spaced.generate_batch(prompts, 6, **greedy) == [[text] for text in alone]
        assert all(text.startswith(" ") for text in alone), (
            "the test needs weights that generate a leading space"
        )


@pytest.fixture(scope="module")
def cgpt():
    """Returns a model with convolutions, whose cache contains more than keys and values."""
    model = build("cgpt", num_layers=1, blocks_per_stage=1, context_length=24)
    params = init(model)
    params["head"] *= letters_first(params["head"], 1.0)
    return inference.TextModel(model, layout.pack(model, jax.device_get(params)), Bytes())


def test_a_batch_with_convolutions(cgpt):
    """A batch gives the same texts as single prompts.

    One prompt is empty. The rows outgrow the context at different steps, and then drop their oldest
    tokens.
    """
    prompts, settings = ["", "abc", "the cat sat"], {"seed": 3, "repetition_penalty": 1.5}
    alone = [cgpt.generate(prompt, 30, **settings) for prompt in prompts]
    assert [texts[0] for texts in cgpt.generate_batch(prompts, 30, samples=2, **settings)] == alone


def test_a_conversation_with_convolutions(cgpt):
    conversation = cgpt.conversation()
    for turn in ["ab", "", "cde"]:
        list(conversation.say(turn, 3, temperature=0))
    fresh = cgpt.session(conversation._session.ids)
    _, logits = conversation._session.sample_with_logits(GREEDY)
    np.testing.assert_allclose(logits, fresh.sample_with_logits(GREEDY)[1], atol=1e-4, rtol=1e-4)


def test_an_empty_turn_continues_the_text(model):
    conversation = model.conversation()
    stream = conversation.say("the cat", 5, temperature=0)
    next(stream)
    stream.close()  # discards the token that was computed ahead
    assert (
        "".join(conversation.say("", 4, temperature=0))
        == model.generate("the cat", 5, temperature=0)[1:]
    )


@pytest.mark.parametrize("pieces", range(1, 7))
def test_a_turn_that_is_not_read_to_its_end(cgpt, monkeypatch, pieces):
    """If reading stops early, tokens that were computed ahead are not part of the conversation."""
    monkeypatch.setattr(text_model, "FAST_STEP", math.inf)
    conversation = cgpt.conversation()
    stream = conversation.say("ab", 9, temperature=0)
    for _ in range(pieces):
        next(stream)
    stream.close()
    ids = conversation._session.ids[0]
    assert len(ids) == 3 + pieces
    turn = "" if pieces % 2 else "cdefgh"
    list(conversation.say(turn, 1, temperature=0))
    fresh = cgpt.session(conversation._session.ids)
    _, logits = conversation._session.sample_with_logits(GREEDY)
    np.testing.assert_allclose(logits, fresh.sample_with_logits(GREEDY)[1], atol=1e-4, rtol=1e-4)
    assert bytes(conversation._session.ids[0][1:]).startswith(
        b"ab" + bytes(ids[3 : 3 + pieces]) + turn.encode()
    )


def test_text_continues_past_the_context(model):
    """When the context is full, the newer half of its tokens is prefilled like a new prompt."""
    text = model.session([[256, *b"the cat sat " * 2]])
    while len(text.ids[0]) <= 32:
        text.ids[0].append(int(text.sample(GREEDY)[0]))
    rest = text.ids[0][-16:]
    sampled = int(text.sample(GREEDY)[0])
    assert text.ids[0] == rest and text.dropped == 17
    assert sampled == int(model.session([rest]).sample(GREEDY)[0])
    assert len(model.generate("the cat sat ", 50, temperature=0)) == 50


def test_a_turn_computes_only_its_own_tokens(model, monkeypatch):
    computed, logits, decode_step, decode_steps = [], [], decoder.decode_step, decoder.decode_steps

    def counting(compiled_for, weights, state, new, *rest):
        computed.append(int(new.count_B.sum()))
        result = decode_step(compiled_for, weights, state, new, *rest)
        logits.append(np.asarray(result[2]))
        return result

    def counting_steps(compiled_for, weights, state, new, steps, sampler):
        computed.append(int(steps))
        monkeypatch.setattr(
            decoder, "decode_step", decode_step
        )  # `decode_steps` must not call the patched function
        result = decode_steps(compiled_for, weights, state, new, steps, sampler)
        monkeypatch.setattr(decoder, "decode_step", counting)
        return result

    monkeypatch.setattr(decoder, "decode_step", counting)
    monkeypatch.setattr(decoder, "decode_steps", counting_steps)
    conversation = model.conversation()
    first = "".join(conversation.say("the cat\n", 6, temperature=0))
    assert (
        computed[0] == 9 and sum(computed[1:]) == 5
    )  # 9 tokens of the prompt; the last new token is no input
    computed.clear()
    logits.clear()
    second = "".join(conversation.say("a dog ran\n", 3, temperature=0))
    # The 11 inputs are the last token of the first answer and the 10 bytes of the turn.
    assert computed[0] == 11 and sum(computed[1:]) == 2

    ids = conversation._session.ids[0]
    monkeypatch.undo()
    fresh = model.session([ids[:-3]])
    np.testing.assert_allclose(logits[0], fresh.sample_with_logits(GREEDY)[1], atol=1e-4, rtol=1e-4)
    assert bytes(ids[1:]).decode(errors="replace") == f"the cat\n{first}a dog ran\n{second}"
    # So far, the conversation fits into the context. Two more turns do not fit, so its beginning is
    # dropped.
    assert conversation.dropped == 0
    for _ in range(2):
        assert "".join(conversation.say("a dog ran\n", 3, temperature=0))
    assert conversation.dropped > 0


def test_refuses_workdirs_without_a_model(workdir, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        inference.load(tmp_path / "nothere")
    with pytest.raises(UserError, match=r"config\.json"):
        inference.load(tmp_path)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        inference.load(tmp_path)
    with pytest.raises(UserError, match="choose from 40"):
        inference.load(workdir, step=7)
    with pytest.raises(UserError, match="distinct indices from 0 to 1"):
        inference.load(workdir, paths="2")
    with pytest.raises(UserError, match="no chat template: the run did not train on conversations"):
        inference.load(workdir).chat()


def test_generate(workdir, model):
    """Covers the generate command: one text, several samples, one path, turns from standard input,
    and wrong flags.
    """

    def generate(*flags, **settings):
        result = call("generate", f"--workdir={workdir}", "--max_new_tokens=4", *flags, **settings)
        return result.returncode, result.stdout, result.stderr

    text = model.generate("the", 4, temperature=0.8)
    assert generate("--prompt=the") == (0, f"the{text}\n", "")
    status, several, error = generate(
        "--prompt=the", "--prompt=a dog", "--samples=2", "--paths=best"
    )
    assert (status, error) == (0, "")
    assert re.findall("=== .*", several) == [
        f"=== {prompt!r}, sample {i}" for prompt in ("the", "a dog") for i in (0, 1)
    ]
    status, turns, error = generate("--interactive", input="the cat\na dog\n")
    assert (status, error) == (0, "") and len(
        turns.splitlines()
    ) >= 2  # both turns fit into the context
    for flag, message in [
        ("--prompt=", "error: --prompt: is empty; leave it out to begin a new document\n"),
        ("--temperature=-1", "error: temperature=-1.0: must be a number, at least 0\n"),
    ]:
        assert generate(flag) == (1, "", message)
