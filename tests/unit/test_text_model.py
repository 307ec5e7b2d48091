"""Tests of the parts of text generation that need no weights: settings, prompts, detokenizing."""

import functools
import re
import sys

import numpy as np
import pytest
from absl import flags
from conftest import build, spaced_tokenizer

from smallgpt_jax import inference
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import inference_cost
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.pgpt import path_weights
from smallgpt_jax.training.messages import print_final_message


@pytest.fixture
def model():
    """Returns a model with a context of 64 tokens and no weights."""
    return inference.TextModel(build("gpt"), {}, Bytes())


@pytest.fixture
def generate(monkeypatch):
    """Returns the command's module, with FlagValues of its own, because other commands define the
    same flags.
    """
    own = flags.FlagValues()
    for name in (
        "DEFINE_string",
        "DEFINE_integer",
        "DEFINE_float",
        "DEFINE_bool",
        "DEFINE_multi_string",
        "mark_flag_as_required",
        "mark_flags_as_required",
    ):
        monkeypatch.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=own))
    from smallgpt_jax import generate

    return generate


def test_a_notebook_shows_a_model_in_a_line(model):
    assert re.fullmatch(r"TextModel\(gpt, \d+ × \d+, [\d,]+ parameters\)", repr(model))


def test_every_method_passes_its_settings_on(model, monkeypatch):
    received = []
    monkeypatch.setattr(
        inference.TextModel,
        "complete",
        lambda self, text, prompts, *settings: (
            received.append(settings[0]) or ["" for _ in prompts]
        ),
    )
    monkeypatch.setattr(
        inference.TextModel,
        "_stream",
        lambda self, text, prompt, *settings: received.append(settings[0]),
    )
    given = dict(temperature=0.5, top_k=3, top_p=0.4, repetition_penalty=2.0)
    for method in (model.generate, model.stream, model.generate_batch, model.conversation().say):
        method(["the"] if method == model.generate_batch else "the", 7, stop=["x"], **given)
    assert received == [(7, ["x"], Sampling(**given))] * 4


def test_python_and_the_command_have_the_same_default_temperature(model, generate, monkeypatch):
    received = []
    monkeypatch.setattr(
        inference.TextModel,
        "complete",
        lambda self, text, prompts, *settings: (
            received.append(settings[0].sampling) or ["" for _ in prompts]
        ),
    )
    monkeypatch.setattr(
        inference.TextModel,
        "_stream",
        lambda self, text, prompt, *settings: received.append(settings[0].sampling),
    )
    for method in (model.generate, model.stream, model.generate_batch, model.conversation().say):
        method(["the"] if method == model.generate_batch else "the", 7)
    assert received == [Sampling(temperature=generate._TEMPERATURE.default)] * 4


def test_methods_refuse_unknown_settings(model):
    for method in (model.generate, model.stream, model.generate_batch, model.conversation().say):
        with pytest.raises(TypeError, match=rf"\.{method.__name__}\(\) got .* 'max_tokens'"):
            method("the", max_tokens=3)


