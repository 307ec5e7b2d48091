"""The run that is worth most, and the command that trains it."""

import json
import math
import shlex

import numpy as np
import pytest
from absl import flags
from comparison_helpers import run, saved
from conftest import ROOT, call
from decision_helpers import evidence, runs
from ml_collections import config_flags
from scipy import stats

from smallgpt_jax import cli
from smallgpt_jax.analysis.further_runs import expected_gain, next_runs
from smallgpt_jax.analysis.record import Grid, GridRate
from smallgpt_jax.errors import UserError
from smallgpt_jax.report.choosing import choose_next

COMMAND = "python -m smallgpt_jax.compare --config=configs/compare/scaling.py:tiny --output=runs/s"


@pytest.mark.parametrize("lead", [0.0, 0.05, 0.3])
def test_the_gain_of_two_models_is_that_of_the_closed_form(lead):
    """Their difference moves by a normal number with the deviation s; with the lead d, the minimum
    is lower by s·φ(d/s) − d·Φ(−d/s).
    """
    variances, noise = np.array([0.04, 0.01]), 0.09
    gain = expected_gain(np.array([3.0, 3.0 + lead]), np.diag(variances), 0, noise)
    s = 0.04 / math.sqrt(0.04 + noise)
    expected = s * stats.norm.pdf(lead / s) - lead * stats.norm.cdf(-lead / s)
    assert gain == pytest.approx(expected, rel=0.02, abs=1e-4)


def test_the_run_that_tells_most_per_flop_comes_first():
    """a and b are close; c is not. At size 2, the same losses cost ten times as much."""
    losses = {"a": [3.0, 3.1, 3.2], "b": [3.2, 3.0, 3.12], "c": [9.0, 9.05, 9.2]}
    made = []
    for size, parameters in ((1, 100), (2, 1000)):
        for model, of_model in losses.items():
            made.append(runs(f"{model}@{size}", of_model, parameters=parameters))
    worth = next_runs(evidence(*made))
    assert {one.name for one in worth[:2]} == {"a@1", "b@1"}
    assert all(one.seed == 3 and 0 < one.gain < one.at_stake for one in worth[:2])
    of_c = next(one for one in worth if one.name == "c@1")
    assert of_c.gain < 1e-6 and worth[0].flops == 6 * 100 * 100 * 100


def test_a_seed_that_others_have_tells_more():
    a, b = [3.0, 3.9, 3.4, 3.6], [3.1, 3.8, 3.45, 3.5]
    behind = next_runs(evidence(runs("a", a[:3]), runs("b", b)))
    level = next_runs(evidence(runs("a", a[:3]), runs("b", b[:3])))
    gains = [next(one.gain for one in found if one.name == "a") for found in (behind, level)]
    assert gains[0] > gains[1]


def record_of(tmp_path, spread: float, **fields):
    made = []
    for seed, error in ((1, -spread), (2, 0.0), (3, spread)):
        made += [run("gpt@20k", seed, 3.0 + error), run("llama@20k", seed, 3.01 - error)]
    return saved(tmp_path / "results.json", *made, command=COMMAND, **fields)


def test_nothing_at_stake(tmp_path):
    path = record_of(tmp_path, 0.01)
    advice = choose_next(path)
    assert advice.run is None and 0 < advice.at_stake < 0.01
    assert "No run is worth it" in str(advice)
    assert choose_next(path, stake=1e-4).run


def test_the_command_trains_one_run_at_the_rate_of_the_grid(tmp_path):
    grid = Grid(0, 0.01, (GridRate(1.0, 3.0, False), GridRate(2.0, 2.9, False)))
    grids = {"gpt@20k": grid, "llama@20k": grid}
    path = record_of(tmp_path, 0.2, learning_rates=grids, seeds_as_needed=True)
    advice = choose_next(path)
    _, _, module, *arguments = shlex.split(advice.command)
    assert module == "smallgpt_jax.compare" and f"--results={path}" in arguments
    ours = [one for one in arguments if one.startswith("--config")]
    ours[0] = f"--config={ROOT}/configs/compare/scaling.py:tiny"
    values = flags.FlagValues()
    quoted = cli.quote_run_names(["compare", *ours])
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=quoted)
    values(quoted)
    config = values["config"].value
    assert config.compare.names == advice.run.name and config.compare.seeds == 4
    assert config.compare.learning_rates == () and advice.run.seed == 4
    assert "--config.compare.most_seeds=0" in ours
    rate = json.loads(path.read_text())["runs"][0]["config"]["optimizer.learning_rate"]
    assert config.runs[advice.run.name].optimizer.learning_rate == rate
    assert advice.merge_command.endswith(f"{path},runs/next/results.json --output=runs/merged")


def test_next_on_the_command_line(tmp_path):
    path = record_of(tmp_path, 0.2)
    done = call("choose", f"--results={path}", "--next")
    assert done.returncode == 0 and done.stdout.startswith("Next run: "), done.stderr
    assert "(1 run, " in done.stdout
    assert json.loads(call("choose", f"--results={path}", "--next", "--json").stdout)["run"]["name"]
    done = call("choose", f"--results={path}", "--next", "--flops=1")
    assert (done.returncode, "--next: cannot be combined with --flops" in done.stderr) == (2, True)


def test_one_seed_tells_nothing(tmp_path):
    path = saved(tmp_path / "results.json", run("gpt", 1, 3.0), run("llama", 1, 3.1))
    with pytest.raises(UserError, match="train two seeds of two models"):
        choose_next(path)
