"""Measures of answers to a file of examples, and chats."""

import itertools
import json
import math

import jax
import numpy as np
import pytest
from conftest import build, forward, init

from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.questions import find_labels, label_bits, read_questions
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.evaluation import evaluate
from smallgpt_jax.evaluation.example_file import ExampleFile
from smallgpt_jax.evaluation.questions import (
    exact_match,
    generate_answers,
    rouge_l,
    score_labels,
)
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.inference import build_text_model


def silent(*_):
    pass


@pytest.fixture(scope="module")
def model():
    model = build("gpt", num_layers=1, d_model=16, num_heads=2, vocab_size=257, context_length=32)
    params = init(model)
    times_V = np.where(
        np.arange(257) == 256, 100, 1
    )  # the likelihood of the end varies more than that of letters
    return model, {**params, "head": params["head"] * times_V[:, None].astype(np.float32)}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [
    {"prompt": f"question {i}", "completion": answer}
    for i, answer in enumerate([" yes", " no", " no", " maybe"])
]


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    def subsequences(words):
        return {
            chosen
            for count in range(len(words) + 1)
            for chosen in itertools.combinations(words, count)
        }

    rng, words = np.random.default_rng(0), ["the", "The", "cat", "sat,", "on", "mat-2", "é", "!"]
    for _ in range(20):
        texts = [" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(2)]
        one, other = (
            tuple(
                text.lower()
                .replace("-", " ")
                .replace(",", "")
                .replace("é", "")
                .replace("!", "")
                .split()
            )
            for text in texts
        )
        common = max(map(len, subsequences(one) & subsequences(other)))
        expected = 2 * common / (len(one) + len(other)) if common else 0.0
        assert rouge_l(*texts) == pytest.approx(expected)


def test_the_label_with_the_highest_likelihood_is_chosen(model, tmp_path):
    """The likelihoods are computed from whole logits, one text at a time. The labels differ
    little.
    """
    rows = [
        {"prompt": f"question {i}", "completion": f" {letter}"}
        for i, letter in enumerate("hgfedcbah")
    ]
    questions = read_questions(
        write(tmp_path / "a.jsonl", rows), Bytes(), "completion", "", 32, None
    )
    labels = find_labels(questions)
    assert labels == [f" {letter}" for letter in "abcdefgh"]

    def likelihood(prompt, label):
        tokens = np.array([256, *prompt.encode(), *label.encode(), 256])
        logits = np.asarray(forward(*model, tokens[None, :-1]), np.float64)[0]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return log_p[np.arange(len(tokens) - 1), tokens[1:]][len(prompt.encode()) :].sum()

    scorer = Scorer(*model, devices=jax.devices()[:1])
    scores = score_labels(scorer, Bytes(), questions, labels, silent)
    expected = [[likelihood(row["prompt"], label) for label in labels] for row in rows]
    assert scores == pytest.approx(np.array(expected), rel=1e-4)
    bits = -np.array(expected) / np.log(2) / 2  # a label has two bytes
    for row, of_question, of_labels in zip(rows, label_bits(scores, questions, labels), bits):
        right = labels.index(row["completion"])
        assert of_question.right == pytest.approx(of_labels[right], rel=1e-4)
        margin = np.delete(of_labels, right).min() - of_labels[right]
        assert of_question.margin == pytest.approx(margin, rel=1e-3)


@pytest.mark.slow
def test_generated_answers_are_those_of_generate(model, tmp_path):
    questions = read_questions(write(tmp_path / "a.jsonl", ROWS), Bytes(), "completion", "", 32, 2)
    text_model = build_text_model(*model, Bytes())
    assert generate_answers(text_model, questions, 4, silent) == [
        text_model.generate(row["prompt"], 4, temperature=0) for row in ROWS[:2]
    ]
    assert [exact_match(" yes\n", text) for text in ("yes", "yes.")] == [1.0, 0.0]


def test_answers_end_where_the_template_ends_a_text(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token if m.role == 'assistant' "
        "}}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
    )
    rows = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]}
        for answer in ("yes", "no", "yes", "no")
    ]
    read = [
        read_questions(write(tmp_path / "a.jsonl", rows), Bytes(), "messages", template, 64, limit)
        for limit in (None, 3, 0.5)
    ]
    assert [[question.answer for question in questions] for questions in read] == [
        ["yes", "no", "yes", "no"],
        ["yes", "no", "yes"],
        ["yes", "no"],
    ]
    assert read[0][0].text == "user:xassistant:" and find_labels(read[0]) == ["no", "yes"]


