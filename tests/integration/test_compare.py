"""The compare command: what it trains, resumes, takes over, refuses and reports. Most runs are
made up.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
from comparison_helpers import FakeTrain, run, saved, untrained_run
from conftest import ROOT, call, load_config
from run_helpers import SMALL, flags_of

from smallgpt_jax import models
from smallgpt_jax.evaluation import inference_cost
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.run.workdir import check_workdir
from smallgpt_jax.training import trainer

STEPS = (
    "--config.train.steps=8",
    "--config.train.eval_every=4",
    "--config.train.log_every=2",
    "--config.train.checkpoint_every=4",
    "--config.optimizer.decay_steps=8",
)
TINY = ("compare", "--config=configs/compare/paper.py:tiny", *STEPS)
TIME = 64
INF = math.inf


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text_file):
    """Returns the folder of a comparison of gpt and pgpt, whose losses are 3.0 to 3.3. Tests must
    not change it.
    """

    def loss_of(config) -> float:
        is_pgpt = config.model.architecture == "pgpt"
        return 3 + 0.2 * is_pgpt + 0.1 * (config.train.seed % 2)

    output = tmp_path_factory.mktemp("compared") / "out"
    measured = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_and_evaluate", FakeTrain(loss_of))
        patch.setattr(
            inference_cost, "measure_inference", lambda folder: measured.append(folder.name)
        )
        done = call(
            *TINY,
            f"--config.data.source={text_file}",
            f"--output={output}",
            "--config.compare.names=gpt,pgpt",
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt" in done.stdout and str(output / "report.html") in done.stdout
    assert measured == [f"{name}-seed{seed}" for seed in (1337, 1338) for name in ("gpt", "pgpt")]
    return output


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


# ------------------------------------------------------------------ reports
def test_the_record_has_the_metrics_and_costs_of_the_runs(compared):
    runs = results(compared)["runs"]
    assert [(one["name"], one["seed"]) for one in runs] == [
        (name, seed) for seed in (1337, 1338) for name in ("gpt", "pgpt")
    ]
    for one in runs:
        folder = compared / "runs" / f"{one['name']}-seed{one['seed']}"
        evaluations = [
            line for line in read_lines(folder / "metrics.jsonl") if line["split"] == "eval"
        ]
        flops = train_flops_per_token(models.LanguageModel(read_config(folder).model))
        for point, line in zip(one["curve"], evaluations, strict=True):
            tokens = line["step"] * 8 * TIME
            assert (point["step"], point["loss"]) == (line["step"], line["loss"])
            assert (point["tokens"], point["flops"]) == (tokens, tokens * flops)
            assert point["seconds"] == pytest.approx(tokens / 1000)  # at 1,000 tokens per second
        assert one["memory_bytes"] == 2 * 10**6


@pytest.mark.slow
@pytest.mark.draws
def test_results_json_gives_the_same_report(compared, tmp_path):
    done = call("compare", f"--results={compared / 'results.json'}", f"--output={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    before, now = ((folder / "report.md").read_text() for folder in (compared, tmp_path))
    assert now.rpartition("\n    python")[0] == before.rpartition("\n    python")[0]
    assert {**results(tmp_path), "command": ""} == {**results(compared), "command": ""}
    assert (tmp_path / "answer.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and page.count("<img") == 3


def test_existing_runs_are_reported_finished_or_not(compared, tmp_path):
    partial, source = tmp_path / "partial", compared / "runs" / "gpt-seed1337"
    partial.mkdir()
    for name in ("config.json", "store.json", "tokenizer", "sessions.jsonl"):
        (partial / name).symlink_to(source / name)
    lines = [json.dumps(line) for line in read_lines(source / "metrics.jsonl") if line["step"] <= 4]
    (partial / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    output = tmp_path / "report"
    done = call("compare", f"--workdirs={partial},{compared}/runs/pgpt-*", f"--output={output}")
    assert done.returncode == 0, done.stderr
    markdown = (output / "report.md").read_text()
    assert "Unfinished: partial, seed 1337, at step 4 of 8." in markdown
    assert "| partial | 1337 | 4 of 8 | 4.1000 |" in markdown
    before, now = (
        [one for one in results(folder)["runs"] if one["name"] == "pgpt"]
        for folder in (compared, output)
    )
    assert now == before and len(now) == 2
    # A report of other runs is not overwritten.
    before = (compared / "report.md").read_bytes()
    done = call("compare", f"--workdirs={partial}", f"--output={compared}")
    assert done.returncode == 1 and "contains the report of other runs" in done.stderr
    assert (compared / "report.md").read_bytes() == before


def test_a_pattern_that_ends_with_a_slash_matches_only_folders(tmp_path):
    (tmp_path / "a.txt").write_text("no run")
    (tmp_path / "b").mkdir()
    done = call("compare", f"--workdirs={tmp_path}/*/", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {tmp_path}/b: not a run, ")


# ------------------------------------------------------------------ training
@pytest.fixture
def compare(text_file, tmp_path, monkeypatch):
    """Returns a function that runs `compare` of gpt with FakeTrain in a folder of tmp_path."""

    def compared(output: str, *arguments: str, loss_of=lambda config: 3.0):
        fake = FakeTrain(loss_of)
        monkeypatch.setattr(trainer, "train_and_evaluate", fake)
        monkeypatch.setattr(inference_cost, "measure_inference", lambda folder: None)
        done = call(
            *TINY,
            f"--config.data.source={text_file}",
            f"--output={tmp_path / output}",
            "--config.compare.names=gpt",
            *arguments,
        )
        return done, fake

    return compared


@pytest.mark.slow
def test_a_grid_horizons_and_a_second_start(compare, tmp_path):
    """The grid chooses twice the rate. The shorter run starts where its decay starts. A second
    start trains nothing, and gives the same record.
    """

    def loss_of(config) -> float:
        rate = config.optimizer.learning_rate
        return INF if rate > 0.01 else abs(math.log2(rate / 6e-3)) + config.train.seed / 1e4

    arguments = (
        "--config.train.steps=80",
        "--config.optimizer.decay_steps=80",
        "--config.optimizer.schedule=wsd",
        "--config.compare.horizons=0.5,1",
        "--config.compare.learning_rates=1,2",
        "--config.compare.seeds=1",
    )
    done, fake = compare("out", *arguments, loss_of=loss_of)
    assert (done.returncode, done.stderr) == (0, "")
    assert fake.trained == [
        ("gpt-seed1336", 80),
        ("gpt-seed1336-lr2x", 80),
        ("gpt-seed1336-lr4x", 80),
        ("gpt-seed1337-lr2x", 80),
        ("gpt-seed1337-lr2x-x0.5", 4),
    ]
    assert "[5/5] gpt, seed 1337, learning rate × 2, horizon × 0.5" in done.stdout
    record = results(tmp_path / "out")
    assert [(one["horizon"], one["config"]["train.steps"]) for one in record["runs"]] == [
        (1.0, 80),
        (0.5, 40),
    ]
    rates = record["learning_rates"]["gpt"]["rates"]
    assert [(rate["multiple"], rate["diverged"]) for rate in rates] == [
        (1.0, False),
        (2.0, False),
        (4.0, True),
    ]
    done, fake = compare("out", *arguments, loss_of=loss_of)
    assert (done.returncode, fake.trained) == (0, [])
    assert "gpt-seed1336-lr4x: diverged in an earlier session; skipped" in done.stdout
    assert results(tmp_path / "out") == record


def test_the_report_is_written_when_a_run_fails(compare, tmp_path):
    """The failed run is the reference's first seed; the report has the others."""

    def loss_of(config) -> float:
        if config.train.seed == 1337:
            config.train.refuse("batch_size", "does not fit into memory")
        return 3.0

    done, _ = compare("out", loss_of=loss_of)
    assert done.returncode == 1 and done.stderr.count("\n") <= 2
    assert "gpt-seed1337: could not be trained: config.train.batch_size=" in done.stderr
    runs = results(tmp_path / "out")["runs"]
    assert [(one["seed"], one["is_finished"]) for one in runs] == [(1337, False), (1338, True)]


