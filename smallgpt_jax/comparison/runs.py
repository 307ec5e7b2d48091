"""The runs of a comparison: each model is trained with several seeds, at the best learning rate of
its grid.

Runs named MODEL@SIZE train one model at several sizes. They share a grid, which is trained at the
first size. With horizons, the shorter runs of a name branch off its longest one
(training/branch.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.analysis.record import Grid, model_of, size_of
from smallgpt_jax.comparison import learning_rates
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.config import Config

RUNS_FOLDER = "runs"  # in a comparison's folder


class PlannedRun(NamedTuple):
    name: str
    config: Config
    folder: Path
    multiple: float = 1.0  # of the model's own learning rate
    in_grid: bool = False  # True: the run only serves to choose the learning rate
    horizon: float = 1.0  # multiple of the model's number of steps
    trunk: Path | None = None  # folder of the longer run whose checkpoint this run starts from
    # True: the losses of the other runs predict its loss before it starts.
    is_held_out: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    output: Path
    models: dict[str, Config]  # {name: config}, each with the steps that the budget allows
    seeds: range
    multiples: tuple[float, ...]  # of each model's own learning rate; empty: no grid
    max_added: int  # maximum number of learning rates that are added to a model's grid
    averaged: int = 1  # number of last evaluations over which the loss of a run is the mean
    horizons: tuple[float, ...] = (1.0,)  # of each run, except those of grids
    held_out: str = ""  # SIZE of the runs that are trained last
    train_held_out: bool = True

    @property
    def grid_seed(self) -> int:
        """The seed before the seeds of the comparison, so that more of these can be added."""
        return self.seeds[0] - 1

    @property
    def held_out_names(self) -> list[str]:
        if not self.held_out:
            return []
        return [name for name in self.models if size_of(name) == self.held_out]

    def runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs in training order, as far as the known losses determine them.

        First the runs of all grids, with `grid_seed`. Then the runs at the best multiples, seed by
        seed; each is followed by its shorter runs. Last the runs of the held-out size.

        `losses` maps the folders of finished runs to their losses, inf for a diverged one.
        """
        # The held-out runs come last, because the losses of all others predict theirs.
        at_best = self.runs_at_best(losses)
        held_out = [run for run in at_best if run.is_held_out]
        others = [run for run in at_best if not run.is_held_out]
        return [*self._grid_runs(losses), *others, *(held_out if self.train_held_out else [])]

    def _grid_runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        runs = []
        for name, grid in self.grids(losses).items():
            for multiple in grid.losses:
                runs.append(self._run(name, self.grid_seed, multiple, in_grid=True))
        return runs

    def runs_at_best(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs of all models, seeds and horizons whose learning rates are known.

        A model is left out while its grid is unfinished, and if it has diverged at every multiple.
        """
        return self._runs_at(self._multiples(losses))

    def expected_runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns `runs`, and with learning rates that are not known yet, the other runs, too,
        assuming that no grid is extended further.
        """
        runs = self._runs_at(self._multiples(losses, unknown=1.0))
        if not self.train_held_out:
            runs = [run for run in runs if not run.is_held_out]
        return [*self._grid_runs(losses), *runs]

    def _runs_at(self, multiples: Mapping[str, float | None]) -> list[PlannedRun]:
        """Returns the runs of each seed at {model: multiple of its learning rate}."""
        runs = []
        for seed in self.seeds:
            for name in self.models:
                multiple = multiples.get(model_of(name))
                if multiple:
                    runs += _with_shorter_runs(self._run(name, seed, multiple), self.horizons)
        return runs

    def _multiples(
        self, losses: Mapping[Path, float], unknown: float | None = None
    ) -> dict[str, float | None]:
        """Returns {model: best multiple}, `unknown` while its grid is unfinished."""
        if not self.multiples:
            return {model_of(name): 1.0 for name in self.models}
        return {
            model_of(name): grid.best or unknown
            for name, grid in self.grids(losses).items()
            if not grid.has_diverged
        }

    def grids(self, losses: Mapping[Path, float]) -> dict[str, Grid]:
        """Returns {first name of a model: grid}; {} without learning rates to try."""
        if not self.multiples:
            return {}
        first_names: dict[str, str] = {}
        for name in self.models:
            first_names.setdefault(model_of(name), name)
        return {name: self._grid(name, losses) for name in first_names.values()}

    def _grid(self, name: str, losses: Mapping[Path, float]) -> Grid:
        return learning_rates.search(
            self.grid_seed,
            self.models[name].optimizer.learning_rate,
            self.multiples,
            self.max_added,
            lambda multiple: losses.get(run_folder(self.output, name, self.grid_seed, multiple)),
        )

    def _run(self, name: str, seed: int, multiple: float, in_grid: bool = False) -> PlannedRun:
        config = self.models[name].replace(train={"seed": seed})
        if multiple != 1:
            config = learning_rates.scale(config, multiple)
        return PlannedRun(
            name,
            config,
            run_folder(self.output, name, seed, multiple),
            multiple,
            in_grid,
            is_held_out=name in self.held_out_names and not in_grid,
        )


def _with_shorter_runs(run: PlannedRun, horizons: tuple[float, ...]) -> list[PlannedRun]:
    """Returns `run`, which keeps the checkpoints that the shorter runs start from, and the shorter
    runs.
    """
    shorter = [_shorter_run(run, horizon) for horizon in horizons if horizon < 1]
    if not shorter:
        return [run]
    starts = [decay_start(branch.config.optimizer) for branch in shorter]
    kept = tuple(sorted({*run.config.train.kept_steps, *starts}))
    return [run._replace(config=run.config.replace(train={"kept_steps": kept})), *shorter]


def _shorter_run(run: PlannedRun, horizon: float) -> PlannedRun:
    name = f"{run.folder.name}-x{learning_rates.format_multiple(horizon)}"
    config = shortened(run.config, horizon).replace(train={"trunk": str(run.folder)})
    return run._replace(
        config=config, horizon=horizon, folder=run.folder.with_name(name), trunk=run.folder
    )


def shortened(config: Config, horizon: float) -> Config:
    """The warmup is not shortened, because runs of all horizons have it in common."""
    return config.replace(
        train={"steps": round(horizon * config.train.steps)},
        optimizer={"decay_steps": round(horizon * config.optimizer.decay_steps)},
    )


def run_folder(output: Path, name: str, seed: int, multiple: float = 1.0) -> Path:
    """Returns the workdir of a run. Multiple 1 is not in its name: a grid that is added later can
    reuse the run.
    """
    suffix = "" if multiple == 1 else f"-lr{learning_rates.format_multiple(multiple)}x"
    return output / RUNS_FOLDER / f"{safe_name(name)}-seed{seed}{suffix}"
