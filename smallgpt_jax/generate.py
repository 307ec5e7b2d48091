"""Generates text with a trained model.

    python -m smallgpt_jax.generate --workdir=runs/pgpt --prompt="def main("
    python -m smallgpt_jax.generate --workdir=runs/pgpt --interactive
    python -m smallgpt_jax.generate --workdir=runs/tuned --chat

Repeat --prompt for several prompts. Several texts are generated as one batch and printed when all
are finished; a single text is printed while it is generated. When the model's context is full, its
older half is dropped. A prompt that does not fit into the context is refused, and so is a line of
--interactive with more tokens than half the context.
"""

import re
import sys

from absl import flags

from smallgpt_jax import cli, inference
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference.sampling import TEMPERATURE
from smallgpt_jax.inference.text_model import NEW_TOKENS

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "Text to continue; repeatable. By default, the model begins a new document."
)
_INTERACTIVE = flags.DEFINE_bool(
    "interactive", False, "Let the model continue the conversation after each input line."
)
_CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "Like --interactive, but each line is a message of the user, and the model's "
    "chat template writes the conversation.",
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens",
    None,
    f"Maximum number of new tokens. Default: {NEW_TOKENS}; with --interactive and --chat, "
    "the default is at most a quarter of the context.",
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Texts per prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", TEMPERATURE, "Sampling temperature; 0: greedy.")
_TOP_K = flags.DEFINE_integer(
    "top_k", None, "Sample only from the top_k most likely tokens. Default: all."
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    None,
    "Sample only from the smallest set of most likely tokens whose total probability is at least "
    "top_p.",
)
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty",
    None,
    "Values above 1 make tokens that are in the context less likely. Default: no penalty.",
)
_STOP = flags.DEFINE_multi_string("stop", [], "End the text before this string; repeatable.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed.", lower_bound=0, upper_bound=2**32 - 1)
_PATHS = flags.DEFINE_string(
    "paths",
    "all",
    "If the model is a pgpt, the paths to use: all, best (the path with the largest weight), or "
    "indices such as 0,1.",
)
_SKIP_BLOCKS = flags.DEFINE_list(
    "skip_blocks", [], "Numbers of blocks to leave out, such as 3,4; see docs/inside.md."
)
_STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint to load. Default: the newest.")
flags.mark_flag_as_required("workdir")


def main() -> None:
    if "" in (_PROMPT.value or ()):
        raise UserError("--prompt: is empty; leave it out to begin a new document")
    has_texts = bool(_PROMPT.value) or _SAMPLES.value != 1
    _require_one_form(_CHAT.value, _INTERACTIVE.value, has_texts)
    model = inference.load(
        _WORKDIR.value, _STEP.value, _PATHS.value, _TRUST.value, _SKIP_BLOCKS.value
    )
    settings = dict(
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        repetition_penalty=_REPETITION_PENALTY.value,
        stop=_STOP.value,
    )
    if _MAX_NEW_TOKENS.value is not None:
        settings["max_new_tokens"] = _MAX_NEW_TOKENS.value
    prompts, seed = _PROMPT.value or [""], _SEED.value
    if _CHAT.value:
        chat(model.chat(seed=seed), settings, as_messages=True)
    elif _INTERACTIVE.value:
        chat(model.conversation(seed), settings)
    elif len(prompts) > 1 or _SAMPLES.value != 1:
        texts = model.generate_batch(prompts, samples=_SAMPLES.value, seed=seed, **settings)
        for prompt, continuations in zip(prompts, texts):
            for i, text in enumerate(continuations):
                print(_as_shown(f"=== {prompt!r}, sample {i}\n{prompt}{text}"))
    else:
        print_stream(prompts[0], model.stream(prompts[0], seed=seed, **settings))


def _require_one_form(is_chat: bool, is_interactive: bool, has_texts: bool) -> None:
    if is_chat + is_interactive + has_texts > 1:
        flag = "--chat" if is_chat else "--interactive"
        raise UserError(
            f"{flag}: cannot be combined with --prompt, --samples or the other of "
            "--interactive and --chat; omit them"
        )


def print_stream(prompt: str, pieces) -> str:
    """Ends the output with a newline, even if generation is interrupted."""
    print(_as_shown(prompt), end="", flush=True)
    text = prompt
    try:
        for piece in pieces:
            print(_as_shown(piece), end="", flush=True)
            text += piece
    finally:
        print(flush=True)
    return text


def _as_shown(text: str) -> str:
    # On a terminal, replaces control codes, which a model of somebody else may have learned.
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def chat(conversation, settings: dict, as_messages: bool = False) -> None:
    """With `as_messages`, a line is a message of its own, without a newline at its end."""
    if sys.stdin.isatty():
        print(
            "Enter a line; the model continues the conversation by up to --max_new_tokens tokens. "
            "Press Ctrl-D to exit. Earlier turns stay in the context until it is full.",
            flush=True,
        )
    dropped, line_end = 0, ""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt) as end:
            if sys.stdin.isatty():
                print(flush=True)
            if isinstance(end, KeyboardInterrupt):  # for the exit status of Ctrl-C
                raise
            return
        # a refused line, such as one that is too long, does not end the conversation
        try:
            answer = print_stream(
                "", conversation.say(line if as_messages else f"{line_end}{line}\n", **settings)
            )
            line_end = "" if answer.endswith("\n") else "\n"
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        if new := conversation.dropped - dropped:
            print(f"(the context was full; the oldest {new} tokens were dropped)", file=sys.stderr)
            dropped += new


if __name__ == "__main__":
    cli.run(main)
