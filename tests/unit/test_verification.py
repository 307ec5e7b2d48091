"""Checks of records: each way to change an honest record is found, or named here as one that only
training can find.
"""

import copy
import json
import math
import os

import jax
import numpy as np
import pytest
from conftest import ROOT

from smallgpt_jax.analysis import record as records
from smallgpt_jax.comparison.counts import Counts
from smallgpt_jax.devices.platform import processor_identity
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.provenance import package_versions
from smallgpt_jax.storage import typed_json
from smallgpt_jax.verification.bands import BAND, BITS, NO_BAND, OUTSIDE, SEED, compare_curves
from smallgpt_jax.verification.bundle import open_bundle, write_bundle
from smallgpt_jax.verification.cached_counts import CachedCounts
from smallgpt_jax.verification.problems import CONTRADICTION, SUSPICION
from smallgpt_jax.verification.record_checks import check_record, config_of
from smallgpt_jax.verification.retraining import machine_differences
from smallgpt_jax.verification.sample import Sample, chance_to_pass
from smallgpt_jax.verification.verification import verify

NAMES = ("gpt@45k", "llama@45k")


@pytest.fixture(scope="module")
def honest() -> dict:
    """All seeds and horizons of two models of our own record."""
    content = json.loads((ROOT / "docs/results/scaling.json").read_text())
    content["runs"] = [run for run in content["runs"] if run["name"] in NAMES]
    content["learning_rates"] = {name: content["learning_rates"][name] for name in NAMES}
    return content


def problems(content: dict, honest: dict) -> set[tuple[str, str]]:
    """Returns (kind, check) pairs. Instead of tracing models, counts are those of `honest`."""
    counts = {}
    for run in honest["runs"]:
        counts[run["config"]["model.norm"]] = Counts(
            run["components"],
            run["active_parameters"],
            run["flops_per_token"],
            optimizer_flops=0,
            uncounted=0.0,
            flops_problem="",
            weight_bytes=0,
        )
    record = typed_json.parse(records.Record, content)
    checked = check_record(record, lambda config: counts[config.model.norm])
    return {(problem.kind, problem.check) for problem in checked}


def run_of(content: dict, seed: int, horizon: float = 1.0, name: str = NAMES[0]) -> dict:
    for run in content["runs"]:
        if (run["name"], run["seed"], run["horizon"]) == (name, seed, horizon):
            return run
    raise KeyError(name)


def set_loss(run: dict, point: dict, loss: float, careful: bool = True) -> None:
    """A careful forger also changes bits per byte, and keeps the loss a mean of float32 sums."""
    if careful:
        loss = float(np.float32(loss * point["targets"])) / point["targets"]
        point["bits_per_byte"] *= loss / point["loss"]
    point["loss"] = loss


def test_an_honest_record_has_no_problem(honest):
    assert problems(honest, honest) == set()


def changed_loss(content):
    run = run_of(content, 1337)
    set_loss(run, run["curve"][-1], run["curve"][-1]["loss"] - 0.05, careful=False)


def changed_loss_and_bits_per_byte(content):
    run = run_of(content, 1337)
    for point in run["curve"]:
        point["loss"] -= 0.0123456789
        split = run["text"]["description"]["splits"]["validation"]
        point["bits_per_byte"] = (
            point["loss"] / math.log(2) / (split["text_bytes"] / split["tokens"])
        )


def better_curve_of_the_longest_run(content):
    run = run_of(content, 1337)
    for point in run["curve"]:
        set_loss(run, point, point["loss"] - 0.05)


def better_curve_of_a_shorter_run(content):
    run = run_of(content, 1338, 0.5)
    for point in run["curve"]:
        set_loss(run, point, point["loss"] - 0.05)


def swapped_seeds_of_one_horizon(content):
    one, other = run_of(content, 1337), run_of(content, 1338)
    one["curve"], other["curve"] = other["curve"], one["curve"]


def another_learning_rate(content):
    run_of(content, 1338)["config"]["optimizer.learning_rate"] *= 2


def a_learning_rate_that_the_grid_did_not_choose(content):
    for run in content["runs"]:
        if run["name"] == NAMES[1]:
            run["config"]["optimizer.learning_rate"] *= 2


def another_warmup(content):
    run_of(content, 1339)["config"]["optimizer.warmup_steps"] = 20


def another_end_of_the_decay(content):
    for seed in (1337, 1338, 1339):
        run_of(content, seed, 0.25)["config"]["optimizer.decay_steps"] = 100


def larger_batch(content):
    for run in content["runs"]:
        run["config"]["train.batch_size"] = 16


def shorter_training(content):
    run = run_of(content, 1337)
    run["curve"] = run["curve"][:-1]


