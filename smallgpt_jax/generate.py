"""Writes text with a trained model.

    python -m smallgpt_jax.generate --workdir=runs/pgpt --prompt="def main("
    python -m smallgpt_jax.generate --workdir=runs/pgpt --interactive

Several prompts (give --prompt several times) or --samples are written at once and shown when done;
a single text is shown as it comes. Beyond the model's context, the older half of it is forgotten.
"""

import sys

from absl import flags

from smallgpt_jax import cli, inference
from smallgpt_jax.errors import UserError

NEW_TOKENS = 200

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
_PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "Text to continue; may be given several times. Without it: a new document.")
_INTERACTIVE = flags.DEFINE_bool("interactive", False, "Write in turns: you a line, the model its answer.")
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", None, f"Tokens to write at most. If unset: {NEW_TOKENS}; an answer of --interactive has no more "
    "than a quarter of the context.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Texts to write for each prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "How freely to choose; 0: the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Choose among this many likeliest tokens; all if unset.")
_TOP_P = flags.DEFINE_float("top_p", None, "Choose among the likeliest that have this probability together.")
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", None, "Above 1: tokens that the text already has become less likely.")
_STOP = flags.DEFINE_multi_string("stop", [], "End before this string; may be given several times.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the random choices.", lower_bound=0, upper_bound=2**32 - 1)
_PATHS = flags.DEFINE_string("paths", "all", "Of a pgpt: all, best (the heaviest), or numbers: 0,1.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; the newest if unset.")
flags.mark_flag_as_required("workdir")


def main() -> None:
    prompts = _PROMPT.value
    if prompts is not None and "" in prompts:
        raise UserError("--prompt is empty; leave it out to begin a new document")
    model = inference.load(_WORKDIR.value, _STEP.value, _PATHS.value)
    new_tokens = _MAX_NEW_TOKENS.value
    if new_tokens is None:
        quarter = max(1, model.model.config.context_length // 4)
        new_tokens = min(NEW_TOKENS, quarter) if _INTERACTIVE.value else NEW_TOKENS
    settings = dict(
        max_new_tokens=new_tokens, temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value,
        repetition_penalty=_REPETITION_PENALTY.value, stop=_STOP.value)
    if _INTERACTIVE.value:
        if prompts or _SAMPLES.value != 1:
            raise UserError("--interactive asks for its prompts one by one; leave out --prompt and --samples")
        converse(model.conversation(_SEED.value), settings)
    elif len(prompts or ()) > 1 or _SAMPLES.value != 1:
        texts = model.generate_batch(prompts or [""], samples=_SAMPLES.value, seed=_SEED.value, **settings)
        for prompt, continuations in zip(prompts or [""], texts):
            for i, text in enumerate(continuations):
                print(f"=== {prompt!r}, sample {i}\n{prompt}{text}")
    else:
        prompt = prompts[0] if prompts else ""
        show(prompt, model.stream(prompt, seed=_SEED.value, **settings))


def show(prompt: str, pieces) -> str:
    """Prints a text as it comes, and ends its line, also when stopped; returns the text."""
    print(prompt, end="", flush=True)
    text = prompt
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
    finally:
        print(flush=True)
    return text


def converse(conversation: inference.Conversation, settings: dict) -> None:
    """Turns until the input ends (Ctrl-D); what the user writes is a line of its own in the text."""
    if sys.stdin.isatty():
        print("You write a line, the model goes on (--max_new_tokens); Ctrl-D ends. It sees all that was "
              "written before, as far as its context reaches.", flush=True)
    forgotten, line_end = 0, ""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt) as end:
            if sys.stdin.isatty():
                print(flush=True)
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        try:
            answer = show("", conversation.say(f"{line_end}{line}\n", **settings))
            line_end = "" if answer.endswith("\n") else "\n"
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        if new := conversation.forgotten - forgotten:
            print(f"(the context is full: the oldest {new} tokens are forgotten)", file=sys.stderr)
            forgotten += new


if __name__ == "__main__":
    cli.run(main)
