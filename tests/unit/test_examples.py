"""Examples for fine-tuning, from JSON lines to rows with a mask. Tokens are bytes, so masks can be
counted by hand.
"""

import json

import jax
import numpy as np
import pytest
from data_helpers import files_of, prepare_store

from smallgpt_jax.data import batches, corpus, parts
from smallgpt_jax.data.chat_template import own_template
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.prompts import with_begin
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.objectives.objective import Examples, Objective, Outputs
from smallgpt_jax.training.messages import validation_messages

END = 256  # of the byte tokenizer; also the beginning
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("user", "assistant") %}{{ raise_exception("no role " + message.role) }}{% endif %}
{{- "U:" if message.role == "user" else "A:" }}{{ message.content }}{% if message.role == "assistant" %}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}A:{% endif %}"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def completions(count):
    return [{"prompt": f"q{i}" + "?" * (i % 7), "completion": f" a{i}"} for i in range(count)]


def documents_of(store):
    """Returns (text without marks, counted targets) of each training document; the end is written
    as a newline.
    """
    found = []
    for start, length in zip(store.train.starts, store.train.lengths):
        ids, counted = (
            store.train.stream[start : start + length],
            store.train.counted[start : start + length],
        )
        targets = [*ids[1:].tolist(), END]  # the next document begins with END
        assert ids[0] == END
        found.append(
            tuple(
                "".join("\n" if i == END else chr(i) for i in chosen)
                for chosen in (ids[1:], np.array(targets)[counted])
            )
        )
    return found


def test_the_loss_counts_completions_and_their_ends(tmp_path):
    store = prepare_store(
        tmp_path / "store", write(tmp_path / "a.jsonl", completions(40)), format="completion"
    )
    found = documents_of(store)
    assert len(found) + store.validation.documents == 40
    for text, counted in found:
        number = int(text.partition(" a")[2])
        assert (text, counted) == (
            f"q{number}" + "?" * (number % 7) + f" a{number}",
            f" a{number}\n",
        )


def test_the_loss_counts_all_answers_of_a_conversation(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"x{i}"},
                {"role": "assistant", "content": f"y{i}"},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": "z"},
                {"role": "user", "content": "unanswered"},
            ]
        }
        for i in range(30)
    ]
    store = prepare_store(
        tmp_path / "store",
        write(tmp_path / "a.jsonl", rows),
        format="messages",
        chat_template=str(tmp_path / "chat.jinja"),
    )
    for text, counted in documents_of(store):
        number = text[3 : text.index("A:")]
        assert (text, counted) == (f"U:x{number}A:y{number}\nU:moreA:z", f"y{number}\nz\n")


def test_rows_contain_whole_examples_and_their_masks(tmp_path):
    store = prepare_store(
        tmp_path / "store", write(tmp_path / "a.jsonl", completions(50)), format="completion"
    )
    packed = corpus.Corpus((store,), (1.0,)).pack("train", "best_fit", True, 33)
    batch = packed.read_rows(np.arange(packed.num_rows))
    counted = []
    for tokens, segments, mask, targets in zip(*batch[:4]):
        for number in range(1, segments.max() + 1):
            ids = tokens[:-1][segments == number]
            assert ids[0] == END
            counted.append(
                (bytes(ids[1:].tolist()).decode(), targets[(segments == number) & mask].tolist())
            )
        assert not mask[segments == 0].any()
    assert sorted(counted) == sorted(
        (text, [*completion.rstrip("\n").encode(), END]) for text, completion in documents_of(store)
    )
    with pytest.raises(UserError, match=r"config.data.packing='concat': cuts examples"):
        corpus.Corpus((store,), (1.0,)).pack("train", "concat", True, 33)


def test_prompts_have_no_gradient(tmp_path):
    store = prepare_store(
        tmp_path / "store", write(tmp_path / "a.jsonl", completions(50)), format="completion"
    )
    batch = (
        corpus.Corpus((store,), (1.0,)).pack("train", "best_fit", True, 32).read_rows(np.arange(2))
    )
    rng = np.random.default_rng(0)
    x_BxTxW, head_VxW = (np.float32(rng.standard_normal(shape)) for shape in ((2, 32, 4), (257, 4)))

    @jax.jit
    def gradients(targets_BxT):
        examples = Examples(batch._replace(targets_BxT=targets_BxT))
        return jax.grad(
            lambda x_BxTxW, head_VxW: Objective().cross_entropy(
                Outputs(x_BxTxW, head_VxW, head_VxW, {}),
                examples,
                examples.weights(examples.num_targets),
            ),
            (0, 1),
        )(x_BxTxW, head_VxW)

    def equal(one, other):
        return all(map(np.array_equal, one, other))

    other = rng.integers(0, 257, batch.targets_BxT.shape, np.int32)
    right = gradients(batch.targets_BxT)
    assert equal(gradients(np.where(batch.loss_mask_BxT, batch.targets_BxT, other)), right)
    assert not equal(gradients(np.where(batch.loss_mask_BxT, other, batch.targets_BxT)), right)
    assert np.array_equal(np.any(right[0], axis=2), batch.loss_mask_BxT)