def training_that_ended_early(content):
    run_of(content, 1337)["steps_done"] = 400


def more_steps_in_the_config(content):
    run = run_of(content, 1337)
    run["config"]["train.steps"] = run["steps_done"] = 880
    run["curve"][-1]["step"] = 880


def other_text(content):
    text = run_of(content, 1337)["text"]["description"]
    text["fingerprints"]["train"] = "0" * 32


def other_tokenizer(content):
    run_of(content, 1338)["text"]["tokenizer"] = "0" * 16


def fewer_evaluation_rows(content):
    for point in run_of(content, 1337)["curve"]:
        point["targets"] //= 2


def more_evaluation_rows_than_the_config(content):
    for run in content["runs"]:
        for point in run["curve"]:
            point["targets"] *= 2


def copied_seed(content):
    for horizon in (1.0, 0.5, 0.25, 0.125):
        copied = copy.deepcopy(run_of(content, 1337, horizon)["curve"])
        run_of(content, 1339, horizon)["curve"] = copied


def copied_seed_with_noise(content):
    noise = np.random.default_rng(0)
    for horizon in (1.0, 0.5, 0.25, 0.125):
        run = run_of(content, 1339, horizon)
        run["curve"] = copy.deepcopy(run_of(content, 1337, horizon)["curve"])
        for point in run["curve"]:
            offset = noise.normal(0, 2e-4)
            if horizon < 1 and point["step"] <= run["sessions"][0]["first_step"]:
                longest = run_of(content, 1339)["curve"]
                same = next(other for other in longest if other["step"] == point["step"])
                offset = same["loss"] - point["loss"]
            set_loss(run, point, point["loss"] + offset)


def one_seed_of_many(content):
    content["runs"] = [run for run in content["runs"] if run["seed"] != 1338]


def another_seed_in_the_config(content):
    run_of(content, 1337)["config"]["train.seed"] = 7


def fewer_parameters(content):
    for run in content["runs"]:
        run["parameters"] = run["active_parameters"] = run["parameters"] - 16
        run["components"]["head"] -= 16


def fewer_active_parameters(content):
    run_of(content, 1337)["active_parameters"] -= 1000


def fewer_flops(content):
    for run in content["runs"]:
        run["flops_per_token"] *= 0.9
        for point in run["curve"]:
            point["flops"] *= 0.9


def fewer_flops_at_a_step(content):
    run_of(content, 1337)["curve"][-1]["flops"] *= 0.9


def fewer_tokens(content):
    run_of(content, 1337)["curve"][-1]["tokens"] -= 2048


def time_that_runs_back(content):
    run_of(content, 1337)["curve"][-1]["seconds"] = 1.0


def low_loss_before_training(content):
    run = run_of(content, 1337)
    run["curve"].insert(0, {**run["curve"][0], "step": 0, "tokens": 0, "flops": 0, "seconds": 0})


def wider_model(content):
    run_of(content, 1337)["config"]["model.d_model"] = 32


def predictions_after_the_fact(content):
    content["predictions"]["held_out"] = "45k"


TAMPERINGS = {
    changed_loss: "bits per byte",
    changed_loss_and_bits_per_byte: "loss",
    better_curve_of_the_longest_run: "horizons",
    better_curve_of_a_shorter_run: "horizons",
    swapped_seeds_of_one_horizon: "horizons",
    another_learning_rate: "configs",
    a_learning_rate_that_the_grid_did_not_choose: "learning rate",
    another_warmup: "configs",
    another_end_of_the_decay: "schedule",
    larger_batch: "tokens",
    shorter_training: "steps",
    training_that_ended_early: "steps",
    more_steps_in_the_config: "tokens",
    other_text: "text",
    other_tokenizer: "text",
    fewer_evaluation_rows: "evaluation rows",
    more_evaluation_rows_than_the_config: "evaluation rows",
    copied_seed: "copied curve",
    copied_seed_with_noise: "copied curve",
    one_seed_of_many: "seeds",
    another_seed_in_the_config: "seed",
    fewer_parameters: "parameters",
    fewer_active_parameters: "parameters",
    fewer_flops: "FLOPs",
    fewer_flops_at_a_step: "FLOPs",
    fewer_tokens: "tokens",
    time_that_runs_back: "seconds",
    low_loss_before_training: "first loss",
    wider_model: "configs",
    predictions_after_the_fact: "predictions",
}
SUSPICIOUS = {copied_seed_with_noise, one_seed_of_many}


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda function: function.__name__)
def test_tampering_is_found_without_training(honest, tamper):
    content = copy.deepcopy(honest)
    tamper(content)
    kind = SUSPICION if tamper in SUSPICIOUS else CONTRADICTION
    assert (kind, TAMPERINGS[tamper]) in problems(content, honest)