@pytest.mark.parametrize(
    "settings, substrings",
    [
        ({"temperature": -1.0}, ["temperature=-1.0"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"temperature": "hot"}, ["temperature='hot'"]),
        ({"top_k": 0}, ["top_k=0"]),
        ({"top_k": 2.5}, ["top_k=2.5", "integer"]),
        ({"top_p": 0.0}, ["top_p=0.0"]),
        ({"top_p": 1.5}, ["top_p=1.5"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0"]),
        ({"max_new_tokens": -1}, ["max_new_tokens=-1"]),
        ({"max_new_tokens": None}, ["max_new_tokens=None", "integer"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"seed": 2**32}, ["seed=4294967296", "below 2^32"]),
        ({"stop": "END"}, ["stop='END'", "list"]),
        ({"stop": None}, ["stop=None", "list"]),
        ({"stop": ["END", ""]}, ["stop=['END', '']", "not empty"]),
        ({"prompt": None}, ["prompt=None", "expected a text"]),
        ({"prompt": "x" * 64}, ["64 tokens", "room for 63"]),
        ({"prompt": "a\udcffb"}, ["character 2", "UTF-8"]),
    ],
)
def test_refuses_impossible_settings(model, settings, substrings):
    for method in (model.generate, model.stream):
        with pytest.raises(UserError) as error:
            method(**{"prompt": "the", "max_new_tokens": 5, **settings})
        assert all(s in str(error.value) for s in substrings), str(error.value)


def test_refuses_impossible_batches_and_chats(model):
    for prompts, samples in (("the", 1), ([], 1), (["the"], 0)):
        with pytest.raises(UserError, match=r"prompts=|samples=0"):
            model.generate_batch(prompts, samples=samples)
    with pytest.raises(UserError, match="template: the model is not from a run; give a"):
        model.chat()


def test_a_refused_turn_changes_nothing(model):
    conversation = model.conversation()
    for refused in ({"max_new_tokens": -1}, {"stop": "END"}, {"temperature": -1}):
        with pytest.raises(UserError):
            conversation.say("the", **refused)
    with pytest.raises(UserError, match="has 33 tokens, more than 32"):
        conversation.say("x" * 33)
    assert conversation._session.ids == [[256]]


def test_refuses_characters_without_a_piece(model):
    narrow = inference.TextModel(model.model, {}, spaced_tokenizer(remove_extra_whitespaces=True))
    with pytest.raises(UserError, match="cannot encode 'z', 'é'"):
        narrow.generate("a catzé")


# ---------------------------------------------------------------------- detokenizing


def test_a_stop_token_from_numpy():
    detokenizer = inference.Detokenizer(Bytes(), stop=[np.int64(98)])
    assert [detokenizer.add(byte) for byte in b"ab"] == ["a", ""] and detokenizer.is_done


def test_multibyte_characters_are_not_split():
    detokenizer = inference.Detokenizer(Bytes(), stop=["né!"])
    assert [detokenizer.add(byte) for byte in "né§né".encode()] == [
        "",
        "",
        "",
        "",
        "né§",
        "",
        "",
        "",
    ]
    assert (detokenizer.flush(), detokenizer.is_done) == ("né", False)


def test_a_character_split_between_turns_is_completed():
    detokenizer = inference.Detokenizer(Bytes(), (), [256, *b"n", "é".encode()[0]])
    assert [detokenizer.add(byte) for byte in ("é".encode()[1], *b"e!")] == ["é", "e", "!"]


def test_a_space_of_the_prompt_is_not_repeated():
    """The generated text does not start with a space if the prompt ends with a space.

    The tokenizer of this test drops a space at the end of the prompt. The first new token then
    starts with a space.
    """
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=True)
    before, new = (tokenizer.encode([text])[0].tolist() for text in ("the model ", "is"))
    for prompt, text in (("the model ", "is"), ("the model\n", "is"), ("the model", " is")):
        detokenizer = inference.Detokenizer(tokenizer, (), before, prompt)
        assert "".join([*map(detokenizer.add, new), detokenizer.flush()]) == text


@pytest.mark.parametrize("remove_extra_whitespaces", [True, False])
@pytest.mark.parametrize("text", ["ed on", " on text", "on  text", ""])
def test_a_turn_is_encoded_without_a_leading_space(remove_extra_whitespaces, text):
    tokenizer = spaced_tokenizer(remove_extra_whitespaces)
    ids = [*tokenizer.encode(["the model is"])[0], *tokenizer.encode_continuation(text)]
    assert (
        tokenizer.decode(ids)
        == "the model is" + tokenizer.decode(tokenizer.encode([f"x{text}"])[0])[1:]
    )


# ---------------------------------------------------------------------- paths


def test_selected_paths():
    model = build("pgpt", num_paths=4)
    params = {
        "trunk": {
            "path_logits": np.array([0.1, -0.3, 0.6]),
            "paths": {"dense": {"bias": np.zeros((4, 64))}},
        }
    }
    expected = np.exp([0.1, -0.3, 0.6, 0.0]) / np.exp([0.1, -0.3, 0.6, 0.0]).sum()
    np.testing.assert_allclose(path_weights(params), expected, rtol=1e-6)
    assert inference.select_paths(model, params, "best") == [2]
    assert inference.select_paths(model, params, "3, 1") == [3, 1]
    for paths in ("4", "0,0", "first", "", [-1]):
        with pytest.raises(UserError, match="distinct indices from 0 to 3"):
            inference.select_paths(model, params, paths)
    with pytest.raises(UserError, match="only pgpt has paths, this model is a gpt"):
        inference.select_paths(build("gpt"), {}, "best")


# ---------------------------------------------------------------------- commands


def test_an_architecture_that_cannot_be_decoded_can_be_trained_and_compared(
    monkeypatch, tmp_path, capsys
):
    def refuse(folder):
        raise UserError("no layer keeps a cache")

    monkeypatch.setattr(inference, "load", refuse)
    print_final_message(str(tmp_path))
    assert "(none: no layer keeps a cache)" in capsys.readouterr().out
    logged = []
    inference_cost.measure_inference(tmp_path, logged.append)
    assert logged == [f"{tmp_path.name}: inference is not measured: no layer keeps a cache"]
    assert not list(tmp_path.iterdir())


def test_an_interrupted_text_ends_its_line(generate, capsys):
    def stream():
        yield " cat"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate.print_stream("the", stream())
    assert capsys.readouterr().out == "the cat\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_model_does_not_control_the_terminal(is_terminal, generate, capsys, monkeypatch):
    """A file gets the text as it is."""
    pieces = ["\x1b[2J", "a\tü\n", "\x9b", "🙂\u200d🙂"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert generate.print_stream("", pieces) == "".join(pieces)
    shown = "\ufffd[2Ja\tü\n\ufffd🙂\u200d🙂" if is_terminal else "".join(pieces)
    assert capsys.readouterr().out == shown + "\n"