def test_train_false_reports_the_runs_so_far(compare, tmp_path):
    compare("out", "--config.compare.seeds=1")
    done, fake = compare("out", "--config.compare.train=false")
    assert (done.returncode, fake.trained) == (0, [])
    assert [one["seed"] for one in results(tmp_path / "out")["runs"]] == [1337]


def test_seeds_are_added_and_the_record_says_so(compare, tmp_path):
    """Which model is better changes with the seed."""
    losses = {"gpt": (3.1, 3.0, 3.2), "pgpt": (3.0, 3.1, 3.1)}

    def loss_of(config) -> float:
        return losses[config.model.architecture][config.train.seed - 1337]

    rounds = ("--config.compare.names=gpt,pgpt", "--config.compare.most_seeds=3")
    done, fake = compare("out", *rounds, loss_of=loss_of)
    assert (done.returncode, len(fake.trained)) == (0, 6), done.stderr
    assert "Verdicts hold after each seed" in done.stdout
    assert results(tmp_path / "out")["seeds_as_needed"] is True


def test_a_dry_run_says_what_is_missing(compare, tmp_path):
    """Two of four runs of 8 steps are finished. Nothing is trained, and no report is written."""
    compare("out", "--config.compare.seeds=1", "--config.compare.names=gpt,pgpt")
    (tmp_path / "out" / "report.md").unlink()
    arguments = ("--config.compare.names=gpt,pgpt", "--dry_run", "--config.compare.most_seeds=5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smallgpt_jax.comparison.budget.steps_per_second", lambda run: 2.0)
        done, fake = compare("out", *arguments)
    assert (done.returncode, done.stderr, fake.trained) == (0, "", []), done.stderr
    gpt = read_config(tmp_path / "out" / "runs" / "gpt-seed1337")
    flops = train_flops_per_token(models.LanguageModel(gpt.model)) * 8 * 8 * TIME
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("gpt ")]
    assert row.split()[1:] == [
        "1",
        f"{models.num_parameters(models.LanguageModel(gpt.model)):,}",
        "4,096",
        "4,096",
        f"{flops:.2e}",
        "4s",
    ]
    assert "2 runs to train, 2 more are finished." in done.stdout
    assert "8s of training at the speed measured on" in done.stdout
    assert "with the seeds that may be added, at most 8 runs" in done.stdout
    assert "nothing is repeated" in done.stdout
    assert not (tmp_path / "out" / "report.md").exists()


