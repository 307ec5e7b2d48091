"""Checks random model configs, as tests/integration/test_random_models.py does, but any number of
them.

    python benchmarks/check_models.py --count=1000

Each model takes about two seconds. Prints the config of each model that fails, and why. The exit
status is 1 if a model fails. Needs the packages of the tests (`make install`).
"""

import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.errors import UserError

_FIRST = flags.DEFINE_integer(
    "first", 0, "First seed. The tests check some of the seeds below 2,500."
)
_COUNT = flags.DEFINE_integer("count", 200, "Number of models.", lower_bound=1)


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "")]
    import random_models  # this also sets eight CPU devices and the compiler flags of the tests

    failed, started = [], time.monotonic()
    for number in range(_COUNT.value):
        seed = _FIRST.value + number
        with tempfile.TemporaryDirectory() as folder:
            try:
                random_models.check(seed, Path(folder) / "exported")
            except Exception as error:
                failed.append(seed)
                print(
                    f"seed {seed}: {random_models.describe(seed)}\n  {type(error).__name__}: "
                    f"{error}",
                    flush=True,
                )
        if (number + 1) % 20 == 0:
            print(
                f"{number + 1} models, {len(failed)} failed, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    if failed:
        raise UserError(
            f"{len(failed)} of {_COUNT.value} models failed: seeds {', '.join(map(str, failed))}"
        )


if __name__ == "__main__":
    cli.run(main)
