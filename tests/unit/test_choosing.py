"""What `choose` prints and returns beside the choice itself: commands, the nearest run, JSON; and its
flags.
"""

import ast
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys

import pytest
from comparison_helpers import INFERENCE, config_of, run, saved
from conftest import ROOT, call

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.further_runs import Cost
from smallgpt_jax.analysis.record import Inference
from smallgpt_jax.comparison.recipe import make_comparison
from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import LanguageModel
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.report import choosing, commands, tables
from smallgpt_jax.run.config import Config
from smallgpt_jax.storage import typed_json

SCALING = ROOT / "docs" / "results" / "scaling.json"
COMMAND = "python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper"
RMS = {"model__norm": "rms"}


def models(*, spread: float = 0.01, workdirs: str = "/elsewhere", **fields):
    """Returns three runs of gpt and three of llama, whose losses are 3.0 and 2.5 on average."""
    found = []
    for seed, error in ((1, -spread), (2, 0.0), (3, spread)):
        for name, loss, config in (("gpt", 3.0 + error, {}), ("llama", 2.5 - error, RMS)):
            workdir = f"{workdirs}/{name}-seed{seed}"
            found.append(run(name, seed, loss, config=config, workdir=workdir, **fields))
    return found


def test_the_command_trains_the_nearest_run_again(tmp_path):
    """With its own workdir if it is on this machine, else with the comparison's command."""
    path = saved(tmp_path / "results.json", *models(), command=COMMAND)
    answer = choosing.choose(path, "flops", 2e6)
    assert (answer.choice.chosen, answer.run) == ("llama", "llama")
    assert answer.command.endswith(
        "--config=configs/compare/paper.py --output=runs/chosen --config.compare.seeds=1 "
        "--config.compare.names=llama"
    )
    assert answer.config["model.norm"] == "rms" and "model.norm" in answer.differences

    folder = tmp_path / "runs"
    for seed in (1, 2, 3):
        (folder / f"llama-seed{seed}").mkdir(parents=True)
        (folder / f"llama-seed{seed}" / "config.json").write_text("{}")
    path = saved(tmp_path / "results.json", *models(workdirs=str(folder)), command=COMMAND)
    command = choosing.choose(path, "flops", 2.4e6).command
    assert f"-m smallgpt_jax.main --config=run:{folder}/llama-seed1" in command
    assert command.endswith("--workdir=runs/chosen")


def test_more_seeds_are_offered_where_few_may_decide(tmp_path):
    path = saved(tmp_path / "results.json", *models(spread=0.2), command=COMMAND)
    answer = choosing.choose(path, "parameters", 100)
    assert answer.choice.chosen is None and 3 < answer.seeds <= choosing.MAX_SEEDS
    assert answer.seeds_needed.low < answer.seeds < answer.seeds_needed.high
    for flag in (
        f"--config.compare.seeds={answer.seeds}",
        "--config.compare.names=gpt,llama",
        f"--results={path}",
        "--output=runs/more-seeds",
    ):
        assert flag in answer.seeds_command
    merged = f"--results={path},runs/more-seeds/results.json --output=runs/merged"
    assert answer.merge_command.endswith(merged) and answer.merge_command in str(answer)
    runs = 2 * (answer.seeds - 3)  # three of each are in the record
    assert answer.seeds_cost == Cost(runs, runs * 2e6, runs * 2.0)
    assert f"{runs} runs, about {runs * 2 / 10:.1f}e7 FLOPs" in " ".join(str(answer).split())


def test_further_seeds_are_counted_by_model(tmp_path):
    few = [run for run in models(spread=0.2) if (run.name, run.seed) != ("llama", 3)]
    answer = choosing.choose(
        saved(tmp_path / "results.json", *few, command=COMMAND), "parameters", 100
    )
    assert answer.seeds > 3
    assert answer.seeds_cost.runs == (answer.seeds - 3) + (answer.seeds - 2)


def test_no_command_is_offered_for_many_seeds(tmp_path):
    path = saved(tmp_path / "results.json", *models(spread=1.0), command=COMMAND)
    answer = choosing.choose(path, "parameters", 100)
    assert answer.seeds_needed.high > 1000 and answer.seeds_command == ""
    assert "to over 1,000 seeds per model (80% interval)." in str(answer)


