"""The gate for searches, with made-up losses."""

import json

import numpy as np
import pytest
from comparison_helpers import run, saved
from conftest import load_config

from smallgpt_jax.comparison.counts import Counts
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.verification import gate
from smallgpt_jax.verification.gate import BETTER, UNDECIDED, WORSE, Question, ask_gate, decide


class FakePairs:
    """Trains nothing: the candidate's loss is `gain` lower, with noise."""

    def __init__(self, gain: float, stops_at: int = -1):
        self.gain, self.stops_at = gain, stops_at
        self.seeds: list[int] = []

    def __call__(self, candidate, base, folder) -> tuple[float, float]:
        assert candidate.train.seed == base.train.seed == candidate.data_seed
        if len(self.seeds) == self.stops_at:
            raise KeyboardInterrupt
        self.seeds.append(candidate.train.seed)
        noise = np.random.default_rng(candidate.train.seed).normal(0, 0.01)
        return 3.0 - self.gain + noise, 3.0


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    """FLOPs by the number of blocks, without a trace of the model; always the same seeds, because
    at level 0.025 an equal candidate would sometimes be better or worse.
    """

    def count(config):
        return Counts({}, 100, 100.0 * config.model.num_layers, 0, 0.0, "", 0)

    monkeypatch.setattr(gate, "CachedCounts", lambda: count)
    monkeypatch.setattr(gate.secrets, "token_hex", lambda size: "5" * 2 * size)


@pytest.fixture
def record(tmp_path):
    return saved(tmp_path / "results.json", *(run("gpt", seed, 3.0) for seed in (1, 2, 3)))


def candidate(**fields):
    return load_config("gpt", train__steps=2, **fields)


def test_a_better_and_a_worse_candidate_are_told_with_few_seeds(record, tmp_path):
    pairs = FakePairs(gain=0.1)
    question = ask_gate(candidate(), record, tmp_path / "gate", train_pair=pairs)
    assert question.verdict == BETTER and 3 <= len(question.differences) <= 6
    assert str(question).startswith("better: question 1 at level 0.025, ")
    worse = FakePairs(gain=-0.1)
    other = candidate(optimizer__learning_rate=0.5)
    assert ask_gate(other, record, tmp_path / "gate", train_pair=worse).verdict == WORSE
    assert not set(pairs.seeds) & set(worse.seeds)


def test_a_question_is_answered_once(record, tmp_path):
    first = ask_gate(candidate(), record, tmp_path / "gate", train_pair=FakePairs(0.0))
    assert first.verdict == UNDECIDED and len(first.differences) == gate.MOST_SEEDS
    again = FakePairs(0.1)
    asked = ask_gate(candidate(train__seed=7), record, tmp_path / "gate", train_pair=again)
    assert asked == first and again.seeds == []  # another seed is no other candidate


def test_a_killed_question_goes_on_with_its_seeds(record, tmp_path):
    whole = FakePairs(0.0)
    with pytest.raises(KeyboardInterrupt):
        ask_gate(candidate(), record, tmp_path / "gate", train_pair=FakePairs(0.0, stops_at=3))
    (kept,) = json.loads((tmp_path / "gate" / "ledger.json").read_text())["questions"]
    assert len(kept["differences"]) == 3 and kept["verdict"] == ""
    question = ask_gate(candidate(), record, tmp_path / "gate", train_pair=whole)
    assert len(whole.seeds) == gate.MOST_SEEDS - 3
    assert list(question.differences[:3]) == kept["differences"]


def test_what_the_gate_refuses(record, tmp_path):
    with pytest.raises(UserError, match=r"the candidate takes .* FLOPs, the reference"):
        ask_gate(
            candidate(model__num_layers=9), record, tmp_path / "gate", train_pair=FakePairs(0.1)
        )
    for fields, message in (  # which would be evaluated on other rows, or of another task
        ({"model__context_length": 32}, r"context_length=32: must be 64, as of the reference"),
        ({"train__objective": "prefix"}, r"objective='prefix': must be 'causal', as of the"),
        ({"train__batch_size": 3}, r"batch_size=3: must divide the 32 rows on which"),
    ):
        with pytest.raises(UserError, match=message):
            ask_gate(candidate(**fields), record, tmp_path / "gate", train_pair=FakePairs(0.1))
    base = Config.of(candidate())
    halved = gate.comparable(base.replace(train={"batch_size": 4}), base)
    assert halved.train.eval_steps * 4 == base.train.eval_steps * 8 == 32
    with pytest.raises(UserError, match="--only=llama: no such run in the record"):
        ask_gate(candidate(), record, tmp_path / "gate", reference="llama")
    ask_gate(candidate(), record, tmp_path / "gate", train_pair=FakePairs(0.1))
    other = saved(tmp_path / "other.json", *(run("gpt", seed, 2.0) for seed in (1, 2)))
    with pytest.raises(UserError, match="belongs to another record or reference"):
        ask_gate(candidate(), other, tmp_path / "gate", train_pair=FakePairs(0.1))


def test_a_search_that_only_changes_the_seed_rarely_passes():
    """Of 300 searches with 30 questions each."""
    random, passed = np.random.default_rng(0), 0
    for _ in range(300):
        for number in range(1, 31):
            level = gate.sequential.level_of_question(number, gate.LEVEL)
            question = Question(number, "", level)
            while not question.verdict:
                question = decide(question, random.standard_normal(), most_seeds=6)
            if question.verdict == BETTER:
                passed += 1
                break
    assert passed / 300 <= gate.LEVEL


def test_the_loss_of_rows_that_the_record_has_not_used(tmp_path):
    lines = [
        {"step": 5, "split": "eval", "loss": 9.0, "targets": 100},
        {"step": 8, "split": "eval", "loss": 3.0, "targets": 100},
        {"step": 8, "split": "eval", "loss": 4.0, "targets": 150},
    ]
    lines = [json.dumps({**line, "bits_per_byte": 1.0}) + "\n" for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert gate.loss_of_new_rows(tmp_path, 8) == pytest.approx((4 * 150 - 3 * 100) / 50)
    with pytest.raises(UserError, match="no rows beyond those of the record"):
        gate.loss_of_new_rows(tmp_path, 5)
