"""Chat templates: what they write, and where its answers are, compared with transformers."""

import datetime
import json

import pytest
from hugging_face_folders import byte_level, save

from smallgpt_jax.data.chat_template import Answer, ChatTemplate
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.data.tokenizers import Bytes

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|model|>", "<|system|>", "<|end|>"]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(message: str = "{{ m.content }}", before: str = "", prompt: str = PROMPT) -> str:
    """Returns a template of the form of ChatML; `message` writes the content of a message m."""
    turn = "<|im_start|>{{ m.role }}\n" + message + "<|im_end|>\n"
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + prompt


def roles(user: str, assistant: str, system: str = "{{ m.content }}\n", prompt: str = "") -> str:
    """Returns a template that writes the message m of each role in its own way."""
    return (
        "{% for m in messages %}{% if m.role == 'user' %}" + user + "{% elif m.role == 'assistant' "
        "%}" + assistant + "{% else %}" + system + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )


CONTENTS = {
    "as it is": "{{ m.content }}",
    "by index": "{{ m['content'] }}",
    "trim": "{{ m.content | trim }}",
    "strip": "{{ m.content.strip() }}",
    "upper": "{{ m.content | upper }}",
    "replace": "{{ m.content | replace('e', 'E') }}",
    "escape": "{{ m.content | e }}",
    "first line": "{{ m.content.split('\n')[0] }}",
    "tojson": "{{ m.content | tojson }}",
    "tojson of a message": "{{ m | tojson }}",
    "tojson with indent": "{{ {'text': m.content, 'é': [1, none]} | tojson(indent=2) }}",
    "tojson with ascii": "{{ m.content | tojson(ensure_ascii=True) }}",
    "tojson with sorted keys": "{{ m | tojson(sort_keys=True, separators=(',', ':')) }}",
    "generation": (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
    ),
    "generation with spaces": (
        "{% if m.role == 'assistant' %}\n  {% generation %}\n{{- m.content }}\n"
        "{%- endgeneration -%}\n{% else %}\n{{ m.content }}\n{%- endif %}"
    ),
    "a variable in a generation": (
        "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ m.content + x }}{% endgeneration %}"
        "{{ x }}"
    ),
    "no thoughts in earlier turns": (
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}"
        "{% endif %}"
    ),
    "reasoning": (
        "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}"
    ),
    "thinking": "{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content }}",
    "an absent field": "{{ m.content }}{{ m.tool_calls }}{{ m.name is defined }}",
    "macro": ("{% macro write(text) %}[{{ text }}]{% endmacro %}{{ write(m.content) }}"),
    "call": (
        "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}{{ m.content }}{% endcall %}"
    ),
    "default of an absent field": "{{ m.content + (m.suffix | default('!')) }}",
    "length": "{% if m.content | length > 3 %}{{ m.content }}{% else %}-{% endif %}",
    "condition": "{{ m.content if m.content is string else m.content[0].text }}",
    "eos_token after it": "{{ m.content ~ eos_token }}",
}
HEADS = {
    "tools is none": "{% if tools is none %}No tools.\n{% endif %}",
    "tools is not none": "{% if tools is not none %}Tools.\n{% endif %}",
    "tools is defined": "{% if tools is defined %}Defined.\n{% endif %}",
    "not tools": "{% if not tools %}Nothing.\n{% endif %}",
    "documents is none": "{% if documents is none %}No documents.\n{% endif %}",
    "bos_token": "{{ bos_token }}",
    "pad_token": "{{ pad_token }}",
    "unk_token": "{{ unk_token }}",
    "mask_token": "{{ mask_token }}",
    "cls_token is defined": "{{ cls_token is defined }}",
    "comparison of names": "{{ bos_token == '<s>' }} {{ eos_token | length }}\n",
    "names": "{% if sep_token %}{{ sep_token }}{% else %}none{% endif %}\n",
    "the year": "{{ strftime_now('%Y') }}\n",
    "the year, if known": (
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}\n"
    ),
    "number of messages": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}\n",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\n"
    ),
    "break": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}\n",
    "a message by default": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    ),
    "comment and raw": "{# none #}{% raw %}{{ }}{% endraw %}\n",
    "dict and items": "{% for k, v in dict(a=1, b='x').items() %}{{ k }}={{ v }};{% endfor %}\n",
    "tests and filters": (
        "{{ messages | map(attribute='role') | join(',') }} {{ messages[0] is mapping }}\n"
    ),
    "an undefined name": "{{ enable_thinking is defined }}{{ date_string }}\n",
}
OTHERS = {
    "newline at the end": chatml() + "\n",
    "lines": (
        "{% for m in messages %}\n    {% if m.role %}\n<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n"
        "<|im_start|>assistant\n{% endif %}\n"
    ),
    "prompt with thoughts": chatml(prompt=PROMPT.replace("\n{%", "\n<think>\n\n</think>\n\n{%")),
    "no prompt": chatml(prompt=""),
    "slices": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% set rest = messages[1:] "
        "%}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "brackets": roles(
        "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}",
        "{{ ' ' + m.content + ' ' + eos_token }}",
        "{{ '<<SYS>>' + m.content + '<</SYS>>' }}",
    ),
    "headers": roles(
        "<|user|>\n\n{{ m.content | trim }}<|end|>",
        "<|model|>\n\n{{ m.content | trim }}<|end|>",
        "{{ bos_token }}<|system|>\n\n{{ m.content }}<|end|>",
        "<|model|>\n\n",
    ),
    "turns": roles(
        "<|user|>\n{{ m.content }}{{ eos_token }}\n",
        "<|model|>\n{{ m.content }}{{ eos_token }}\n",
        "<|system|>\n{{ m.content }}{{ eos_token }}\n",
        "<|model|>\n",
    ),
    "plain text": roles("User: {{ m.content }}\n", "Bot: {{ m.content }}\n", prompt="Bot:"),
    "one end": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.last and "
        "m.role == 'assistant' %}{{ eos_token }}{% else %}\n{% endif %}{% endfor %}" + PROMPT
    ),
    "numbers": (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }} {{ m.role[0] | upper }}: "
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    ),
    "alternation": (
        "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 "
        "== 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
}
TEMPLATES = (
    {name: chatml(message) for name, message in CONTENTS.items()}
    | {name: chatml(before=head) for name, head in HEADS.items()}
    | OTHERS
    | {"all at once": chatml(CONTENTS["trim"], HEADS["bos_token"] + HEADS["tools is none"])}
    | {"begin and thoughts": HEADS["bos_token"] + chatml(CONTENTS["reasoning"])}
)
QUESTION = {"role": "user", "content": "Où est \"Zoë\"? <x> & 'y' 日本 🙂 \n second "}
CONVERSATIONS = [
    [QUESTION, {"role": "assistant", "content": 'At <home> & "safe"'}],
    [
        {"role": "system", "content": " Answer <b>briefly</b>."},
        QUESTION,
        {"role": "assistant", "content": "<think>hm</think>Here\n", "tool_calls": None},
        {"role": "user", "content": "Thanks", "name": None},
        {"role": "assistant", "content": "Welcome", "reasoning": "be polite"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = byte_level(more=SPECIAL)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(
        tmp_path_factory.mktemp("chat") / "tokenizer", tokenizer, pad_token="<|end|>", **named
    )


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder):
    return TokenizerSource(str(folder)).make()


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_ids_are_those_of_transformers(name, theirs, ours):
    template = ChatTemplate(TEMPLATES[name], ours.special_tokens)
    for messages in CONVERSATIONS:
        for length, prompt in ((len(messages), False), (len(messages) - 1, True)):
            expected = theirs.apply_chat_template(
                messages[:length],
                chat_template=TEMPLATES[name],
                add_generation_prompt=prompt,
                tokenize=False,
            )
            text = template.render(messages[:length], prompt)
            assert text == expected
            assert ours.encode_chat(text) == theirs(text, add_special_tokens=False).input_ids


# Templates with which an answer changes the text before it, or is not found in the text.
REFUSED = {
    "prompt with thoughts": "message 5 is not appended to the generation prompt",
    "numbers": "message 5 is not appended to the generation prompt",
    "namespace": "message 5 is not appended to the generation prompt",
    "tests and filters": "message 5 is not appended to the generation prompt",
    "length": "message 3 is not written as it is, in one place",
    "tojson with ascii": "message 3 is not written as it is, in one place",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_are_the_text(name, ours):
    """In each answer is the content of its message, and the rest of the text is between them."""
    template = ChatTemplate(TEMPLATES[name], ours.special_tokens)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            template.pieces(CONVERSATIONS[1])
        return
    for messages in CONVERSATIONS:
        pieces = template.pieces(messages)
        answers = [piece for piece in pieces if isinstance(piece, Answer)]
        text = "".join(piece.text if isinstance(piece, Answer) else piece for piece in pieces)
        rest = template.render(messages).removeprefix(text).strip()
        assert rest == ("<|im_end|>" if name == "eos_token after it" else "")
        assert len(answers) == sum(message["role"] == "assistant" for message in messages)


def answers_of(template: str, messages, tokenizer) -> list[Answer]:
    pieces = ChatTemplate(template, tokenizer.special_tokens).pieces(messages)
    assert [isinstance(piece, Answer) for piece in pieces] == [False, True] * (len(pieces) // 2)
    return pieces[1::2]


def test_answers_and_their_ends(ours):
    messages = CONVERSATIONS[1]
    cases = {
        "as it is": [("", "<think>hm</think>Here\n", "<|im_end|>"), ("", "Welcome", "<|im_end|>")],
        "trim": [("", "<think>hm</think>Here", "<|im_end|>"), ("", "Welcome", "<|im_end|>")],
        "brackets": [(" ", "<think>hm</think>Here\n", " </s>"), (" ", "Welcome", " </s>")],
        "eos_token after it": [
            ("", "<think>hm</think>Here\n", "</s>"),
            ("", "Welcome", "</s>"),
        ],
        "no thoughts in earlier turns": [
            ("", "Here\n", "<|im_end|>"),
            ("", "Welcome", "<|im_end|>"),
        ],
        "reasoning": [
            ("", "<think>hm</think>Here\n", "<|im_end|>"),
            ("<think>be polite</think>", "Welcome", "<|im_end|>"),
        ],
        "plain text": [
            (" ", "<think>hm</think>Here\n", "\n"),
            (" ", "Welcome", "\n"),
        ],
        # The end is written only after the last answer.
        "one end": [("", "<think>hm</think>Here\n", ""), ("", "Welcome", "</s>")],
    }
    for name, expected in cases.items():
        assert answers_of(TEMPLATES[name], messages, ours) == [Answer(*e) for e in expected], name


def test_a_head_that_changes_with_the_conversation(ours):
    """The head of the whole conversation is another than that of its first question."""
    first, last = answers_of(TEMPLATES["number of messages"], CONVERSATIONS[1], ours)
    assert first == Answer("", "<think>hm</think>Here\n", "<|im_end|>")
    assert last == Answer("", "Welcome", "<|im_end|>")


@pytest.mark.parametrize(
    "name, end",
    [
        ("as it is", "<|im_end|>"),
        ("headers", "<|end|>"),
        ("brackets", "</s>"),
        ("plain text", None),
        ("an undefined name", "<|im_end|>"),
    ],
)
def test_end_of_turn(name, end, ours):
    template = ChatTemplate(TEMPLATES[name], ours.special_tokens)
    assert template.end_of_turn == (ours.special_tokens.ids[end] if end else None)


def test_the_day_is_that_of_the_rendering():
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render([])
    days = [datetime.datetime.now() - datetime.timedelta(days=n) for n in range(2)]
    assert text in [day.strftime("%d %b %Y") for day in days]


def test_names_of_native_tokenizers():
    """A template sees the names that an export writes into tokenizer_config.json."""
    tokenizer = Bytes()
    template = ChatTemplate(
        "{{ bos_token }}{{ unk_token }}|{{ pad_token }}|{{ messages[0].content }}{{ eos_token }}",
        tokenizer.special_tokens,
    )
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<|endoftext|>|<|endoftext|>|hi<|endoftext|>"
    assert tokenizer.encode_chat(text) == [256, ord("|"), 256, *b"|hi", 256]


@pytest.mark.parametrize(
    "files, named",
    [
        ({}, {}),
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, {"bos_token": "<s>"}),
        ({"tokenizer_config.json": {"bos_token": None}}, {}),
        ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, {"eos_token": "</s>"}),
        (
            {
                "tokenizer_config.json": {"eos_token": "<s>", "pad_token": "<unk>"},
                "special_tokens_map.json": {"eos_token": "</s>"},
            },
            {"eos_token": "</s>", "pad_token": "<unk>"},
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<s>", "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": "</s>", "unk_token": "<unk>"},
            },
            {"eos_token": "<s>"},
        ),
    ],
)
def test_names_in_settings_files_are_those_of_transformers(files, named, tmp_path):
    save(tmp_path, byte_level())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.special_tokens_map == named
    assert TokenizerSource(str(tmp_path)).make().special_tokens.variables == named
