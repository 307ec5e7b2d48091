"""The order in which a comparison trains its runs, with fake runs: grids, trunks, predictions,
failures, several processes.
"""

import contextlib
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from conftest import load_config

from smallgpt_jax import models
from smallgpt_jax.analysis.further_runs import Rounds
from smallgpt_jax.comparison import held_out, queue
from smallgpt_jax.comparison.runs import Comparison
from smallgpt_jax.errors import DivergenceError, UserError, WorkdirBusyError
from smallgpt_jax.run.config import Config


class World:
    """The runs that this process and others train, without files.

    `events` lists what happens: the folders that are trained or measured, "predictions", and the
    folders that are waited for.
    """

    def __init__(self, monkeypatch, comparison: Comparison, losses=None, errors=None):
        self.comparison, self.text = comparison, None
        self.finished: dict[str, float] = {}
        self.events: list[str] = []
        self._losses, self._errors = losses or {}, errors or {}
        monkeypatch.setattr(queue.trainer, "train_and_evaluate", self._train)
        monkeypatch.setattr(queue, "check_existing", lambda *_: None)
        monkeypatch.setattr(queue, "with_available_trunk", lambda run: run.config)
        monkeypatch.setattr(queue, "file_lock", self._wait)
        monkeypatch.setattr(queue.gc, "collect", lambda: None)
        monkeypatch.setattr(held_out, "require_enough_runs", lambda comparison: None)
        monkeypatch.setattr(held_out, "write_predictions", self._predict)

    def _train(self, config, folder: str, text) -> None:
        name = Path(folder).name
        if name in self._errors:
            raise self._errors[name]
        self.finished[name] = self._losses.get(name, 3.0)
        self.events.append(name)

    def _predict(self, outcomes, losses, command) -> None:
        self.events.append("predictions")

    @contextlib.contextmanager
    def _wait(self, path, wait):
        """The other process finishes the run while this one waits."""
        name = path.parent.name
        self.events.append(f"waits for {name}")
        self._errors.pop(name)
        self.finished[name] = self._losses.get(name, 3.0)
        yield

    def loss(self, run) -> float | None:
        return self.finished.get(run.folder.name)

    def run(self, run):
        return SimpleNamespace(loss=self.finished[run.folder.name])

    def train(self) -> queue.Queue:
        """Trains all runs, as one process."""
        runs = queue.Queue(
            self,
            measure_run=lambda run: self.events.append(f"measures {run.folder.name}"),
            after_run=lambda: None,
        )
        runs.train()
        return runs


@pytest.fixture(scope="module")
def config():
    return Config.of(load_config("gpt", optimizer__schedule="wsd", train__steps=80))


def comparison(config, names=("gpt",), **fields) -> Comparison:
    fields = {"seeds": range(1, 2), "multiples": (), "max_added": 0, **fields}
    return Comparison(Path("out"), dict.fromkeys(names, config), **fields)


def trained(world: World) -> list[str]:
    return [event for event in world.events if not event.startswith("measures")]


def test_seeds_alternate_between_models_and_are_measured(monkeypatch, config):
    world = World(monkeypatch, comparison(config, ("gpt", "pgpt"), seeds=range(1, 3)))
    world.train()
    runs = ["gpt-seed1", "pgpt-seed1", "gpt-seed2", "pgpt-seed2"]
    assert world.events == [event for run in runs for event in (run, f"measures {run}")]
    world.events.clear()
    queue = world.train()  # a second start trains nothing, but measures what may be missing
    assert world.events == [f"measures {run}" for run in runs]
    assert set(queue.losses.values()) == {3.0}


def test_a_grid_chooses_the_rate_and_is_extended_at_an_edge(monkeypatch, config):
    losses = {"gpt-seed0": 3.2, "gpt-seed0-lr2x": 3.1, "gpt-seed0-lr4x": 3.15}
    plan = comparison(config, multiples=(1, 2), max_added=3)
    world = World(monkeypatch, plan, losses)
    world.train()
    assert world.events == [*losses, "gpt-seed1-lr2x", "measures gpt-seed1-lr2x"]
    grid = plan.grids({plan.output / "runs" / name: loss for name, loss in losses.items()})["gpt"]
    assert (grid.best, grid.edge) == (2.0, "")