# ------------------------------------------------------------------ records of other machines
@pytest.mark.slow
def test_continues_from_records(compare, tmp_path):
    """A run that is removed from a record is trained again; all others, and those of the grid, are
    taken over. The record is the only file of the first comparison that is read.
    """
    grid = ("--config.compare.learning_rates=1,2", "--config.compare.max_added_learning_rates=0")

    def loss_of(config) -> float:
        return 3 - config.optimizer.learning_rate + config.train.seed / 1e4

    _, fake = compare("here", *grid, loss_of=loss_of)
    assert len(fake.trained) == 4
    whole = results(tmp_path / "here")
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**whole, "runs": whole["runs"][:1]}))
    shutil.rmtree(tmp_path / "here")
    done, fake = compare("more", *grid, f"--results={path}", loss_of=loss_of)
    assert (done.returncode, done.stderr) == (0, "")
    assert fake.folders == ["gpt-seed1338-lr2x"]

    def without_paths(record: dict) -> dict:
        runs = []
        for one in record["runs"]:
            runs.append({**one, "workdir": "", "run": "", "sessions": []})
        return {**record, "command": "", "runs": runs}

    assert without_paths(results(tmp_path / "more")) == without_paths(whole)


def test_trains_what_a_record_lacks(compare, tmp_path):
    """An unfinished run is trained, and a diverged one is not. Other names are left out, and said
    so.
    """
    compare("here", "--config.compare.names=gpt,pgpt")
    path = tmp_path / "here" / "results.json"
    content = json.loads(path.read_text())
    for one in content["runs"]:
        if one["name"] == "gpt":
            one["is_finished"], one["diverged"] = False, one["seed"] == 1338
    path.write_text(json.dumps(content))
    done, fake = compare("more", f"--results={path}")
    assert (done.returncode, done.stderr, fake.folders) == (0, "", ["gpt-seed1337"])
    assert "--results: pgpt is not in this comparison; left out\n" in done.stdout
    assert [(one["seed"], one["diverged"]) for one in results(tmp_path / "more")["runs"]] == [
        (1337, False),
        (1338, True),
    ]


