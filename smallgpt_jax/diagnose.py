"""Measures activations, attention and losses inside a trained model, with and without its blocks.

    python -m smallgpt_jax.diagnose --workdir=runs/pgpt
    python -m smallgpt_jax.diagnose --workdir=runs/moe --text=code.txt --text=poems.txt

Prints a table, and writes diagnose.json and plots to WORKDIR/diagnosis. docs/inside.md explains the
measures.
"""

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.diagnosis.diagnosis import DEEP, diagnose
from smallgpt_jax.diagnosis.windows import WINDOWS

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_STEP = flags.DEFINE_integer("step", None, "Checkpoint step. Default: the newest.")
_TEXT = flags.DEFINE_multi_string(
    "text",
    [],
    "Text file to observe the model on; repeatable. Default: the run's validation split.",
)
_WINDOWS = flags.DEFINE_integer(
    "windows", WINDOWS, "Windows of context_length tokens per text.", lower_bound=1
)
_DEEP = flags.DEFINE_integer(
    "deep",
    DEEP,
    "Blocks of the untrained model whose collapse without skip connections is measured; 0: none.",
    lower_bound=0,
)
flags.mark_flag_as_required("workdir")


def main() -> None:
    diagnosis = diagnose(
        _WORKDIR.value,
        _TEXT.value,
        step=_STEP.value,
        windows=_WINDOWS.value,
        deep=_DEEP.value,
        trust_custom_code=_TRUST.value,
    )
    print(f"{diagnosis.table}\n\n{diagnosis.folder}")


if __name__ == "__main__":
    cli.run(main)
