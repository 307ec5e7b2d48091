"""The runs of a comparison: each model is trained with several seeds, at the best learning rate of its grid."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.comparison import learning_rates
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.run.config import Config
from smallgpt_jax.storage.files import safe_name

RUNS_FOLDER = "runs"  # in a comparison's folder


class PlannedRun(NamedTuple):
    """One run of a comparison; `config` is a complete training config."""

    name: str
    config: Config
    folder: Path
    multiple: float = 1.0  # of the model's own learning rate
    in_grid: bool = False  # True: the run only serves to choose the learning rate


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The models of a comparison, and the seeds and learning rates to train them with."""

    output: Path
    models: dict[str, Config]  # {name: config}, each with the number of steps that the budget allows
    seeds: range
    multiples: tuple[float, ...]  # of each model's own learning rate; empty: no grid
    max_added: int  # maximum number of learning rates that are added to a model's grid

    def grids(self, losses: Mapping[Path, float]) -> dict[str, Grid]:
        """Returns {name: grid}, or {} if the comparison has no multiples.

        `losses` maps the folders of finished runs to their losses; see `Grid.losses`.
        """
        return {name: learning_rates.search(
            model.optimizer.learning_rate, self.multiples, self.max_added,
            lambda multiple, name=name: losses.get(run_folder(self.output, name, self.seeds[0], multiple)))
            for name, model in self.models.items() if self.multiples}

    def runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs in training order, as far as the known losses determine them.

        The first part contains the runs of all grids, with the first seed. The second part contains the runs at the
        best multiples, for all seeds and models, seed by seed. The best run of each grid is in both parts.

        A model is left out of the second part while its grid is unfinished. A model that has diverged at every multiple
        is not trained with further seeds.
        """
        grids = self.grids(losses)
        best = {name: grids[name].best if grids else 1.0 for name in self.models}
        planned = [self._run(name, self.seeds[0], multiple, in_grid=True)
                   for name, grid in grids.items() for multiple in grid.losses]
        return planned + [
            self._run(name, seed, best[name]) for seed in self.seeds for name in self.models
            if best[name] is not None and (seed == self.seeds[0] or not grids or not grids[name].has_diverged)]

    def num_runs(self, losses: Mapping[Path, float]) -> int:
        """Returns the number of runs to train, assuming that no grid is extended further."""
        further = len(self.seeds) - 1
        if not self.multiples:
            return len(self.models) * (1 + further)
        return sum(len(grid.losses) + further * (not grid.has_diverged) for grid in self.grids(losses).values())

    def _run(self, name: str, seed: int, multiple: float, in_grid: bool = False) -> PlannedRun:
        config = self.models[name].replace(train={"seed": seed})
        if multiple != 1:
            config = learning_rates.scale(config, multiple)
        return PlannedRun(name, config, run_folder(self.output, name, seed, multiple), multiple, in_grid)


def run_folder(output: Path, name: str, seed: int, multiple: float = 1.0) -> Path:
    """Returns the workdir of a run, named after the run, its seed and the multiple of its learning rate.

    The multiple 1 is left out of the name. A grid that is added later can then reuse the existing runs.
    """
    suffix = "" if multiple == 1 else f"-lr{learning_rates.format_multiple(multiple)}x"
    return output / RUNS_FOLDER / f"{safe_name(name)}-seed{seed}{suffix}"