def test_a_shorter_run_is_trained_with_its_longest_one():
    """Each shorter run has copied all but its decay, the last fifth."""
    answer = choosing.choose(SCALING, "seconds", 60)
    assert answer.run == "llama@0.2M × 0.25" and "horizons" not in answer.command
    runs = records.read(SCALING).longest_runs()
    longest = next(run.last.flops for run in runs if run.name == "llama@0.2M")
    assert answer.cost.runs == 4
    assert answer.cost.flops == pytest.approx(longest * (1 + 0.2 * (0.125 + 0.25 + 0.5)), rel=1e-3)


@pytest.mark.slow
def test_the_command_trains_exactly_the_nearest_run(tmp_path):
    """Not the grid and the horizons of its comparison, which are other runs."""
    answer = choosing.choose(SCALING, "flops", 1e13)
    assert answer.run == "moe@0.2M" and answer.cost.runs == 1
    assert answer.cost.flops == pytest.approx(answer.run_cost)
    (planned,) = make_comparison(config_of(answer.command), tmp_path).runs({})
    config = planned.config.flat()
    of_horizons = {"train.kept_steps"}
    for field in answer.config.keys() - of_horizons:
        value = config[field]
        assert answer.config[field] == (list(value) if isinstance(value, tuple) else value), field
    text = " ".join(str(answer).split())
    assert text.index(answer.sized_command) < text.index(
        "Train it again (1 run, about 6.5e12 FLOPs"
    )
    # Interpolated between sizes, a model has the name of none.
    assert "moe 2.858 (2.820 to 2.896)" in text and "learning_rate=0.01012" in text


def test_models_that_are_left_out_and_runs_above_the_budget_are_said(tmp_path):
    many = [
        run(
            f"model {number}",
            seed,
            3 + number + seed / 100,
            config={"model__num_layers": 1 + number},
        )
        for number in range(tables.MAX_CONTENDERS + 2)
        for seed in (1, 2, 3)
    ]
    path = saved(tmp_path / "results.json", *many, command=COMMAND)
    answer = choosing.choose(path, "parameters", 100)
    assert "2 models with higher losses left out; --json has all." in str(answer)
    above = dataclasses.replace(answer, run_cost=150.0)
    assert "model 0, 150 parameters (above the budget); " in str(above)


@pytest.mark.parametrize(
    "command, expected",
    [
        (COMMAND, f"{COMMAND} --config.compare.seeds=5"),
        (f"{COMMAND} --config.compare.seeds=2", f"{COMMAND} --config.compare.seeds=5"),
        (f"{COMMAND} --results=a.json", f"{COMMAND} --config.compare.seeds=5"),
        (f"{COMMAND} --results a.json", f"{COMMAND} --config.compare.seeds=5"),
        ("python -m smallgpt_jax.compare --results=a,b --output=c", ""),  # trains nothing
        ("python train.py", ""),
        ('python -m smallgpt_jax.compare "', ""),
        ("", ""),
    ],
)
def test_commands_of_comparisons(command, expected):
    record = records.Record("", "", command, "gpt", ())
    again = commands.compare_again(record, "--config.compare.seeds=5", without=("--results",))
    assert again.partition(" -m ")[2] == expected.partition(" -m ")[2]


def test_json_has_no_infinity(tmp_path):
    """llama has a diverged seed, so its loss is infinite."""
    *others, last = models()
    diverged = run("llama", 3, 2.5, config=RMS, diverged=True, is_finished=False)
    path = saved(tmp_path / "results.json", *others, diverged, command=COMMAND)
    text = call("choose", f"--results={path}", "--parameters=100", "--json").stdout
    standings = json.loads(text)["choice"]["contest"]["standings"]
    losses = {one["model"]: one["loss"] for one in standings}
    assert losses["llama"] is None and losses["gpt"] == pytest.approx(3.0)
    assert last.name == "llama" and not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))