def test_bad_files_are_refused(tmp_path):
    def read(rows):
        return read_questions(
            write(tmp_path / "a.jsonl", rows), Bytes(), "completion", "", 32, None
        )

    with pytest.raises(UserError, match=r"a.jsonl, line 1: the prompt has 41 tokens"):
        read([{"prompt": "p" * 40, "completion": "a"}])
    # The command has no field of the config that would skip the line.
    no_string = r"a.jsonl, line 1: no string in the field 'completion'.*; correct the line$"
    for row in ({"prompt": "a"}, {"prompt": "a", "completion": ["b"]}):
        with pytest.raises(UserError, match=no_string):
            read([row])
    with pytest.raises(UserError, match=r"has 1 different answers; name the labels"):
        find_labels(read(ROWS[:1]))


@pytest.mark.parametrize("name", ["none.jsonl", "none/", "none.txt"])
def test_a_missing_file_is_named_by_its_flag(name, tmp_path):
    path = f"{tmp_path}/{name}"
    with pytest.raises(UserError, match=f"^--examples='{path}': no such file$"):
        read_questions(path, Bytes(), "completion", "", 32, None)


def test_examples_that_are_not_utf8(tmp_path):
    """No advice on fields of a run's text, which `evaluate` has not."""
    path = tmp_path / "a.jsonl"
    for content, message in {
        b'{"prompt": "caf\xe9", "completion": "a"}\n': "byte 15 (line 1); convert the file",
        b'{"prompt": "\\ud800", "completion": "a"}\n': "character 0; correct the text",
    }.items():
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_questions(str(path), Bytes(), "completion", "", 32, None)
        assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"labels": ["yes", "no"]}, "--label: is for --metrics=accuracy"),
        ({"labels": ["yes"], "metrics": ["accuracy"]}, "at least two different labels"),
    ],
)
def test_refuses_labels_that_would_not_count(fields, message, tmp_path):
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path, ExampleFile(tmp_path / "a.jsonl", **fields))


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan])
def test_refuses_limits(limit, tmp_path):
    with pytest.raises(UserError, match="must be a finite number above 0"):
        evaluate(tmp_path, "copa", limit=limit)


def test_a_chat_continues_what_the_template_writes(model):
    template = (
        "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A'}[m.role] }}:{{ m.content }}"
        "{{ ';' if m.role == 'assistant' }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
    )
    text_model, settings = build_text_model(*model, Bytes()), dict(max_new_tokens=3, temperature=0)
    chat = text_model.chat(ChatTemplate(template))
    first = "".join(chat.say("x", **settings))
    assert first == text_model.generate("U:xA:", **settings)
    second = "".join(chat.say("y", **settings))
    assert second == text_model.generate(f"U:xA:{first.strip()};U:yA:", **settings)
    assert [message["content"] for message in chat.messages] == [
        "x",
        first.strip(),
        "y",
        second.strip(),
    ]
    last = f"U:yA:{second.strip()};"
    question = "z" * (
        32 - 3 - len(f"^{last}U:A:".encode())
    )  # with an answer, there is room for only one pair before
    third = "".join(chat.say(question, **settings))
    assert chat.dropped == len(f"U:xA:{first.strip()};".encode())
    assert third == text_model.generate(f"{last}U:{question}A:", **settings)
    # a maximum as long as the context leaves what fits into half of it
    longest = text_model.chat(ChatTemplate(template))
    longest.messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    longest.say("z", max_new_tokens=32)
    assert len(longest.messages) == 3 and longest.dropped == 0
    with pytest.raises(UserError, match="text: has 35 tokens with what the chat template adds"):
        chat.say("z" * 30, **settings)