def test_an_interrupted_preparation_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 50)
    lines = [json.dumps(row) + "\n" for row in completions(60)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(lines))
    expected = files_of(prepare_store(tmp_path / "whole", source, format="completion").folder)
    source.write_text("".join([*lines[:40], '{"prompt": "no answer"}\n', *lines[41:]]))
    with pytest.raises(UserError, match=r"a.jsonl, line 41: no string in the field 'completion'"):
        prepare_store(tmp_path / "store", source, format="completion")
    assert (tmp_path / "store.partial" / "train.counted.bin").stat().st_size > 0
    source.write_text("".join(lines))
    messages = []
    assert (
        files_of(
            prepare_store(
                tmp_path / "store", source, format="completion", log=messages.append
            ).folder
        )
        == expected
    )
    assert any("resuming" in message for message in messages)


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize(
    "fields, row, expected",
    [
        (
            {},
            {"completion": "b"},
            "line 3: no string in the field 'prompt': the item's fields are named completion",
        ),
        ({}, {"prompt": "a", "completion": ""}, "line 3: the field 'completion' is empty"),
        ({}, {"prompt": "a", "completion": 3}, "line 3: no string in the field 'completion'"),
        (
            {"format": "messages"},
            {"prompt": "a"},
            "line 3: the field 'messages' is not a list of messages",
        ),
        (
            {"format": "messages"},
            chat(("user", "a")),
            "line 3: the field 'messages' has no message of the assistant",
        ),
        (
            {"format": "messages"},
            chat(("user", "a"), ("assistant", "")),
            "has an empty answer (message 2)",
        ),
        (
            {"format": "messages"},
            {"messages": [{"role": "user"}]},
            "has a message without a text as its content",
        ),
        (
            {"format": "messages"},
            chat(("robot", "a"), ("assistant", "b")),
            "line 3: the chat template fails for the field 'messages': no role robot",
        ),
        (
            {"format": "messages"},
            chat(("user", "\ufdd0"), ("assistant", "b")),
            "which marks answers",
        ),
    ],
)
def test_bad_rows_name_file_line_and_field(tmp_path, fields, row, expected):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    fields = {"format": "completion", **fields}
    if fields["format"] == "messages":
        fields["chat_template"] = str(tmp_path / "chat.jinja")
    good = {**completions(1)[0], **chat(("user", "q"), ("assistant", "a"))}
    source = write(tmp_path / "a.jsonl", [good, good, row])
    with pytest.raises(UserError) as error:
        prepare_store(tmp_path / "store", source, **fields)
    assert f"{source}, line 3: " in str(error.value) and expected in str(error.value)