def careful_change_of_all_losses_of_a_seed(content):
    for horizon in (1.0, 0.5, 0.25, 0.125):
        run = run_of(content, 1337, horizon)
        for point in run["curve"]:
            set_loss(run, point, point["loss"] - 0.0625)


def swapped_seeds(content):
    for horizon in (1.0, 0.5, 0.25, 0.125):
        one, other = run_of(content, 1337, horizon), run_of(content, 1338, horizon)
        one["curve"], other["curve"] = other["curve"], one["curve"]


def consecutive_seeds_that_were_chosen(content):
    content["runs"] = [run for run in content["runs"] if run["seed"] == 1338]


@pytest.mark.parametrize(
    "tamper",
    [
        careful_change_of_all_losses_of_a_seed,
        swapped_seeds,
        consecutive_seeds_that_were_chosen,
    ],
    ids=lambda function: function.__name__,
)
def test_tampering_that_only_training_can_find(honest, tamper):
    """docs/records.md names these."""
    content = copy.deepcopy(honest)
    tamper(content)
    assert problems(content, honest) == set()


# ------------------------------------------------------------------ sample
def make_runs(honest) -> tuple:
    return typed_json.parse(records.Record, honest).runs


def test_models_that_would_fill_the_memory_are_not_counted(honest, tmp_path):
    content = copy.deepcopy(run_of(honest, 1337))
    content["config"]["model.d_model"] = 2**30
    config = config_of(typed_json.parse(records.Run, content), False)
    with pytest.raises(UserError, match="d_model=1073741824: models are counted up to 131,072"):
        CachedCounts(tmp_path)(config)


def test_the_draw_follows_from_the_record_and_the_nonce(honest):
    runs = make_runs(honest)
    draws = {
        (digest, nonce): [
            (run.name, run.seed, run.horizon)
            for run in Sample(size=4, nonce=nonce).draw(runs, digest, ())
        ]
        for digest in ("a", "b")
        for nonce in ("x", "y")
    }
    assert len({str(draw) for draw in draws.values()}) == 4
    again = Sample(size=4, nonce="x").draw(runs, "a", ())
    assert [(run.name, run.seed, run.horizon) for run in again] == draws["a", "x"]
    longer = Sample(size=8, nonce="x").draw(runs, "a", ())
    assert longer[:4] == again
    assert len({Sample().with_nonce().nonce for _ in range(3)}) == 3


def test_suspected_runs_are_drawn_first(honest):
    runs = make_runs(honest)
    (drawn,) = Sample(size=1, nonce="x").draw(runs, "a", ["llama@45k, seed 1339"])
    assert (drawn.name, drawn.seed) == ("llama@45k", 1339)


def test_a_pattern_selects_names(honest):
    runs = make_runs(honest)
    drawn = Sample(size=99, names="ll*", nonce="x").draw(runs, "a", ())
    assert {run.name for run in drawn} == {"llama@45k"} and len(drawn) == 12
    with pytest.raises(UserError, match="--only=lgpt: the record has no finished run"):
        Sample(names="lgpt").draw(runs, "a", ())


def test_how_likely_wrong_runs_are_missed():
    assert chance_to_pass(10, 1, 3) == pytest.approx(0.7)
    assert chance_to_pass(4, 2, 2) == pytest.approx(1 / 6)
    assert chance_to_pass(3, 2, 2) == 0


# ------------------------------------------------------------------ bands
def how(recorded, trained, variants=(), seeds=(), is_other_machine=False) -> list[str]:
    rows = compare_curves(recorded, trained, variants, seeds, is_other_machine)
    return [row.how for row in rows]


def test_equal_losses_need_no_band():
    assert how({1: 5.0, 2: 4.0}, {1: 5.0, 2: 4.0, 3: 3.0}) == [BITS, BITS]


def test_other_losses_cannot_be_judged_without_variants():
    assert how({1: 5.0}, {1: 5.001}) == [NO_BAND]


def test_the_band_is_that_of_the_variants_so_far():
    variants = [{1: 5.0, 2: 4.01}, {1: 5.0, 2: 4.02}, {1: 5.0, 2: 3.99}]
    trained = {1: 5.0, 2: 4.0}
    assert how({1: 5.0, 2: 4.05}, trained, variants) == [BITS, BAND]
    assert how({1: 5.001, 2: 4.05}, trained, variants) == [OUTSIDE, BAND]
    assert how({1: 5.0, 2: 4.5}, trained, variants) == [BITS, OUTSIDE]


