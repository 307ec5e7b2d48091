"""Writes text with a trained model.

    python -m smallgpt_jax.generate --workdir=runs/pgpt --prompt="def main("
"""

from absl import flags

from smallgpt_jax import cli, inference

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
_PROMPT = flags.DEFINE_string("prompt", "", "Text to continue; empty: a new document.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 200, "Tokens to write at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "How freely to choose; 0: the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Choose among this many likeliest tokens; all if unset.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the random choices.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; the newest if unset.")
flags.mark_flag_as_required("workdir")


def main() -> None:
    text_model = inference.load(_WORKDIR.value, _STEP.value)
    print(_PROMPT.value, end="", flush=True)
    for piece in inference.generate(
            text_model, _PROMPT.value, _MAX_NEW_TOKENS.value, _TEMPERATURE.value, _TOP_K.value,
            _SEED.value):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    cli.run(main)
