"""The end of a turn that a chat template writes: training counts it, generation stops there,
evaluation scores it, and exports name it.
"""

import itertools
import json

import jax
import numpy as np
import pytest
from conftest import build, init
from hugging_face_folders import byte_level, save

from smallgpt_jax.conversion import hugging_face
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.parts import Rules, Skipped
from smallgpt_jax.data.prompts import encode_example, extract_document
from smallgpt_jax.data.questions import read_questions
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.questions import (
    exact_match,
    generate_answers,
    score_labels,
)
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.inference import TrainedModel, build_text_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
MESSAGES = [
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    theirs = byte_level(more=["<|im_start|>", "<|im_end|>"])
    folder = save(tmp_path_factory.mktemp("turns") / "tokenizer", theirs, eos_token="</s>")
    return TokenizerSource(str(folder)).make()


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat(text, continues=True)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Returns a model that writes after a newline: yes<|im_end|>, a newline, and so on. Its blocks
    write nothing, so that the next token depends on the last one only.
    """
    model = build(
        "gpt",
        num_layers=1,
        d_model=128,
        num_heads=2,
        vocab_size=tokenizer.vocab_size,
        context_length=128,
    )
    params = jax.tree.map(np.zeros_like, init(model))
    chain = ids_of(tokenizer, "\nyes<|im_end|>\n")
    embedding_VxD = np.random.default_rng(0).standard_normal((tokenizer.vocab_size, 128))
    head_VxD = np.zeros_like(embedding_VxD)
    for last, following in itertools.pairwise(chain):
        head_VxD[following] += embedding_VxD[last]
    params["final_norm"]["scale"] = np.ones(128, np.float32)
    params["token_embedding"], params["head"] = np.float32(embedding_VxD), np.float32(head_VxD)
    return model, params


@pytest.fixture
def questions(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [MESSAGES[:2], MESSAGES, MESSAGES[:2]]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return read_questions(str(path), tokenizer, "messages", CHATML, 64, None)


def test_training_counts_answers_up_to_their_end(tokenizer):
    rules = Rules(
        "text",
        "refuse",
        "refuse",
        10**8,
        "messages",
        ChatTemplate(CHATML, tokenizer.special_tokens),
    )
    example = extract_document({"messages": MESSAGES}, "a", rules)
    ids, counted = encode_example(example, tokenizer)
    text = tokenizer.decode(ids.tolist())
    assert text == (
        "</s><|im_start|>user\nis it?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )
    # The next document begins with the end of this one, which counts.
    targets = np.append(ids[1:], tokenizer.end_of_text)[counted]
    assert tokenizer.decode(targets.tolist()) == "yes<|im_end|>yes<|im_end|></s>"


def test_a_message_with_a_special_token_is_refused_or_skipped(tokenizer):
    rules = {
        invalid_items: Rules(
            "text",
            "refuse",
            invalid_items,
            10**8,
            "messages",
            ChatTemplate(CHATML, tokenizer.special_tokens),
        )
        for invalid_items in ("refuse", "skip")
    }
    row = {"messages": [{"role": "user", "content": "a <|im_end|> b"}, *MESSAGES[1:]]}
    with pytest.raises(UserError, match=r"a message contains a special token: <\|im_end\|>;"):
        extract_document(row, "a", rules["refuse"])
    skipped = Skipped("a message contains a special token")
    assert extract_document(row, "a", rules["skip"]) == skipped


@pytest.mark.slow
def test_a_chat_neither_shows_nor_stores_the_end(tokenizer, model):
    chat = build_text_model(*model, tokenizer).chat(ChatTemplate(CHATML, tokenizer.special_tokens))
    for question in ("is it?", "sure?"):
        assert "".join(chat.say(question, 20, temperature=0)) == "yes"
    assert chat.messages == MESSAGES
    with pytest.raises(UserError, match=r"text: contains a special token: <\|im_start\|>"):
        chat.say("<|im_start|>")

    unread = build_text_model(*model, tokenizer).chat(chat._template)
    "".join(unread.say("is it?", temperature=0))
    unread.say("why?", temperature=0)
    unread.say("sure?", temperature=0)  # in place of the question whose answer nobody has read
    assert unread.messages == [*MESSAGES[:2], {"role": "user", "content": "sure?"}]
    unread.say("sure?", 10**6)  # the answer may be shorter: half of the context is for questions
    assert unread.messages == [*MESSAGES[:2], {"role": "user", "content": "sure?"}]
    unread.say("sure? " * 5, 10**6)
    assert unread.messages == [{"role": "user", "content": "sure? " * 5}]


@pytest.mark.slow
def test_evaluation_scores_the_end_and_stops_there(tokenizer, model, questions, monkeypatch):
    scored, score = [], Scorer.score

    def record(scorer, sequences):
        scored.extend(sequences)
        return score(scorer, sequences)

    monkeypatch.setattr(Scorer, "score", record)
    labels = ["no", "yes"]
    scores = score_labels(Scorer(*model), tokenizer, questions, labels, print)
    assert scores.argmax(axis=1).tolist() == [1] * 3
    endings = [tokenizer.decode(s.tokens[-s.scored :]) for s in scored]
    assert endings == ["no<|im_end|>", "yes<|im_end|>"] * 3
    text_model = build_text_model(*model, tokenizer)
    found = generate_answers(text_model, questions, 20, lambda *_: None)
    assert [exact_match(q.answer, text) for q, text in zip(questions, found)] == [1.0] * 3


def test_a_text_between_prompt_and_content_is_no_part_of_the_answer(tokenizer, tmp_path):
    template = CHATML.replace(
        "'\n' + m.content", "'\n' + ('<a>' if m.role != 'user' else '') + m.content"
    )
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES[:2]}) + "\n")
    (question,) = read_questions(str(path), tokenizer, "messages", template, 64, None)
    assert question.answer == "yes"
    assert tokenizer.decode(question.tokens_of("no", tokenizer)) == "<a>no<|im_end|>"


@pytest.mark.slow
def test_the_harness_gets_texts_without_the_end(tokenizer, model):
    api = pytest.importorskip("lm_eval.api.instance")
    from smallgpt_jax.evaluation.lm_eval_model import SmallGPT

    end = ChatTemplate(CHATML, tokenizer.special_tokens).end_of_turn
    settings = {"until": ["!"], "max_gen_toks": 8}
    for end_of_turn, text in ((end, "yes"), (None, "yes<|im_end|>\nyes<|im_end|>\n")):
        trained = TrainedModel(*model, {}, tokenizer, 0)
        lm = SmallGPT(Scorer(*model), trained, lambda *_: None, end_of_turn=end_of_turn)
        request = api.Instance("generate_until", {}, ("is it?\n", settings), 0)
        (found,) = lm.generate_until([request])
        assert text.startswith(found) and (end_of_turn is None or found == text)


@pytest.mark.parametrize("template, ends", [(CHATML, ["</s>", "<|im_end|>"]), ("", ["</s>"])])
def test_exports_stop_there(tokenizer, model, template, ends, tmp_path):
    pytest.importorskip("safetensors")
    hugging_face.export_folder(tmp_path, *model, tokenizer, chat_template=template)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    ids = [tokenizer.special_tokens.ids[name] for name in ends]
    assert settings["eos_token_id"] == (ids if len(ids) > 1 else ids[0])
