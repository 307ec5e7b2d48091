"""The runs of a comparison, and their order: each model is trained with several seeds, at the best
multiple of its learning rate. `queue.Queue` decides which of them is trained next.

Runs named MODEL@SIZE train one model at several sizes. They share a grid of learning rates, which is
trained at the first size. With horizons, the shorter runs of a name branch off its longest one
(training/branch.py). With rounds of seeds, the losses of a round decide which runs the next one has.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.analysis.further_runs import Rounds, next_seeds
from smallgpt_jax.analysis.record import Grid, GridRate, grouped, model_of, size_of
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.config import Config

RUNS_FOLDER = "runs"  # in the folder of a comparison, a verification or a gate


class PlannedRun(NamedTuple):
    name: str
    config: Config
    folder: Path
    multiple: float = 1.0  # its learning rate / that of the name's config
    in_grid: bool = False  # True: the run only serves to choose the learning rate, and is no result
    horizon: float = 1.0  # multiple of the model's number of steps
    trunk: Path | None = None  # folder of the longer run whose checkpoint this run starts from
    # True: the losses of the other runs predict its loss before it starts.
    is_held_out: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    output: Path
    models: dict[str, Config]  # {name: config}, each with the steps that the budget allows
    seeds: range  # of the first round
    multiples: tuple[float, ...]  # of each model's own learning rate; empty: no grid
    max_added: int  # maximum number of learning rates that are added to a model's grid
    averaged: int = 1  # number of last evaluations over which the loss of a run is the mean
    horizons: tuple[float, ...] = (1.0,)  # of each run, except those of grids
    held_out: str = ""  # SIZE of the runs that are trained last
    train_held_out: bool = True
    rounds: Rounds | None = None  # None: no seeds are added

    @property
    def grid_seed(self) -> int:
        """The seed before the seeds of the comparison, so that more of these can be added."""
        return self.seeds[0] - 1

    @property
    def held_out_names(self) -> list[str]:
        names = self.models if self.held_out else ()  # the size "" is of names without a size
        return [name for name in names if size_of(name) == self.held_out]

    def runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs in training order, as far as the known losses determine them. `losses` maps
        the folders of finished runs to their losses, inf for a diverged one.
        """
        # Grids first, which choose the learning rates of the others. The held-out runs come last,
        # because the losses of all others predict theirs.
        at_best = self.runs_at_best(losses)
        held_out = [run for run in at_best if run.is_held_out and self.train_held_out]
        others = [run for run in at_best if not run.is_held_out]
        return [*self._grid_runs(losses), *others, *held_out]

    def _grid_runs(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        runs = []
        for name, grid in self.grids(losses).items():
            for multiple in grid.losses:
                runs.append(self._run(name, self.grid_seed, multiple, in_grid=True))
        return runs

    def runs_at_best(self, losses: Mapping[Path, float]) -> list[PlannedRun]:
        """Returns the runs of all models, seeds and horizons whose learning rates are known."""
        multiples = self._multiples(losses)
        return self._runs_at(multiples, self._num_seeds(losses, multiples))

    def expected_runs(
        self, losses: Mapping[Path, float], at_most: bool = False
    ) -> list[PlannedRun]:
        """Returns all runs that the comparison will have, by what is known: no seeds are added or, with
        `at_most`, all that may be.
        """
        # An unfinished grid is taken to choose the multiple 1.
        multiples = self._multiples(losses)
        counts = self._num_seeds(losses, multiples, at_most)
        runs = self._runs_at({model: best or 1.0 for model, best in multiples.items()}, counts)
        if not self.train_held_out:
            runs = [run for run in runs if not run.is_held_out]
        return [*self._grid_runs(losses), *runs]

    def _runs_at(
        self, multiples: Mapping[str, float | None], counts: Mapping[str, int]
    ) -> list[PlannedRun]:
        """Returns the runs at {model: best multiple}, with {name: number of seeds}; models without a
        multiple are left out.
        """
        runs = []
        # Seed by seed: a comparison that is stopped has as many seeds of each model.
        for index in range(max(counts.values(), default=0)):
            for name in self.models:
                multiple = multiples.get(model_of(name))
                if multiple and index < counts[name]:
                    run = self._run(name, self.seeds[0] + index, multiple)
                    runs += _with_shorter_runs(run, self.horizons)
        return runs

    def _num_seeds(
        self,
        losses: Mapping[Path, float],
        multiples: Mapping[str, float | None],
        at_most: bool = False,
    ) -> dict[str, int]:
        """Returns {name: number of seeds}, after all rounds that the known losses determine. Where
        they do not determine whether the next round adds seeds: none or, with `at_most`, all.
        """
        if self.rounds is None:
            return dict.fromkeys(self.models, len(self.seeds))
        counts = {}
        for names in grouped(self.models, size_of).values():
            counts |= self._num_seeds_of_size(names, losses, multiples, at_most)
        return counts

    def _num_seeds_of_size(
        self,
        names: Sequence[str],
        losses: Mapping[Path, float],
        multiples: Mapping[str, float | None],
        at_most: bool,
    ) -> dict[str, int]:
        """Returns `_num_seeds` of the names of one size."""
        # The next round counts only when all losses of a round are known. So the plan depends neither
        # on the order in which runs finish, nor on the process that makes it.
        counts = dict.fromkeys(names, len(self.seeds))
        while True:
            of_seeds = self._losses_of_seeds(counts, losses, multiples)
            if of_seeds is None:  # this round is not finished
                return dict.fromkeys(names, self.rounds.most) if at_most else counts
            next_counts = counts | next_seeds(of_seeds, self.rounds)
            if next_counts == counts:  # the verdicts need no further seeds
                return counts
            counts = next_counts

    def _losses_of_seeds(
        self,
        counts: Mapping[str, int],
        losses: Mapping[Path, float],
        multiples: Mapping[str, float | None],
    ) -> dict[str, list[float]] | None:
        """Returns {name: losses of its seeds} for {name: number of seeds}, without models that
        diverged at all learning rates; None if a loss is not known yet.
        """
        of_names = {}
        for name, count in counts.items():
            if model_of(name) not in multiples:  # has diverged at all learning rates
                continue
            multiple = multiples[model_of(name)]
            if multiple is None:
                return None
            seeds = range(self.seeds[0], self.seeds[0] + count)
            folders = [run_folder(self.output, name, seed, multiple) for seed in seeds]
            of_names[name] = [losses.get(folder) for folder in folders]
            if None in of_names[name]:
                return None
        return of_names

    def _multiples(self, losses: Mapping[Path, float]) -> dict[str, float | None]:
        """Returns {model: best multiple}, None while its grid is unfinished; without models that
        diverged at all learning rates.
        """
        if not self.multiples:
            return {model_of(name): 1.0 for name in self.models}
        return {
            model_of(name): grid.best
            for name, grid in self.grids(losses).items()
            if not grid.has_diverged
        }

    def grids(self, losses: Mapping[Path, float]) -> dict[str, Grid]:
        """Returns {first name of a model: grid}; {} without learning rates to try."""
        if not self.multiples:
            return {}
        first_names = [names[0] for names in grouped(self.models, model_of).values()]
        return {name: self._grid(name, losses) for name in first_names}

    def _grid(self, name: str, losses: Mapping[Path, float]) -> Grid:
        def loss_of(multiple: float) -> float | None:
            return losses.get(run_folder(self.output, name, self.grid_seed, multiple))

        own_rate = self.models[name].optimizer.learning_rate
        return learning_rate_grid(self.grid_seed, own_rate, self.multiples, self.max_added, loss_of)

    def _run(self, name: str, seed: int, multiple: float, in_grid: bool = False) -> PlannedRun:
        config = self.models[name].replace(train={"seed": seed})
        if multiple != 1:
            config = with_rate_multiple(config, multiple)
        folder = run_folder(self.output, name, seed, multiple)
        # Grids come first even where a model has only the held-out size: they have another seed, and
        # their losses predict nothing.
        is_held_out = name in self.held_out_names and not in_grid
        return PlannedRun(name, config, folder, multiple, in_grid, is_held_out=is_held_out)


def _with_shorter_runs(run: PlannedRun, horizons: tuple[float, ...]) -> list[PlannedRun]:
    """Returns `run`, which keeps the checkpoints that the shorter ones start from, and these."""
    shorter = [_shorter_run(run, horizon) for horizon in horizons if horizon < 1]
    if not shorter:
        return [run]
    starts = [decay_start(branch.config.optimizer) for branch in shorter]
    kept = tuple(sorted({*run.config.train.kept_steps, *starts}))
    return [run._replace(config=run.config.replace(train={"kept_steps": kept})), *shorter]


def _shorter_run(run: PlannedRun, horizon: float) -> PlannedRun:
    name = f"{run.folder.name}-x{format_multiple(horizon)}"
    config = shortened(run.config, horizon).replace(train={"trunk": str(run.folder)})
    return run._replace(
        config=config, horizon=horizon, folder=run.folder.with_name(name), trunk=run.folder
    )


def shortened(config: Config, horizon: float) -> Config:
    """Returns the config of a run of `horizon` times the steps."""
    # The warmup is not shortened, because runs of all horizons have it in common.
    return config.replace(
        train={"steps": round(horizon * config.train.steps)},
        optimizer={"decay_steps": round(horizon * config.optimizer.decay_steps)},
    )


def run_folder(output: Path, name: str, seed: int, multiple: float = 1.0) -> Path:
    # Multiple 1 is not in the name: a grid that is added later can reuse the run.
    suffix = "" if multiple == 1 else f"-lr{format_multiple(multiple)}x"
    return output / RUNS_FOLDER / f"{safe_name(name)}-seed{seed}{suffix}"


# ------------------------------------------------------------------ learning rates
def learning_rate_grid(
    seed: int,
    learning_rate: float,
    multiples: tuple[float, ...],
    max_added: int,
    loss_of: Callable[[float], float | None],
) -> Grid:
    """Returns the grid of the multiples to train, as far as the known losses determine them.
    `loss_of` maps a multiple to its loss, as in `Grid.losses`.
    """
    multiples = sorted(map(float, multiples))
    most = len(multiples) + max_added
    while True:
        grid = Grid(seed, learning_rate, tuple(_rate(one, loss_of(one)) for one in multiples))
        if not grid.edge or len(multiples) == most:
            return grid
        # Beyond the best multiple, one more is tried at an equal ratio: 4 after 1 and 2.
        if grid.edge == "lowest":
            added = multiples[0] * multiples[0] / multiples[1]
        else:
            added = multiples[-1] * multiples[-1] / multiples[-2]
        added = float(f"{added:.6g}")  # rounded, because folder names contain the multiple
        multiples = sorted((*multiples, added))


def _rate(multiple: float, loss: float | None) -> GridRate:
    diverged = loss == math.inf
    return GridRate(multiple, None if diverged else loss, diverged)


def with_rate_multiple(config: Config, multiple: float) -> Config:
    """Returns the config with `multiple` times the learning rate, at the start and the end."""
    optimizer = config.optimizer
    return config.replace(
        optimizer={
            "learning_rate": multiple * optimizer.learning_rate,
            "final_learning_rate": multiple * optimizer.final_learning_rate,
        }
    )


def format_multiple(multiple: float) -> str:
    """Returns a text such as "2" or "0.25"; different multiples give different texts."""
    return str(multiple).removesuffix(".0")