def test_refuses_other_records(compare, tmp_path, text_file):
    """Before anything is trained."""
    compare("here", "--config.compare.seeds=1")
    other = tmp_path / "other.txt"
    other.write_text(Path(text_file).read_text().upper())
    for arguments, message in (
        (
            ["--config.model.num_layers=1"],
            "has another config than this comparison (model.num_layers 4 and 1)",
        ),
        (["--config.optimizer.learning_rate=1e-3"], ", optimizer.learning_rate 0.003 and 0.001)"),
        (["--config.train.steps=12"], "(train.steps 8 and 12"),
        (["--config.train.eval_steps=1"], "its loss is a mean over"),
        (
            [f"--config.data.source={other}"],
            "gpt, seed 1337: was trained on another text than this comparison",
        ),
        (["--workdirs=x"], "--results may be combined with --config"),
    ):
        done, fake = compare("more", f"--results={tmp_path / 'here' / 'results.json'}", *arguments)
        assert done.returncode in (1, 2) and message in done.stderr, done.stderr
        assert done.stderr.count("\n") <= 2 and not fake.trained
        assert not (tmp_path / "more" / "runs").exists()


# ------------------------------------------------------------------ refusals
def test_refuses_to_continue_another_comparison(compared, tmp_path):
    """A comparison with other settings than the runs in its folder is refused before any run is
    trained: another model, fewer steps, and another text.
    """
    source = read_config(compared / "runs" / "gpt-seed1337").data.source
    common = (*TINY, f"--config.data.source={source}", "--config.compare.names=pgpt,gpt")
    for flag, message in (
        ("--config.train.steps=6", "existing run of 8 steps, more than config.train.steps=6"),
        ("--config.model.d_model=128", "existing run with another config: model.d_model was 64"),
    ):
        done = call(*common, f"--output={compared}", flag)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert "another --output" in done.stderr and "--workdir" not in done.stderr, done.stderr
    shutil.copytree(compared / "runs" / "gpt-seed1337", tmp_path / "runs" / "gpt-seed1337")
    store = tmp_path / "runs" / "gpt-seed1337" / "store.json"
    described = json.loads(store.read_text())
    described["splits"]["train"]["tokens"] += 1
    store.write_text(json.dumps(described))
    done = call(*common, f"--output={tmp_path}")
    assert done.returncode == 1 and "text has changed" in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt-seed1337"]


def test_names_runs_that_ignore_a_common_field(tmp_path):
    done = call(
        "compare",
        "--config=configs/compare/paper.py:quickstart",
        "--config.compare.names=gpt,lgpt",
        "--config.model.d_model=64",
        "--config.compare.texts=wrong",
        f"--output={tmp_path / 'out'}",
    )
    assert done.stdout == (
        "--config.model.d_model=64: does not apply to lgpt, which sets the field to 192; use "
        "--config.runs.lgpt.model.d_model\n"
    )
    assert done.returncode == 1 and "is not NAME=SOURCE" in done.stderr
    assert not (tmp_path / "out").exists()
    for flag, message in (
        ("--config.compare.names=gpt,foo", "no run 'foo'; choose from cgpt, gpt, lgpt, pgpt"),
        ("--config.runs.foo.model.d_model=64", "the comparison has no run 'foo'"),
    ):
        done = call(
            "compare",
            "--config=configs/compare/paper.py:quickstart",
            "--config.model.d_model=64",
            f"--output={tmp_path / 'out'}",
            flag,
        )
        assert message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_refuses_runs_of_different_texts(tmp_path):
    for name, first in (("a", 1000), ("c", 2000)):
        text = "\n\n".join(str(n) * 40 for n in range(first, first + 1000))
        (tmp_path / f"{name}.txt").write_text(text)
        untrained_run(tmp_path / name, tmp_path / f"{name}.txt")
    folders = f"{tmp_path / 'a'},{tmp_path / 'c'}"
    done = call("compare", f"--workdirs={folders}", f"--output={tmp_path / 'report'}")
    assert done.returncode == 1 and done.stderr.count("\n") <= 2
    assert "cannot be compared, since their texts differ" in done.stderr
    assert not (tmp_path / "report").exists()


