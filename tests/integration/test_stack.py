"""Stacks: runs in one program have the results of single runs, each in its own workdir, whatever
ends them.
"""

import contextlib
import signal

import jax
import pytest
from run_helpers import SMALL, config_for

from smallgpt_jax.comparison import results
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import DivergenceError, StoppedError, UserError
from smallgpt_jax.run.checkpoint import Checkpoints, saved_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.sessions import has_diverged
from smallgpt_jax.training import preemption, train
from smallgpt_jax.training.compiled_steps import CompiledSteps
from smallgpt_jax.training.program import shared_program
from smallgpt_jax.training.stack import can_be_stacked, require_one_device, train_stack

STEPS = 8
FIELDS = dict(
    SMALL,
    model__num_layers=1,
    model__dropout=0.1,
    train__steps=STEPS,
    train__checkpoint_every=4,
    train__eval_every=4,
    train__eval_steps=1,
    train__log_every=1,
    optimizer__warmup_steps=2,
    optimizer__decay_steps=STEPS,
)
RUNS = {
    "first": {},
    "other": {"train__seed": 7, "optimizer__learning_rate": 0.02, "optimizer__weight_decay": 0.3},
}
PLACES = 3  # one of them free


def program_on_one_device(config):
    return shared_program(config, jax.devices()[:1])


def configs_in(folder, text_file):
    return {
        folder / name: Config.of(config_for(text_file, **{**FIELDS, **fields}))
        for name, fields in RUNS.items()
    }


def losses(folder, split):
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["split"] == split]
    assert [line["step"] for line in lines] == (
        list(range(1, STEPS + 1)) if split == "train" else [4, STEPS]
    )
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module", autouse=True)
def no_curves():
    """Other tests draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_curves", lambda folder: None)
        yield


@pytest.fixture(scope="module")
def corpus(text_file):
    return load_or_prepare(config_for(text_file).data)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, text_file, corpus):
    """Returns {(name, split): losses} of single runs. All runs of this module are trained on one
    device.
    """
    configs = configs_in(tmp_path_factory.mktemp("single"), text_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "shared_program", program_on_one_device)
        for folder, config in configs.items():
            train.train(config, str(folder), corpus)
        yield {
            (folder.name, split): losses(folder, split)
            for folder in configs
            for split in ("train", "eval")
        }


@contextlib.contextmanager
def stop_at_once():
    stop = preemption.StopRequest("")
    stop.signal = signal.SIGTERM
    yield stop


@pytest.mark.slow
def test_a_stack_that_is_stopped_fails_and_is_resumed_has_the_losses_of_single_runs(
    text_file, tmp_path, corpus, expected, capsys
):
    """One run fails between its checkpoints. It is resumed together with a run that starts, and
    diverges.
    """
    configs = configs_in(tmp_path, text_file)
    first, other = configs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "handle_signals", stop_at_once)
        errors = train_stack(configs, PLACES, corpus)
    assert all(isinstance(error, StoppedError) for error in errors.values())
    assert [saved_steps(folder / "checkpoints") for folder in configs] == [[1]] * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", failing_save(other, STEPS))
        errors = train_stack(configs, PLACES, corpus)
    assert errors[first] is None and isinstance(errors[other], ZeroDivisionError)
    assert [saved_steps(folder / "checkpoints")[-1] for folder in configs] == [STEPS, 4]
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == {"first", "other"}
    assert "waiting for other runs of the stack" in next(
        line for line in lines if "goodput" in line
    )

    diverging = tmp_path / "diverging"
    config = configs[first].replace(optimizer={"learning_rate": 1e38})
    errors = train_stack({diverging: config, other: configs[other]}, PLACES, corpus)
    assert isinstance(errors[diverging], DivergenceError) and errors[other] is None
    assert has_diverged(diverging) and not saved_steps(diverging / "checkpoints")
    for folder in configs:
        for split in ("train", "eval"):
            assert losses(folder, split) == pytest.approx(expected[folder.name, split], abs=1e-5)
        assert saved_steps(folder / "checkpoints")[-2:] == [4, STEPS]
    reported = results.read_run("run", other)  # without the speed and memory of the stack
    assert (
        reported.is_finished
        and reported.tokens_per_second is None
        and reported.memory_bytes is None
    )


def failing_save(workdir, failing_step):
    save = Checkpoints.save

    def save_or_fail(self, step, *arguments):
        if self.folder.parent == workdir and step == failing_step:
            raise ZeroDivisionError
        save(self, step, *arguments)

    return save_or_fail


def test_out_of_memory_message(text_file, tmp_path, corpus, monkeypatch):
    def fail(steps, places):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 26.90G of 15.75G hbm.")

    monkeypatch.setattr(train, "shared_program", program_on_one_device)
    monkeypatch.setattr(CompiledSteps, "stacked_train_step", fail)
    monkeypatch.setattr(CompiledSteps, "eval_step", None)
    with pytest.raises(
        UserError, match=r"(?s)config.compare.stack=3: .*Used 26.90G.*\ndecrease it$"
    ):
        train_stack(configs_in(tmp_path, text_file), PLACES, corpus)


def test_which_runs_can_be_stacked(text_file):
    config = Config.of(config_for(text_file))
    for fields in ({"train": {"seed": 3, "steps": 9}}, {"optimizer": {"weight_decay": 0.5}}):
        assert can_be_stacked(config, config.replace(**fields))
    for fields in (
        {"optimizer": {"beta1": 0.5}},
        {"train": {"tracker": "wandb"}},
        {"train": {"profile_from": 3}},
    ):
        assert not can_be_stacked(config, config.replace(**fields))
    with_teacher = config.replace(train={"teacher": "folder"})
    assert not can_be_stacked(with_teacher, with_teacher)


def test_a_stack_needs_one_device():
    with pytest.raises(UserError, match=r"config.compare.stack=2: must be 1 on 8 devices"):
        require_one_device("config.compare.stack=2")
