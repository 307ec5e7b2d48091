"""Chat templates: Jinja templates that write the messages of a conversation as one text, as in
transformers.

A template gets `messages`, `add_generation_prompt`, `bos_token` and `eos_token`. The last two are
written as characters that no text contains, so that a message cannot contain them;
`examples.encode_chat` turns them into ids.
"""

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from smallgpt_jax.data import template_process
from smallgpt_jax.data.hugging_face_tokenizer import SETTINGS_FILES
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import OBJECT, read_json_or_none

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode noncharacters
MARKS = (BEGIN, END)
TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    def __init__(self, source: str):
        """Raises ValueError for a template with wrong syntax."""
        if not importlib.util.find_spec("jinja2"):
            raise UserError(f"jinja2 is not installed; run {install_command('hf')}")
        self._source = source
        self._render([], [])

    @classmethod
    @functools.cache
    def of(cls, source: str) -> "ChatTemplate":
        return cls(source)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = False) -> str:
        """Raises ValueError if the template fails."""
        return self._render(messages, [(len(messages), add_generation_prompt)])[0]

    def pieces(
        self, messages: Sequence[Mapping], add_generation_prompt: bool = False
    ) -> list[tuple[str, bool]]:
        """Returns (text, whether it is an answer). An answer is what an assistant's message adds to
        the generation prompt. Text after the last answer is left out, unless
        `add_generation_prompt` asks for another answer.

        Raises ValueError if the template does not write a longer conversation by appending to a
        shorter one.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prefixes = [prefix for i in answers for prefix in ((i, True), (i + 1, False))]
        if add_generation_prompt:
            prefixes.append((len(messages), True))
        texts = dict(zip(prefixes, self._render(messages, prefixes)))
        pieces, written = [], ""
        for i in answers:
            prompt, answered = texts[i, True], texts[i + 1, False]
            if (
                not prompt.startswith(written)
                or not answered.startswith(prompt)
                or answered == prompt
            ):
                raise ValueError(
                    f"message {i + 1} is not appended to the generation prompt before it"
                )
            pieces += [(prompt[len(written) :], False), (answered[len(prompt) :], True)]
            written = answered
        if add_generation_prompt:
            prompt = texts[len(messages), True]
            if not prompt.startswith(written):
                raise ValueError("the last message is not appended to the text before it")
            pieces.append((prompt[len(written) :], False))
        return pieces

    def _render(
        self, messages: Sequence[Mapping], prefixes: Sequence[tuple[int, bool]]
    ) -> list[str]:
        """Returns one text per prefix of the conversation; see `template_process.render`."""
        try:
            conversation = json.dumps([*messages], ensure_ascii=False, default=str)
        except RecursionError:
            raise ValueError("the messages are nested too deeply") from None
        if any(mark in conversation for mark in MARKS):
            raise ValueError("a message contains U+FDD0 or U+FDD1, which stand for special tokens")
        return template_process.render(
            self._source, conversation, prefixes, {"bos_token": BEGIN, "eos_token": END}
        )


def find_template(field: str, tokenizer_folder: Path) -> str:
    """Returns the template in the file `field`, config.data.chat_template; if it is "", that of the
    tokenizer.
    """
    if field:
        try:
            return checked(
                Path(field).expanduser().read_text(), f"config.data.chat_template={field!r}"
            )
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"config.data.chat_template={field!r}: cannot be read ({short_reason(error)}); "
                "expected a file with a Jinja template"
            ) from None
    if own := own_template(tokenizer_folder):
        return checked(own, f"{tokenizer_folder}: chat template")
    raise UserError(
        f"config.data.chat_template: the tokenizer has no chat template (neither {TEMPLATE_FILE} "
        f"nor a chat_template in {SETTINGS_FILES[0]}); name a file with a Jinja template"
    )


def own_template(tokenizer_folder: Path) -> str:
    """Returns the template of the tokenizer, as transformers finds it, or ""."""
    if (own := tokenizer_folder / TEMPLATE_FILE).is_file():
        try:
            return own.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{own}: cannot be read ({short_reason(error)}); restore or delete it"
            ) from None
    found = (read_json_or_none(tokenizer_folder / SETTINGS_FILES[0], OBJECT) or {}).get(
        "chat_template"
    )
    if isinstance(found, list):  # several templates, by name
        found = next(
            (
                entry.get("template")
                for entry in found
                if isinstance(entry, dict) and entry.get("name") == "default"
            ),
            None,
        )
    return found if isinstance(found, str) else ""


def save_template(source: str, tokenizer_folder: Path) -> None:
    if (
        source and own_template(tokenizer_folder) != source
    ):  # else the folder's own file may have further templates
        write_atomically(tokenizer_folder / TEMPLATE_FILE, source)


def checked(source: str, where: str) -> str:
    try:
        ChatTemplate.of(source)
    except ValueError as error:
        raise UserError(f"{where}: not a Jinja template ({error}); correct it") from None
    return source