@pytest.mark.parametrize(
    "step, recorded, trained, variants",
    [
        (55, 5.370414, 5.370359, (5.370352, 5.370363, 5.370364, 5.370356)),
        (110, 4.671535, 4.670911, (4.670909, 4.670926, 4.670848, 4.670927)),
    ],
)
def test_another_machine_rounds_more_than_the_variants(step, recorded, trained, variants):
    """A run of llama at 45k parameters, recorded on an AMD EPYC, with variants on an Intel Xeon."""
    of_variants = [{step: loss} for loss in variants]

    def of(loss: float, **options) -> list[str]:
        return how({step: loss}, {step: trained}, of_variants, **options)

    assert of(recorded) == [OUTSIDE]
    assert of(recorded, is_other_machine=True) == [BAND]
    far = recorded + 5 * (recorded - trained)
    assert of(far, is_other_machine=True) == [OUTSIDE]


def test_what_makes_another_machine(honest, monkeypatch):
    content = copy.deepcopy(run_of(honest, 1337))
    content["sessions"][-1] |= {
        "versions": package_versions(),
        "processor": processor_identity(),
        "devices": jax.device_count(),
    }
    assert machine_differences(typed_json.parse(records.Run, content)) == ""
    content["sessions"][-1]["devices"] = 3
    assert machine_differences(typed_json.parse(records.Run, content)).endswith("recorded 3")
    content["sessions"][-1]["devices"] = jax.device_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: set(range(97)), raising=False)
        assert machine_differences(typed_json.parse(records.Run, content)) == "another processor"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
    assert machine_differences(typed_json.parse(records.Run, content)) == "another processor"


def test_a_run_that_rounding_changes_as_much_as_a_seed_is_compared_as_a_seed():
    variants = [{1: 4.1}, {1: 3.95}, {1: 4.04}]
    seeds = [{1: 4.2}, {1: 4.05}, {1: 4.12}]
    assert how({1: 4.2}, {1: 4.0}, variants, seeds) == [SEED]
    assert how({1: 5.0}, {1: 4.0}, variants, seeds) == [OUTSIDE]


def test_one_percent_of_honest_runs_are_outside():
    """Draws of one normal distribution: the record, the run, and its variants, at four steps."""
    random = np.random.default_rng(0)
    outside, count = 0, 3000
    for _ in range(count):
        losses = 4 + 0.01 * random.standard_normal((5, 4))
        recorded, trained, *variants = (dict(enumerate(row.tolist())) for row in losses)
        outside += OUTSIDE in how(recorded, trained, variants)
    assert outside / count < 0.015


# ------------------------------------------------------------------ bundles
def test_a_bundle_has_the_record_byte_for_byte_and_is_checked(tmp_path, honest):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(honest))
    folder = write_bundle(path, tmp_path / "bundle")
    assert open_bundle(folder, False).read_bytes() == path.read_bytes()
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {
        "README.md",
        "configs/gpt_45k.json",
        "configs/llama_45k.json",
        "environment.json",
        "manifest.json",
        "requirements.txt",
        "results.json",
        "text.json",
    }
    assert "jax==0.10.2\n" in (folder / "requirements.txt").read_text()
    with pytest.raises(UserError, match="folder is not empty; choose another"):
        write_bundle(path, folder)
    (folder / "configs/gpt_45k.json").write_text("{}")
    with pytest.raises(UserError, match=r"gpt_45k\.json: is not the file of the bundle"):
        open_bundle(folder, False)


def test_custom_code_is_refused_once_per_model_and_bundled(tmp_path, honest, monkeypatch):
    (tmp_path / "optimizers_of_mine.py").write_text("raise RuntimeError('not to be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = copy.deepcopy(honest)
    content["runs"] = [run for run in content["runs"] if run["name"] == "gpt@45k"]
    for run in content["runs"]:
        run["config"]["optimizer.name"] = "optimizers_of_mine:sgd"
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    shown = str(verify(path, tmp_path / "check", Sample(size=2)))
    assert shown.count("optimizers_of_mine:sgd") == shown.count("--trust_custom_code") == 1
    assert "unknown: gpt: config.optimizer.name=" in shown
    assert shown.count("steps: its config cannot be used here") == 2
    folder = write_bundle(path, tmp_path / "bundle")
    source = folder / "sources/optimizers_of_mine.py"
    assert source.read_text() == (tmp_path / "optimizers_of_mine.py").read_text()
    content["runs"][0]["config"]["optimizer.name"] = "missing_module:sgd"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="missing_module: no such module"):
        write_bundle(path, tmp_path / "other")
    (folder / "sources" / "numpy.py").write_text("")
    with pytest.raises(UserError, match=r"numpy\.py: is not a file of the bundle"):
        open_bundle(folder, True)


def test_a_bundle_cannot_name_files_outside(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "1", "results.json": "", "../x": ""}')
    (tmp_path / "results.json").write_text("")
    with pytest.raises(UserError):
        open_bundle(tmp_path, False)
