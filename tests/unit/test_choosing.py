"""What `choose` prints and returns beside the choice itself: commands, the nearest run, JSON; and its
flags.
"""

import json
import subprocess
import sys

import pytest
from comparison_helpers import INFERENCE, run, saved
from conftest import ROOT, call

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import Inference
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import choosing

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
    assert answer.command.endswith(f"{COMMAND[6:]} --config.compare.names=llama")
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
    path = saved(tmp_path / "results.json", *models(spread=0.4), command=COMMAND)
    answer = choosing.choose(path, "parameters", 100)
    assert answer.choice.chosen is None
    assert "--config.compare.seeds=" in answer.seeds_command
    assert "More seeds decide:" in str(answer)


@pytest.mark.parametrize(
    "command, expected",
    [
        (COMMAND, f"{COMMAND} --config.compare.seeds=5"),
        (f"{COMMAND} --config.compare.seeds=2", f"{COMMAND} --config.compare.seeds=5"),
        (f"{COMMAND} --results=a.json", f"{COMMAND} --config.compare.seeds=5"),
        ("python -m smallgpt_jax.compare --results=a,b --output=c", ""),  # trains nothing
        ("python train.py", ""),
        ('python -m smallgpt_jax.compare "', ""),
        ("", ""),
    ],
)
def test_commands_of_comparisons(command, expected):
    again = choosing.rerun(command, "--config.compare.seeds=5", without=("--results",))
    assert again.partition(" -m ")[2] == expected.partition(" -m ")[2]


def test_json_has_no_infinity(tmp_path):
    """llama has a diverged seed, so its loss is infinite."""
    *others, last = models()
    diverged = run("llama", 3, 2.5, config=RMS, diverged=True, is_finished=False)
    path = saved(tmp_path / "results.json", *others, diverged, command=COMMAND)
    content = choosing.json_content(choosing.choose(path, "parameters", 100))
    text = json.dumps(content, allow_nan=False)
    losses = {one["model"]: one["loss"] for one in content["choice"]["contest"]["standings"]}
    assert losses["llama"] is None and losses["gpt"] == pytest.approx(3.0) and text
    assert last.name == "llama"


def test_the_command(tmp_path):
    inference = records.parse(Inference, INFERENCE)
    path = saved(tmp_path / "results.json", *models(inference=inference), command=COMMAND)
    done = call("choose", f"--results={path}", "--decode_ms=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ms per decoding step: llama: loss 2.5")
    assert "Train it:" in done.stdout
    done = call("choose", f"--results={path}", "--parameters=100", "--json")
    assert json.loads(done.stdout)["choice"]["chosen"] == "llama"
    for arguments, message, status in (
        ([], "give one of --flops, --seconds, --parameters", 2),
        (["--flops=1", "--bytes=1"], "--flops and --bytes cannot be combined", 2),
        (["--flops=0"], "--flops=0.0: must be a finite number above 0", 2),
        (["--flops=1e9", "--batch=1"], "--batch: does not apply to --flops", 2),
        (["--decode_ms=1", "--batch=7"], "decoding is measured at 1 and 32", 2),
        (["--flops=1"], "below one training step", 1),
    ):
        done = call("choose", f"--results={path}", *arguments)
        assert (done.returncode, message in done.stderr) == (status, True), done.stderr


@pytest.mark.slow
def test_choose_starts_without_jax_and_matplotlib():
    code = (
        "import sys, smallgpt_jax.choose; print(sorted({'jax', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_beyond_the_trained_range_no_command_is_offered():
    answer = choosing.choose(ROOT / "docs" / "results" / "scaling.json", "flops", 1e15)
    assert answer.choice.refusal == "beyond" and answer.choice.contest is not None
    assert not answer.command and not answer.seeds_command


def test_an_unknown_budget_is_named():
    with pytest.raises(UserError, match=r"^budget='flop': must be one of flops, .* did you mean"):
        choosing.choose(ROOT / "docs" / "results" / "scaling.json", "flop", 1e13)