def test_a_model_that_diverges_at_all_rates_is_left_out(monkeypatch, config):
    errors = {name: DivergenceError("inf") for name in ("bad-seed0", "bad-seed0-lr2x")}
    plan = comparison(config, ("bad", "gpt"), multiples=(1, 2))
    world = World(monkeypatch, plan, {"gpt-seed0-lr2x": 3.5}, errors)
    queue = world.train()
    assert trained(world) == ["gpt-seed0", "gpt-seed0-lr2x", "gpt-seed1"]
    assert sorted(queue.losses.values())[-2:] == [math.inf, math.inf]
    assert len(plan.expected_runs(queue.losses)) == 5  # two of each grid, and one of gpt


# ------------------------------------------------------------------ rounds of seeds
ROUNDS = Rounds(first=2, most=5, stake=0.01, pair_level=0.05)
CLOSE = {
    f"{name}-seed{seed}": loss
    for name, losses in {"a": (3.0, 3.1, 3.0, 3.2, 3.1), "b": (3.1, 3.0, 3.1, 3.1, 3.15)}.items()
    for seed, loss in enumerate(losses, 1)
}


def in_rounds(config, names=("a", "b"), **fields) -> Comparison:
    return comparison(config, names, seeds=range(1, 3), rounds=ROUNDS, **fields)


def test_seeds_are_added_to_close_models_only(monkeypatch, config):
    plan = in_rounds(config, ("a", "b", "bad"))
    bad = {f"bad-seed{seed}": 9 + loss / 10 for seed, loss in enumerate((3, 1, 2, 4, 2), 1)}
    world = World(monkeypatch, plan, {**CLOSE, **bad})
    queue = world.train()
    assert trained(world)[:6] == [
        "a-seed1",
        "b-seed1",
        "bad-seed1",
        "a-seed2",
        "b-seed2",
        "bad-seed2",
    ]
    assert {"a-seed5", "b-seed5"} <= set(trained(world)) and "bad-seed5" not in trained(world)
    assert len(plan.expected_runs({})) == 6 and len(plan.expected_runs({}, at_most=True)) == 15
    assert plan.expected_runs(queue.losses, at_most=True) == plan.expected_runs(queue.losses)


