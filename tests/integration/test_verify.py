"""A record of tiny runs, checked by training them again."""

import json
from unittest import mock

import pytest
from conftest import call, load_config

from smallgpt_jax.run.config import Config
from smallgpt_jax.verification import retraining

FIELDS = {
    "model.context_length": 2,  # so that only one other train.loss_chunks divides it
    "model.d_model": 8,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.vocab_size": 260,
    "data.tokenizer": "bytes",
    "data.validation_fraction": 0.3,
    "train.steps": 2,
    "train.batch_size": 8,
    "train.eval_every": 1,
    "train.eval_steps": 2,
    "train.microbatches": 1,
    "train.loss_chunks": 2,
    "compare.names": "gpt",
    "compare.reference": "gpt",
    "compare.seeds": 2,
    "compare.decoding": False,
}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    (folder / "texts").mkdir()
    for number in range(40):
        words = " ".join(str(number * k % 97) for k in range(60))
        (folder / "texts" / f"{number}.txt").write_text(words)
    flags = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    flags.append(f"--config.data.source={folder / 'texts'}")
    result = call(
        "compare", "--config=configs/compare/paper.py:tiny", f"--output={folder / 'made'}", *flags
    )
    assert result.returncode == 0, result.stderr
    return folder / "made" / "results.json"


@pytest.fixture
def same_processor():
    # Not the fixture `monkeypatch`, with which the tests would compile the steps again.
    with mock.patch.object(retraining, "has_other_instructions", lambda: False):
        yield


def verify(path, output, *flags):
    return call("compare", f"--verify={path}", f"--output={output}", *flags)


@pytest.mark.slow
def test_an_honest_record_is_reproduced_bit_for_bit(record, tmp_path):
    result = verify(record, tmp_path / "check", "--sample=2", "--fraction=1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("reproduced: gpt, seed 13") == 4  # each at once, and in the summary
    assert "2 of 2 steps: bit for bit (2 evaluations)" in result.stdout
    written = json.loads((tmp_path / "check" / "verification.json").read_text())
    assert written["verdict"] == "reproduced" and len(written["verdicts"]) == 2
    assert written["problems"] == [] and written["processor"]

    # Again: the same draw, and nothing is trained.
    assert "step 2" in result.stdout
    again = verify(record, tmp_path / "check", "--sample=2", "--fraction=1")
    assert again.returncode == 0 and "step 2" not in again.stdout
    assert (
        json.loads((tmp_path / "check" / "verification.json").read_text())["nonce"]
        == (written["nonce"])
    )


@pytest.mark.slow
def test_losses_that_no_rounding_explains_are_not_reproduced(record, tmp_path, same_processor):
    """All numbers of the forged record fit each other."""
    content = json.loads(record.read_text())
    for run in content["runs"]:
        for point in run["curve"]:
            better = point["loss"] - 0.0625
            point["bits_per_byte"] *= better / point["loss"]
            point["loss"] = better
    forged = tmp_path / "results.json"
    forged.write_text(json.dumps(content))
    flags = ("--sample=1", "--fraction=0.1", "--nonce=n")
    result = verify(forged, tmp_path / "check", *flags)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 of 2 steps: from step 1 on: recorded" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("not reproduced: 1 of 2 runs")

    # A difference as small as that between two orders of sums is none.
    content = json.loads(record.read_text())
    for run in content["runs"]:
        for point in run["curve"]:
            point["loss"] += 2**-21
            point["bits_per_byte"] *= 1 + 2**-21 / point["loss"]
    rounded = tmp_path / "rounded.json"
    rounded.write_text(json.dumps(content))
    result = verify(rounded, tmp_path / "check", *flags)
    assert "reproduced: gpt, seed" in result.stdout and "within what rounding" in result.stdout


@pytest.mark.slow
def test_without_its_text_a_record_cannot_be_told(record, tmp_path):
    content = json.loads(record.read_text())
    for run in content["runs"]:
        run["config"]["data.source"] = str(tmp_path / "missing")
    moved = tmp_path / "results.json"
    moved.write_text(json.dumps(content))
    result = verify(moved, tmp_path / "check", "--sample=1")
    assert result.returncode == 2 and "cannot tell: gpt, seed" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_variants_only_change_the_order_of_sums():
    fields = dict(model__context_length=12, train__loss_chunks=2, train__batch_size=32)
    config = Config.of(load_config("gpt", **fields))
    variants = [{"loss_chunks": 1}, {"loss_chunks": 4}, {"microbatches": 2}]
    assert retraining.variant_fields(config) == variants
    with_dropout = config.replace(model={"dropout": 0.1})
    assert retraining.variant_fields(with_dropout) == variants[:2]
    assert retraining.variant_fields(config.replace(train={"batch_size": 8})) == variants[:2]


def test_wrong_usage(tmp_path):
    missing = verify(tmp_path / "results.json", tmp_path / "check")
    assert missing.returncode == 1 and "results.json" in missing.stderr
    flags = call("compare", "--verify=a", "--results=b", "--output=c")
    assert flags.returncode == 2 and "--verify: cannot be combined" in flags.stderr
    flags = call("compare", "--verify=a")
    assert flags.returncode == 2 and flags.stderr == "error: --output must be given; see --help\n"
    flags = call("compare", "--bundle=a")
    assert flags.returncode == 2 and "--bundle: needs one --results" in flags.stderr
