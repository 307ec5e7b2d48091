"""Tests of a run's time measurements: traces of steps, seconds in metrics.jsonl, the goodput
line.
"""

import re

import jax
import pytest
from run_helpers import SMALL, assert_equal, config_for, losses_in, read_untimed_metrics, state_of

from smallgpt_jax.errors import UserError
from smallgpt_jax.run import metrics
from smallgpt_jax.training.trainer import train_and_evaluate


def train_steps_in(folder) -> list[int]:
    """Returns the numbers of the training steps in the trace in `folder`."""
    (trace,) = folder.rglob("*.xplane.pb")
    events = (
        event
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    )
    return sorted(dict(event.stats)["step_num"] for event in events)


@pytest.mark.slow
def test_a_trace_changes_no_result(text_file, tmp_path, capsys):
    """One run traces steps 4 and 5 and saves a checkpoint between them. Another run ends before its
    trace is over.
    """
    fields = dict(
        SMALL, train__steps=8, train__log_every=1, train__eval_every=8, train__checkpoint_every=4
    )
    plain, inside, over_end = (tmp_path / name for name in ("plain", "inside", "over_end"))
    train_and_evaluate(config_for(text_file, **fields), str(plain))
    assert "profile" not in capsys.readouterr().out and not (plain / "profile").exists()
    for folder, first, steps in ((inside, 4, 2), (over_end, 8, 5)):
        train_and_evaluate(
            config_for(text_file, **fields, train__profile_from=first, train__profile_steps=steps),
            str(folder),
        )
        assert f"wrote a profile to {folder / 'profile'}; " in capsys.readouterr().out
        assert read_untimed_metrics(folder) == read_untimed_metrics(plain)
        assert_equal(state_of(folder, 8), state_of(plain, 8))
    assert train_steps_in(inside / "profile") == [4, 5]
    assert train_steps_in(over_end / "profile") == [8]


@pytest.mark.slow
def test_seconds_are_logged(text_file, tmp_path, capsys):
    fields = dict(SMALL, train__log_every=2, train__eval_every=4, train__checkpoint_every=2)
    for steps in (4, 8):  # the second run resumes the first
        train_and_evaluate(config_for(text_file, **fields, train__steps=steps), str(tmp_path))
        goodput = re.search(
            r"^goodput ([\d.]+)%: ([\d.]+) of ([\d.]+) s in training steps; ([\d.]+) s starting, ([\d.]+) s "
            r"waiting for data, ([\d.]+) s saving, ([\d.]+) s evaluating$",
            capsys.readouterr().out,
            re.M,
        )
        share, training, total, *lost = map(float, goodput.groups())
        assert share == pytest.approx(100 * training / total, abs=100 * 0.1 / total + 0.1)
        assert training + sum(lost) == pytest.approx(total, abs=0.4)
    assert list(losses_in(tmp_path, metric="data_wait_seconds")) == [2, 4, 6, 8]
    lines = {
        line["step"]: line
        for line in metrics.read_lines(tmp_path / "metrics.jsonl")
        if line["split"] == "train"
    }
    assert [step for step, line in lines.items() if line.get("restart_seconds", 0) > 0] == [2, 6]
    assert [step for step, line in lines.items() if line["save_seconds"] > 0] == [4, 8]


@pytest.mark.parametrize(
    "field, value",
    [
        ("profile_from", -1),
        ("profile_steps", 0),
        ("tracker", "tensorboard"),
        ("stall_seconds", -1.0),
    ],
)
def test_invalid_fields(text_file, tmp_path, field, value):
    with pytest.raises(UserError, match=rf"config\.train\.{field}={value!r}: must "):
        train_and_evaluate(
            config_for(text_file, **SMALL, **{f"train__{field}": value}), str(tmp_path / "run")
        )
    assert not (tmp_path / "run").exists()
