"""The runs of a comparison: each model is trained with several seeds, at the best learning rate of its grid.

With horizons, the run of horizon 1 is the trunk of the shorter ones (training/trunk.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.comparison import learning_rates
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.run.config import Config
from smallgpt_jax.storage.files import safe_name
from smallgpt_jax.training.learning_rate import decay_start

RUNS_FOLDER = "runs"  # in a comparison's folder


class PlannedRun(NamedTuple):
    name: str
    config: Config
    folder: Path
    multiple: float = 1.0  # of the model's own learning rate
    in_grid: bool = False  # True: the run only serves to choose the learning rate
    horizon: float = 1.0  # multiple of the model's number of steps
    trunk: Path | None = None  # folder of the run whose checkpoint a shorter run starts from


@dataclasses.dataclass(frozen=True)
class Comparison:
    output: Path
    models: dict[str, Config]  # {name: config}, each with the number of steps that the budget allows
    seeds: range
    multiples: tuple[float, ...]  # of each model's own learning rate; empty: no grid
    max_added: int  # maximum number of learning rates that are added to a model's grid
    averaged: int = 1  # number of last evaluations over which the loss of a run is the mean
    horizons: tuple[float, ...] = (1.0,)  # of each run, except those of grids

    @property
    def grid_seed(self) -> int:
        """The seed before the seeds of the comparison, so that more of these can be added."""
        return self.seeds[0] - 1

    def grids(self, losses: Mapping[Path, float]) -> dict[str, Grid]:
        """Returns {name: grid}. `losses` maps the folders of finished runs to their losses; see `Grid.losses`."""
        return {name: learning_rates.search(
            self.grid_seed, model.optimizer.learning_rate, self.multiples, self.max_added,
            lambda multiple, name=name: losses.get(run_folder(self.output, name, self.grid_seed, multiple)))
            for name, model in self.models.items() if self.multiples}

    def runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs in training order, as far as the known losses determine them.

        The first part contains the runs of all grids, with `grid_seed`. The second part contains the runs at the best
        multiples, for all seeds and models, seed by seed; after each of them, its shorter runs.

        A model is left out of the second part while its grid is unfinished, and if it has diverged at every multiple.
        """
        grids = self.grids(losses)
        best = {name: grid.best for name, grid in grids.items() if grid.is_finished and not grid.has_diverged} if (
            grids) else dict.fromkeys(self.models, 1.0)
        planned = [self._run(name, self.grid_seed, multiple, in_grid=True)
                   for name, grid in grids.items() for multiple in grid.losses]
        return planned + [
            run for seed in self.seeds for name in self.models if name in best
            for run in with_shorter_runs(self._run(name, seed, best[name]), self.horizons)]

    def num_runs(self, losses: Mapping[Path, float]) -> int:
        """Returns the number of runs to train, assuming that no grid is extended further."""
        per_name = len(self.seeds) * len(self.horizons)
        if not self.multiples:
            return len(self.models) * per_name
        return sum(len(grid.losses) + per_name * (not grid.has_diverged) for grid in self.grids(losses).values())

    def _run(self, name: str, seed: int, multiple: float, in_grid: bool = False) -> PlannedRun:
        config = self.models[name].replace(train={"seed": seed})
        if multiple != 1:
            config = learning_rates.scale(config, multiple)
        return PlannedRun(name, config, run_folder(self.output, name, seed, multiple), multiple, in_grid)


def with_shorter_runs(run: PlannedRun, horizons: tuple[float, ...]) -> list[PlannedRun]:
    """Returns `run`, which keeps the checkpoints that the shorter runs start from, and the shorter runs."""
    shorter = [run._replace(
        config=shortened(run.config, horizon).replace(train={"trunk": str(run.folder)}), horizon=horizon,
        folder=run.folder.with_name(f"{run.folder.name}-x{learning_rates.format_multiple(horizon)}"), trunk=run.folder)
        for horizon in horizons if horizon < 1]
    if not shorter:
        return [run]
    kept = {*run.config.train.kept_steps, *(decay_start(one.config.optimizer) for one in shorter)}
    return [run._replace(config=run.config.replace(train={"kept_steps": tuple(sorted(kept))})), *shorter]


def shortened(config: Config, horizon: float) -> Config:
    """The warmup is not shortened, because runs of all horizons have it in common."""
    return config.replace(train={"steps": round(horizon * config.train.steps)},
                          optimizer={"decay_steps": round(horizon * config.optimizer.decay_steps)})


def run_folder(output: Path, name: str, seed: int, multiple: float = 1.0) -> Path:
    """Returns the workdir of a run. Multiple 1 is not in its name: a grid that is added later can reuse the run."""
    suffix = "" if multiple == 1 else f"-lr{learning_rates.format_multiple(multiple)}x"
    return output / RUNS_FOLDER / f"{safe_name(name)}-seed{seed}{suffix}"