def test_the_command(tmp_path):
    inference = typed_json.parse(Inference, INFERENCE)
    path = saved(tmp_path / "results.json", *models(inference=inference), command=COMMAND)
    done = call("choose", f"--results={path}", "--decode_ms=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ms per decoding step: llama: loss 2.5")
    assert "Train it again (1 run, about 2e6 FLOPs, 2s at the speed of the record):" in done.stdout
    done = call("choose", f"--results={path}", "--parameters=100", "--json")
    assert json.loads(done.stdout)["choice"]["chosen"] == "llama"
    for arguments, message, status in (
        ([], "give one of --flops, --seconds, --parameters", 2),
        (["--flops=1", "--bytes=1"], "--flops and --bytes cannot be combined", 2),
        (["--flops=0"], "--flops=0.0: must be a finite number above 0", 2),
        (["--flops=1e9", "--batch=1"], "--batch: does not apply to --flops", 2),
        (["--decode_ms=1", "--batch=7"], "decoding is measured at 1 and 32", 2),
        (["--flops=1"], "below one training step", 1),
        (["--flops=1e7", "--models=gpt,lama"], "no finished run of 'lama'", 1),
    ):
        done = call("choose", f"--results={path}", *arguments)
        assert (done.returncode, message in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize("name", ["llama", "delta"])
def test_the_sized_command_trains_the_architecture_with_the_budget(name):
    """delta has no recipe of its own. FLOPs are counted as training counts them."""
    record = "mixers" if name == "delta" else "scaling"
    runs = records.read(ROOT / "docs" / "results" / f"{record}.json").runs
    run = next(run for run in runs if run.model == name)
    recipe, *flags, workdir = shlex.split(commands.train_sized(run, 3e12, "runs/here"))[3:]
    assert workdir == "--workdir=runs/here"
    overrides = {}
    for flag in flags:
        field, value = flag.removeprefix("--config.").split("=", 1)
        overrides[field] = ast.literal_eval(value) if value[0] in "-(0123456789" else value
    trained = Config.of(load_config(recipe.removeprefix("--config="), overrides))

    for field in ("architecture", "position", "mixers", "norm", "mlp", "tie_embeddings"):
        value = getattr(trained.model, field)
        of_run = run.config[f"model.{field}"]
        assert value == (tuple(of_run) if isinstance(of_run, list) else of_run)
    assert trained.data.source == "python_packages"
    tokens = trained.train.steps * trained.train.batch_size * trained.model.context_length
    flops = tokens * train_flops_per_token(LanguageModel(trained.model))
    assert flops == pytest.approx(3e12, rel=0.03)
    assert commands.train_sized(run, 2e6, "runs/here") == ""  # no model is so small


def test_choose_starts_without_jax_and_matplotlib():
    code = (
        "import sys, smallgpt_jax.choose; print(sorted({'jax', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_beyond_the_trained_range_only_a_guess_is_offered():
    answer = choosing.choose(SCALING, "flops", 1e15)
    assert answer.choice.refusal == "beyond" and answer.choice.contest is not None
    assert not answer.command and not answer.seeds_command
    text = " ".join(str(answer).split())
    assert text.startswith("1e15 training FLOPs: cannot tell. It is 31.3 times as much as")
    assert "As a guess, train gpt at the size" in text and "--config=gpt:1e15 " in text


def test_an_unfinished_first_seed_is_not_the_nearest_run(tmp_path):
    """It ended after half of its steps, so its command would train twice the steps."""
    first = run("llama", 0, 2.5, config=RMS, is_finished=False, steps_done=1)
    first = dataclasses.replace(first, curve=first.curve[:1])
    path = saved(tmp_path / "results.json", first, *models(), command=COMMAND)
    answer = choosing.choose(path, "flops", 2.4e6)
    assert answer.choice.chosen == "llama"
    assert answer.run_cost == answer.choice.contest.standings[0].cost


def test_wrong_budgets_are_named():
    with pytest.raises(UserError, match=r"^limit=nan: must be a finite number above 0"):
        choosing.choose(SCALING, "flops", math.nan)
    with pytest.raises(UserError, match=r"^budget='flop': must be one of flops, .* did you mean"):
        choosing.choose(SCALING, "flop", 1e13)
