"""The runs of a comparison: each model is trained with several seeds, at the best learning rate of
its grid.

Runs named MODEL@SIZE train one model at several sizes. They share a grid, which is trained at the
first size.

With horizons, the run of horizon 1 is the trunk of the shorter ones (training/branch.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.comparison import learning_rates, results
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.comparison.names import model_of, size_of
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.names import STORE_FILE

RUNS_FOLDER = "runs"  # in a comparison's folder


class PlannedRun(NamedTuple):
    name: str
    config: Config
    folder: Path
    multiple: float = 1.0  # of the model's own learning rate
    in_grid: bool = False  # True: the run only serves to choose the learning rate
    horizon: float = 1.0  # multiple of the model's number of steps
    trunk: Path | None = None  # folder of the run whose checkpoint a shorter run starts from
    is_held_out: bool = (
        False  # True: the losses of the other runs predict its loss before it starts
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    output: Path
    models: dict[
        str, Config
    ]  # {name: config}, each with the number of steps that the budget allows
    seeds: range
    multiples: tuple[float, ...]  # of each model's own learning rate; empty: no grid
    max_added: int  # maximum number of learning rates that are added to a model's grid
    averaged: int = 1  # number of last evaluations over which the loss of a run is the mean
    horizons: tuple[float, ...] = (1.0,)  # of each run, except those of grids
    held_out: str = ""  # SIZE of the runs that are trained last
    train_held_out: bool = True
    recorded: Record | None = None  # runs that were trained elsewhere (recorded.py)

    @property
    def grid_seed(self) -> int:
        """The seed before the seeds of the comparison, so that more of these can be added."""
        return self.seeds[0] - 1

    @property
    def grid_names(self) -> list[str]:
        """The first name of each model, if there are grids."""
        first: dict[str, str] = {}
        for name in self.models:
            first.setdefault(model_of(name), name)
        return list(first.values()) if self.multiples else []

    def grids(self, losses: Mapping[Path, float]) -> dict[str, Grid]:
        """Returns {first name of a model: grid}.

        `losses` maps the folders of finished runs to their losses; see `Grid.losses`.
        """
        return {
            name: learning_rates.search(
                self.grid_seed,
                self.models[name].optimizer.learning_rate,
                self.multiples,
                self.max_added,
                lambda multiple, name=name: losses.get(
                    run_folder(self.output, name, self.grid_seed, multiple)
                ),
            )
            for name in self.grid_names
        }

    def runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs in training order, as far as the known losses determine them.

        The first part contains the runs of all grids, with `grid_seed`. The second part contains
        the runs at the best multiples, for all seeds and models, seed by seed; after each of them,
        its shorter runs. The third part contains those of the held-out size.

        A model is left out of these while its grid is unfinished, and if it has diverged at every
        multiple.
        """
        found = self.runs_at_best(losses)
        return [
            *(
                self._run(name, self.grid_seed, multiple, in_grid=True)
                for name, grid in self.grids(losses).items()
                for multiple in grid.losses
            ),
            *(run for run in found if not run.is_held_out),
            *(run for run in found if run.is_held_out and self.train_held_out),
        ]

    def runs_at_best(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs of all models, seeds and horizons whose learning rates are known."""
        grids = {model_of(name): grid for name, grid in self.grids(losses).items()}
        best = {
            model: grid.best
            for model, grid in grids.items()
            if grid.is_finished and not grid.has_diverged
        }
        rates = {name: best.get(model_of(name)) if grids else 1.0 for name in self.models}
        return [
            run
            for seed in self.seeds
            for name in self.models
            if rates[name]
            for run in with_shorter_runs(self._run(name, seed, rates[name]), self.horizons)
        ]

    def num_runs(self, losses: Mapping[Path, float]) -> int:
        """Returns the number of runs to train, assuming that no grid is extended further."""
        grids = self.grids(losses)
        left_out = {model_of(name) for name, grid in grids.items() if grid.has_diverged}
        trained = [
            name
            for name in self.models
            if model_of(name) not in left_out
            and (self.train_held_out or name not in self.held_out_names)
        ]
        return sum(len(grid.losses) for grid in grids.values()) + len(trained) * len(
            self.seeds
        ) * len(self.horizons)

    @property
    def held_out_names(self) -> list[str]:
        return [name for name in self.models if self.held_out and size_of(name) == self.held_out]

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

    def recorded_run(self, planned: PlannedRun) -> Run | None:
        """Returns the recorded run in place of `planned`; None if there is none, or if `planned`
        has a workdir.
        """
        if self.recorded is None or (planned.folder / STORE_FILE).exists():
            return None
        identity = (
            planned.name,
            planned.config.train.seed,
            planned.horizon,
            planned.config.optimizer.learning_rate,
        )
        return next(
            (
                run
                for run in self.recorded.runs
                if (run.name, run.seed, run.horizon, run.config["optimizer.learning_rate"])
                == identity
            ),
            None,
        )

    def recorded_loss(self, planned: PlannedRun) -> float | None:
        """Returns the loss of the recorded run in place of `planned`, inf if it diverged; None if
        there is none.

        Records have no configs of the runs in grids. Those of the name's other runs vouch for them.
        """
        if not planned.in_grid:
            found = self.recorded_run(planned)
            return found and found.score
        if self.recorded is None or (planned.folder / STORE_FILE).exists():
            return None
        grid, rate = (
            self.recorded.grids.get(planned.name),
            self.models[planned.name].optimizer.learning_rate,
        )
        is_same = grid is not None and (grid.seed, grid.learning_rate) == (
            planned.config.train.seed,
            rate,
        )
        is_known = is_same and any(run.name == planned.name for run in self.recorded.runs)
        return grid.losses.get(planned.multiple) if is_known else None

    def result(self, planned: PlannedRun) -> Run:
        return self.recorded_run(planned) or results.read_run(
            planned.name,
            planned.folder,
            averaged=self.averaged,
            horizon=planned.horizon,
            trunk=planned.trunk,
        )

    def known_results(self, losses: Mapping[Path, float]) -> tuple[Run, ...]:
        """Returns the results of the runs that have started or are in a record, without those of
        grids.
        """
        return tuple(
            self.result(run)
            for run in self.runs(losses)
            if not run.in_grid and ((run.folder / STORE_FILE).exists() or self.recorded_run(run))
        )


def with_shorter_runs(run: PlannedRun, horizons: tuple[float, ...]) -> list[PlannedRun]:
    """Returns `run`, which keeps the checkpoints that the shorter runs start from, and the shorter
    runs.
    """
    shorter = [
        run._replace(
            config=shortened(run.config, horizon).replace(train={"trunk": str(run.folder)}),
            horizon=horizon,
            folder=run.folder.with_name(
                f"{run.folder.name}-x{learning_rates.format_multiple(horizon)}"
            ),
            trunk=run.folder,
        )
        for horizon in horizons
        if horizon < 1
    ]
    if not shorter:
        return [run]
    kept = {*run.config.train.kept_steps, *(decay_start(one.config.optimizer) for one in shorter)}
    return [
        run._replace(config=run.config.replace(train={"kept_steps": tuple(sorted(kept))})),
        *shorter,
    ]


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
