"""Chat templates: Jinja templates that write the messages of a conversation as one text, as in
transformers.

A template gets `messages`, `add_generation_prompt`, and the names of special tokens as `bos_token`,
`eos_token` and so on. What it writes is encoded by `Tokenizer.encode_chat`.
"""

import json
import os.path
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data import template_process
from smallgpt_jax.data.hugging_face_tokenizer import SETTINGS_FILES
from smallgpt_jax.data.special_tokens import SpecialTokens
from smallgpt_jax.data.template_process import CONTENT, Rendering
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.bounded import read_bounded
from smallgpt_jax.storage.json_files import OBJECT, read_json_or_none

TEMPLATE_FILE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 2**20
# The names of a message's reasoning; transformers fills in the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Answer(NamedTuple):
    """What the model writes after the generation prompt."""

    before: str  # what the template writes before the content, such as a space
    content: str
    end: str  # such as "<|im_end|>": up to the first special token, if there is one

    @property
    def text(self) -> str:
        return self.before + self.content + self.end


class ChatTemplate:
    def __init__(self, source: str, special_tokens: SpecialTokens = SpecialTokens()):  # noqa: B008
        """Raises ValueError for a template with wrong syntax."""
        self.source, self.special_tokens = source, special_tokens
        self._render([], [])  # compiles it

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = False) -> str:
        """Raises ValueError if the template fails."""
        whole = Rendering(len(messages), add_generation_prompt)
        return self._render(messages, [whole])[whole]

    def pieces(
        self, messages: Sequence[Mapping], add_generation_prompt: bool = False
    ) -> list[str | Answer]:
        """Returns the answers in what the template writes for all messages, and the texts between
        them. Text after the last answer is left out, unless `add_generation_prompt` asks for
        another answer.

        To find an answer, the template also writes the conversation with another content in its
        place. Raises ValueError if the rest of the text then differs, or if the last answer is not
        appended to the generation prompt.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        length = len(messages) if add_generation_prompt else answers[-1] + 1
        whole = Rendering(length, add_generation_prompt)
        renderings = [whole]
        for i in answers:  # the prompt of the answer, its place in the text, and its end
            renderings += [Rendering(i, True), whole._replace(marked=i), _last_turn(i)]
        texts = self._render(messages, renderings)
        text, pieces = texts[whole], []
        end = 0  # of the pieces so far
        for i in answers:
            start, answer = self._find_answer(texts, whole, i)
            is_last = not add_generation_prompt and i == answers[-1]
            # In generation, the model gets this prompt, so it must learn from the same text.
            prompt = texts[Rendering(i, True)]
            if start < end or (is_last and not text.startswith(prompt)):
                raise ValueError(
                    f"message {i + 1} is not appended to the generation prompt before it"
                )
            pieces += [text[end:start], answer]
            end = start + len(answer.text)
        return [*pieces, text[end:]] if add_generation_prompt else pieces

    def _find_answer(
        self, texts: Mapping[Rendering, str], whole: Rendering, i: int
    ) -> tuple[int, Answer]:
        """Returns where the answer in message `i` begins in the text, and the answer."""
        text, prompt = texts[whole], texts[Rendering(i, True)]
        marked = texts[whole._replace(marked=i)]
        before, mark, after = marked.partition(CONTENT)
        if not mark or not text.endswith(after):
            raise ValueError(f"message {i + 1} is not written as it is, in one place")
        content_end = len(text) - len(after)
        up_to_end = text[:content_end]
        # The content begins where the two texts part, the answer right after the generation prompt.
        # The model also learns what the template writes in between, such as an empty reasoning.
        content_start = len(os.path.commonprefix([up_to_end, before]))  # noqa: RUF071 (of characters)
        start = len(prompt) if up_to_end.startswith(prompt) else content_start
        # The last turn shows how a turn ends. Some templates end earlier turns in another way.
        ending = self._ending(texts[_last_turn(i)])
        return start, Answer(
            before=text[start:content_start],
            content=text[max(start, content_start) : content_end],
            end=ending if after.startswith(ending) else "",
        )

    def _ending(self, marked_turn: str) -> str:
        return self.special_tokens.up_to_first(marked_turn.rpartition(CONTENT)[2])

    @cached_property
    def end_of_turn(self) -> int | None:
        """Returns the special token that the template writes after an answer, or None."""
        messages = [{"role": role, "content": "text"} for role in ("user", "assistant")]
        turn = _last_turn(1)
        try:
            ending = self._ending(self._render(messages, [turn])[turn])
        except ValueError:  # it needs other messages
            return None
        ids = self.special_tokens.ids
        names = [name for name in self.special_tokens.split(ending) if name in ids]
        return ids[names[0]] if names else None

    def _render(
        self, messages: Sequence[Mapping], renderings: Sequence[Rendering]
    ) -> dict[Rendering, str]:
        messages = list(map(_as_in_transformers, messages))
        try:
            conversation = json.dumps(messages, ensure_ascii=False, default=str)
        except RecursionError:
            raise ValueError("the messages are nested too deeply") from None
        if CONTENT in conversation:
            raise ValueError("a message contains U+FDD0, which marks answers; remove it")
        texts = template_process.render(
            self.source, conversation, renderings, self.special_tokens.variables
        )
        return dict(zip(renderings, texts))


def _last_turn(i: int) -> Rendering:
    return Rendering(i + 1, False, marked=i)


def _as_in_transformers(message: Mapping) -> dict:
    """Drops empty fields, and names the reasoning as transformers and as other libraries do."""
    message = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def find_template(field: str, tokenizer_folder: Path) -> str:
    """Returns the template in the file `field`, config.data.chat_template, or the tokenizer's."""
    if field:
        where = f"config.data.chat_template={field!r}"
        return _checked(_read_template(Path(field).expanduser(), where), where)
    if source := own_template(tokenizer_folder):
        return _checked(source, f"{tokenizer_folder}: chat template")
    raise UserError(
        f"config.data.chat_template: the tokenizer has no chat template (neither {TEMPLATE_FILE} "
        f"nor a chat_template in {SETTINGS_FILES[0]}); name a file with a Jinja template"
    )


def own_template(tokenizer_folder: Path) -> str:
    """Returns the template of the tokenizer, as transformers finds it, or ""."""
    path = tokenizer_folder / TEMPLATE_FILE
    if path.is_file():
        return _read_template(path, str(path))
    settings = read_json_or_none(tokenizer_folder / SETTINGS_FILES[0], OBJECT) or {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = [entry for entry in template if isinstance(entry, dict)]
        defaults = [entry.get("template") for entry in named if entry.get("name") == "default"]
        template = defaults[0] if defaults else ""
    return template if isinstance(template, str) else ""


def _read_template(path: Path, where: str) -> str:
    try:
        text = read_bounded(path, _MAX_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: it is too large, or not UTF-8
        raise UserError(
            f"{where}: cannot be read ({short_reason(error)}); expected a file with a Jinja template"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def save_template(source: str, tokenizer_folder: Path) -> None:
    # The folder's own settings may have further templates, which a file would hide.
    if source and own_template(tokenizer_folder) != source:
        write_atomically(tokenizer_folder / TEMPLATE_FILE, source)


def _checked(source: str, where: str) -> str:
    try:
        ChatTemplate(source)
    except ValueError as error:
        raise UserError(f"{where}: not a Jinja template ({error}); correct it") from None
    return source