def test_half_a_surrogate_pair_in_a_conversation(tmp_path):
    """In a content, it is replaced; what the template writes of other fields is refused."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{{ m.name }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fields = dict(format="messages", chat_template=str(tmp_path / "chat.jinja"))
    rows = [chat(("user", f"q{i}"), ("assistant", f"a{i}\ud800")) for i in range(20)]
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="line 1: half a surrogate pair: character 2"):
        prepare_store(tmp_path / "refused", source, **fields)
    store = prepare_store(tmp_path / "store", source, invalid_utf8="replace", **fields)
    replaced = "\ufffd".encode().decode("latin-1")  # its bytes
    assert all(counted.endswith(f"{replaced};\n") for _, counted in documents_of(store))
    rows[10]["messages"][0]["name"] = "\udfff"
    source = write(tmp_path / "b.jsonl", rows)
    with pytest.raises(UserError, match="line 11: half a surrogate pair: outside the contents"):
        prepare_store(tmp_path / "other", source, invalid_utf8="replace", **fields)
    settings = dict(invalid_utf8="replace", invalid_items="skip", **fields)
    store = prepare_store(tmp_path / "skipped", source, **settings)
    assert store.metadata["skipped"] == {"half a surrogate pair": 1}


def test_long_examples_are_refused_or_left_out(tmp_path):
    rows = completions(30)
    rows[20]["prompt"] = "p" * 50
    source = write(tmp_path / "a.jsonl", rows)

    def check(invalid_items):
        data = DataConfig(
            source=str(source),
            store=str(tmp_path / invalid_items),
            tokenizer="bytes",
            format="completion",
            validation_fraction=0.2,
            invalid_items=invalid_items,
        )
        found = corpus.load_or_prepare(data)
        corpus.require_room(data, found, 32)
        return found

    with pytest.raises(
        UserError,
        match=r"a.jsonl, line 21: has 55 tokens, more than the config.model.context_length=32, "
        r"as 1 of 30",
    ):
        check("refuse")
    kept = check("skip")
    count = kept.stores[0].validation.documents
    assert validation_messages(kept)[0].startswith(f"warning: validation: {count} examples: ")
    packed = [
        corpus.Corpus((store,), (1.0,)).pack(split, "best_fit", False, 32)
        for store in kept.stores
        for split in ("train", "validation")
    ]
    assert sum(
        int(packing.read_rows(np.arange(packing.num_rows)).loss_mask_BxT.sum())
        for packing in packed
    ) == sum(len(row["completion"]) + 1 for row in rows if row is not rows[20])
    with pytest.raises(UserError, match=r"; the context is too short for 1 of \d\d examples"):
        batches.train_batches(kept.pack("train", "best_fit", False, 32), 100, seed=0)


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{% if %}", "not a Jinja template"),
        ("{{ messages[-1].content }}", "is not appended to the generation prompt before it"),
        ("{{ messages[0].content + 1 }}", "the chat template fails"),
    ],
)
def test_bad_templates_are_refused(tmp_path, template, expected):
    (tmp_path / "chat.jinja").write_text(template)
    source = write(tmp_path / "a.jsonl", [chat(("user", "a"), ("assistant", "b"))])
    with pytest.raises(UserError, match=expected):
        prepare_store(
            tmp_path / "store",
            source,
            format="messages",
            chat_template=str(tmp_path / "chat.jinja"),
        )


def test_the_own_template_and_special_tokens_of_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({chr(33 + i): i for i in range(90)}, []))
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    rows = [chat(("user", f"q{i}"), ("assistant", f"a{i}")) for i in range(40)]
    store = prepare_store(
        tmp_path / "store",
        write(tmp_path / "a.jsonl", rows),
        format="messages",
        tokenizer=str(folder),
    )
    expected = {
        tuple(tokenizer.encode(f"<|start|>user:q{i}<|end|><|start|>assistant:a{i}<|end|>").ids)
        for i in range(40)
    }
    end = tokenizer.token_to_id("<|end|>")
    ours = {
        (
            *store.train.stream[start + 1 : start + length].tolist(),
            end,
        )  # the end is the next document's beginning
        for start, length in zip(store.train.starts, store.train.lengths)
    }
    assert len(ours) == store.train.documents and ours < expected
    import jinja2

    own = TokenizerSource(str(folder)).make()
    exported = jinja2.Template(with_begin(template, own)).render(
        messages=rows[0]["messages"], bos_token="<|start|>", eos_token="<|end|>"
    )
    documents = [
        store.train.stream[start : start + length].tolist()
        for start, length in zip(store.train.starts, store.train.lengths)
    ]
    assert (
        tokenizer.encode(exported).ids[:-1] in documents
    )  # begins with the end, though the bos_token is another
    assert with_begin("<|end|>" + template, own) == "<|end|>" + template
    bad = write(tmp_path / "b.jsonl", [chat(("user", "<|end|>"), ("assistant", "a"))])
    with pytest.raises(
        UserError,
        match=r"b.jsonl, line 1: a message contains a special token: <\|end\|>; remove it",
    ):
        prepare_store(tmp_path / "bad", bad, format="messages", tokenizer=str(folder))


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tools", "template": "b"},
                        {"name": "default", "template": "a"},
                    ]
                }
            ),
            "a",
        ),
        (json.dumps({"chat_template": ["a", {"name": "default"}]}), ""),
        ("{", ""),
        (json.dumps([]), ""),
    ],
)
def test_own_templates_in_the_settings_of_a_tokenizer(content, expected, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert own_template(tmp_path) == expected
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="jinja: cannot be read"):
        own_template(tmp_path)
