"""Training from Python: a function, and the run that it returns."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallgpt_jax import inference
from smallgpt_jax.config.recipes import ConfigLike, load_config
from smallgpt_jax.devices import compilation_cache, distributed
from smallgpt_jax.run import curves
from smallgpt_jax.run.checkpoint_folder import find_checkpoint
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import METRICS_FILE
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.training.trainer import open_trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run in a workdir. What it says is read anew each time, so it may still be training."""

    workdir: Path

    def __post_init__(self):
        object.__setattr__(self, "workdir", as_path("workdir", self.workdir))

    @property
    def config(self) -> Config:
        return read_config(self.workdir)

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        return find_checkpoint(self.workdir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl (docs/runs.md), for example for pandas.DataFrame."""
        return read_lines(self.workdir / METRICS_FILE)

    @property
    def validation_loss(self) -> float | None:
        """The newest one, in nats per token; None if there is none yet, or if it is not finite."""
        losses = [line["loss"] for line in self.metrics if line["split"] == "eval"]
        return losses[-1] if losses else None

    def plot(self) -> "Figure":
        """Returns a figure of the losses, the learning rate and the speed by step."""
        return curves.plot(self.metrics)

    def load(self, step: int | None = None) -> inference.TextModel:
        """Returns the model of a checkpoint, by default the newest; see `smallgpt_jax.load`."""
        return inference.load(self.workdir, step)

    def resume(self, overrides: Mapping[str, Any] | None = None) -> "TrainedRun":
        """Trains further with the run's own config and `overrides`, such as {"train.steps": 4000}.

        Raises UserError for steps after a decay to zero, as that of sized recipes.
        """
        return train(f"run:{self.workdir}", self.workdir, overrides)


def train(
    config: ConfigLike,
    workdir: str | Path,
    overrides: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Trains the model of a config in a workdir, and returns the run.

    `config` is a recipe such as "pgpt:quickstart", or its fields; `overrides` are further values,
    such as {"train.steps": 500}. Rerun the same call to resume. On Ctrl-C, the run finishes its
    step, saves, and raises StoppedError; if there is nothing to save yet, or on a second Ctrl-C, it
    raises KeyboardInterrupt. Raises UserError, among others DivergenceError; an invalid config or
    workdir leaves the workdir as it is.
    """
    distributed.skip_tpu_search()
    compilation_cache.configure()
    with open_trainer(load_config(config, overrides), workdir) as trainer:
        trainer.run()
    return TrainedRun(as_path("--workdir", workdir))