@pytest.mark.parametrize("killed_at", ["a-seed1", "b-seed2", "a-seed3", "b-seed4", "b-seed5"])
def test_a_killed_comparison_goes_on_to_the_same_seeds(monkeypatch, config, killed_at):
    plan = in_rounds(config)
    whole = World(monkeypatch, plan, CLOSE)
    whole.train()
    world = World(monkeypatch, plan, CLOSE, {killed_at: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        world.train()
    world._errors.clear()
    world.train()
    assert trained(world) == trained(whole)


def test_a_round_waits_for_the_runs_of_other_processes(monkeypatch, config):
    errors = {"b-seed2": WorkdirBusyError("busy", "process 7")}
    world = World(monkeypatch, in_rounds(config), CLOSE, errors)
    world.train()
    waited = world.events.index("waits for b-seed2")
    assert waited < world.events.index("a-seed3") and "b-seed5" in world.events


def test_a_run_that_fails_ends_the_rounds_of_its_size(monkeypatch, config):
    plan = in_rounds(config, ("a@1", "b@1", "a@2", "b@2"))
    names = {run.name: run.folder.name for run in plan.runs({})}
    failing = names["b@1"].replace("seed1", "seed2")
    by_folder = {}
    for name, loss in CLOSE.items():
        model, seed = name.split("-")
        by_folder[names[f"{model}@2"].rpartition("-")[0] + f"-{seed}"] = loss
    world = World(monkeypatch, plan, by_folder, {failing: UserError("does not fit")})
    with pytest.raises(UserError, match="does not fit"):
        world.train()
    finished = trained(world)
    assert not [name for name in finished if name.startswith(names["a@1"][:-1] + "3")]
    assert [name for name in finished if name.startswith(names["a@2"][:-1] + "5")]


# ------------------------------------------------------------------ horizons, failures, processes
def test_shorter_runs_follow_their_trunk(monkeypatch, config):
    plan = comparison(config, horizons=(0.25, 0.5, 1.0))
    world = World(monkeypatch, plan)
    world.train()
    assert trained(world) == ["gpt-seed1", "gpt-seed1-x0.25", "gpt-seed1-x0.5"]
    assert "measures gpt-seed1-x0.5" not in world.events
    trunk, short, _ = plan.runs({})
    assert trunk.config.train.kept_steps == (18, 36)  # the decay takes a tenth of 20 and 40 steps
    assert (short.config.train.steps, short.config.optimizer.decay_steps) == (20, 20)
    assert short.config.train.trunk == str(trunk.folder)


def test_a_failed_run_ends_its_branches_but_not_the_comparison(monkeypatch, config, capsys):
    errors = {"bad-seed1": UserError("does not fit"), "gpt-seed1": DivergenceError("inf")}
    plan = comparison(config, ("bad", "gpt", "pgpt"), horizons=(0.5, 1.0))
    world = World(monkeypatch, plan, errors=errors)
    with pytest.raises(UserError, match=r"out/runs/bad-seed1: could not be trained: does not fit$"):
        world.train()
    # A branch of a diverged trunk may end before it diverges.
    assert trained(world) == ["gpt-seed1-x0.5", "pgpt-seed1", "pgpt-seed1-x0.5"]
    assert "The comparison continues without it" in capsys.readouterr().out


def test_held_out_runs_are_predicted_from_all_others_first(monkeypatch, config):
    plan = comparison(config, ("gpt@1", "gpt@2", "gpt@4"), held_out="2")
    world = World(monkeypatch, plan)
    world.train()
    assert trained(world) == ["gpt_1-seed1", "gpt_4-seed1", "predictions", "gpt_2-seed1"]
    world = World(monkeypatch, dataclasses.replace(plan, train_held_out=False))
    world.train()
    assert trained(world)[-1] == "predictions" and len(trained(world)) == 3


def test_another_process_trains_some_runs(monkeypatch, config):
    """They are skipped, but waited for if others depend on them: runs of grids, trunks, and all
    runs before predictions.
    """
    busy = {"gpt-seed1": WorkdirBusyError("busy", by="process 1")}
    world = World(monkeypatch, comparison(config, seeds=range(1, 3)), errors=dict(busy))
    world.train()
    assert trained(world) == ["gpt-seed2"]

    plan = comparison(config, seeds=range(1, 3), horizons=(0.5, 1.0))
    world = World(monkeypatch, plan, errors=dict(busy))
    world.train()
    assert trained(world) == [
        "gpt-seed2",
        "gpt-seed2-x0.5",
        "waits for gpt-seed1",
        "gpt-seed1-x0.5",
    ]

    in_grid = {"gpt-seed0": WorkdirBusyError("busy", by="process 1")}
    world = World(monkeypatch, comparison(config, multiples=(1, 2)), {}, in_grid)
    world.train()
    assert trained(world) == ["gpt-seed0-lr2x", "waits for gpt-seed0", "gpt-seed1"]

    in_size = {"gpt_1-seed1": WorkdirBusyError("busy", by="process 1")}
    plan = comparison(config, ("gpt@1", "gpt@2"), held_out="2")
    world = World(monkeypatch, plan, errors=in_size)
    world.train()
    assert trained(world) == ["waits for gpt_1-seed1", "predictions", "gpt_2-seed1"]


def test_programs_of_a_few_models_are_kept(monkeypatch):
    """The seeds of several models are trained in turns. No model's programs are freed before a
    fifth model comes.
    """
    cleared, compiled = [], set()
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(width))
    for width in (16, 32, 48, 64, 16, 64, 32, 80, 16, 80):
        config = load_config("gpt", model__d_model=width).model
        queue.free_programs(models.build(**config).config, compiled)
    assert cleared == [80]