PAPER = "--config=configs/compare/paper.py:tiny"


@pytest.mark.parametrize(
    "arguments, message, status",
    [
        (["--workdirs="], "--workdirs: the list is empty", 1),
        (["--workdirs=HERE/x"], "no such folder; give the workdir of a run", 1),
        (["--workdirs=HERE"], "not a run, without config.json; give the workdir of a run", 1),
        (["--results="], "--results: the list is empty", 1),
        (["--results=HERE/none.json"], "none.json: No such file", 1),
        ([], "give either --config", 2),
        (["--workdirs=HERE", "--results=x"], "give either --config", 2),
        (["--workdirs=HERE", "--dry_run"], "--dry_run: needs --config", 2),
        ([PAPER, "--topology=h100:1"], "--topology: needs --dry_run", 2),
        (["--workdirs=HERE", "--sample=2"], "--sample: needs --verify", 2),
        ([PAPER, "--only=gpt"], "--only: needs --verify or --against", 2),
        (["--verify=a", "--dry_run"], "--dry_run: cannot be combined with --verify", 2),
        (["--verify=a", "--against=b"], "--verify: cannot be combined with --against", 2),
        (
            [PAPER, "--config.compare.names=gpt", "--config.compare.texts=x=/none.txt"],
            "/none.txt",
            1,
        ),
        (
            [PAPER, "--config.compare.names=gpt", "--config.compare.contexts=1,99999"],
            "config.compare.contexts=(1, 99999): the validation split of the text 'own' is "
            "shorter than",
            1,
        ),
        (["--config=configs/gpt.py:tiny"], "this is the recipe of one run, not a comparison", 1),
        (["--config=configs/compare/paper.py:huge"], "no size 'huge'", 2),
        (
            ["--workdirs=a", "--config.compare.learning_rates=1,2"],
            "--config.compare.learning_rates: cannot override a field without --config",
            2,
        ),
        (
            ["--workdirs=HERE", f"--logged={ROOT / 'README.md'}"],
            "not a CSV file with the columns model,step,val_loss",
            1,
        ),
    ],
)
def test_bad_flags(arguments, message, status, text_file, tmp_path):
    arguments = [argument.replace("HERE", str(tmp_path)) for argument in arguments]
    if PAPER in arguments:
        arguments.append(f"--config.data.source={text_file}")
    done = call("compare", *arguments, f"--output={tmp_path / 'out'}")
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_a_report_of_other_runs_is_not_replaced_by_a_merged_one(tmp_path):
    path = saved(tmp_path / "results.json", run("gpt", 1, 3.0))
    (tmp_path / "runs").mkdir()
    before = path.read_bytes()
    done = call("compare", f"--results={path}", f"--output={tmp_path}")
    assert done.returncode == 1 and "contains the report of other runs" in done.stderr
    assert path.read_bytes() == before


def test_another_process_starts_a_run_during_the_check(tmp_path, monkeypatch):
    """The other process writes the config just after this process has found none."""
    exists = Path.exists

    def exists_before_the_start(path: Path) -> bool:
        is_there = exists(path)
        if path.name == CONFIG_FILE:
            path.write_text("{}")
        return is_there

    monkeypatch.setattr(Path, "exists", exists_before_the_start)
    check_workdir(tmp_path, load_config("gpt"))


# ------------------------------------------------------------------ real training
@pytest.mark.slow
def test_a_real_comparison(text_file, tmp_path):
    """The shorter run equals one that is trained alone. The highest rate diverges."""
    fields = (
        "compare",
        "--config=configs/compare/paper.py:tiny",
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.compare.decoding=false",
        *flags_of(SMALL),
        "--config.optimizer.schedule=wsd",
        "--config.optimizer.warmup_steps=2",
        "--config.optimizer.decay_fraction=0.25",
        "--config.train.eval_every=4",
        "--config.train.log_every=2",
        f"--config.data.source={text_file}",
    )
    grid = ("--config.compare.learning_rates=1,1e33", "--config.compare.max_added_learning_rates=0")
    for name, arguments in (
        ("horizons", ("--config.train.steps=16", "--config.compare.horizons=0.5,1", *grid)),
        ("alone", ("--config.train.steps=8",)),
    ):
        done = call(*fields, *arguments, f"--output={tmp_path / name}")
        assert (done.returncode, done.stderr) == (0, "")
    record = results(tmp_path / "horizons")
    _, short = record["runs"]
    (alone,) = results(tmp_path / "alone")["runs"]
    losses, expected = (
        [(point["step"], point["loss"]) for point in one["curve"]] for one in (short, alone)
    )
    assert losses == expected and [step for step, _ in losses] == [4, 8]
    assert short["sessions"][0]["first_step"] == 6
    rates = record["learning_rates"]["gpt"]["rates"]
    assert [rate["diverged"] for rate in rates] == [False, True]
    lines = read_lines(tmp_path / "horizons" / "runs" / "gpt-seed1336" / "metrics.jsonl")
    assert [line["loss"] for line in lines if line["split"] == "eval"][-1] == rates[0]["loss"]


# ------------------------------------------------------------------ held-out sizes
def law(config) -> float:
    """Returns a loss whose logarithm is linear in those of the size and the tokens."""
    parameters = models.num_parameters(models.LanguageModel(config.model))
    tokens = config.train.steps * config.train.batch_size * config.model.context_length
    return 60 * parameters**-0.1 * tokens**-0.15


@pytest.fixture
def scaling(text_file, tmp_path, monkeypatch):
    """Returns a function that runs a scaling comparison of gpt, whose losses follow `law`."""

    def compared(*arguments: str):
        fake = FakeTrain(law)
        monkeypatch.setattr(trainer, "train_and_evaluate", fake)
        done = call(
            "compare",
            "--config=configs/compare/scaling.py:tiny",
            "--config.compare.names=gpt@20k,gpt@45k,gpt@77k,gpt@0.2M",
            "--config.compare.learning_rates=()",
            "--config.compare.seeds=1",
            "--config.model.num_layers=2",
            f"--config.data.source={text_file}",
            "--config.data.tokenizer=bytes",
            f"--output={tmp_path / 'out'}",
            *arguments,
        )
        return done, fake

    return compared


@pytest.mark.slow
def test_held_out_runs_are_predicted_before_they_start(scaling, tmp_path):
    """The predictions are right, and are not changed by a second start, nor if the record is taken
    over elsewhere. Held-out runs that have started forbid a later prediction.
    """
    output = tmp_path / "out"
    done, fake = scaling("--config.compare.train_held_out=false")
    assert done.returncode == 0, done.stderr
    assert len(fake.trained) == 9 and not any("0.2M" in folder for folder in fake.folders)
    assert "predictions of 3 held-out runs" in done.stdout
    before = (output / "predictions.json").read_bytes()
    content = json.loads(before)
    assert content["command"].startswith("python -m smallgpt_jax.compare ")
    assert "No predicted run is finished yet." in (output / "report.md").read_text()

    done, fake = scaling()
    assert (done.returncode, len(fake.trained)) == (0, 3)
    assert (output / "predictions.json").read_bytes() == before
    record = results(output)
    assert record["predictions"] == content and len(record["runs"]) == 12
    losses = [one["curve"][-1]["loss"] for one in record["runs"] if "0.2M" in one["name"]]
    predicted = [row["loss"] for row in content["predictions"]["parameters"]]
    assert losses == pytest.approx(predicted, rel=1e-6)

    shutil.copy(output / "results.json", tmp_path / "record.json")
    (output / "predictions.json").unlink()
    done, fake = scaling()
    assert (done.returncode, fake.trained) == (0, [])
    assert "has started without predictions.json; no predictions are made" in done.stdout
    assert results(output)["predictions"] is None

    shutil.rmtree(output)
    done, fake = scaling(f"--results={tmp_path / 'record.json'}")
    assert (done.returncode, fake.trained) == (0, [])
    assert (output / "predictions.json").read_bytes() == before


def test_refuses_what_cannot_be_predicted(scaling, tmp_path):
    done, fake = scaling("--config.compare.names=gpt@20k,gpt@45k,gpt@0.2M")
    assert done.returncode == 1 and not fake.trained
    assert (
        "config.compare.held_out='0.2M': gpt has too few other sizes for a law; train 3 or more"
        in done.stderr
    )
