"""Runs that survive: kills, polite stops, damaged checkpoints, full disks, other machines, divergence."""

import collections
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT, XLA_FLAGS, load_config, run

from smallgpt_jax import inference, summary, train
from smallgpt_jax.checkpoint import Checkpoints, bit_sums
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import MetricsWriter, read_lines
from smallgpt_jax.program import build_program
from smallgpt_jax.step import TrainState, train_step

sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos


@pytest.fixture(autouse=True)
def one_device_for_child_processes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS.format(devices=1))


# ---------------------------------------------------------------------- kills

@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(text_file, tmp_path):
    """A few kills here; benchmarks/chaos.py does as many as one likes, for all four."""
    hits, different, runs = chaos.torment(
        "pgpt", tmp_path, kills=3, steps=100, chance=random.Random(1),
        overrides=(f"--config.data.source={text_file}",))
    assert different == []
    assert hits.total() == 3 and runs >= 1


def test_chaos_notices_what_differs(text_file, tmp_path):
    """A run of another seed, and one whose metrics have a line twice."""
    runs = [chaos.Run(tmp_path / str(i), "gpt", 10) for i in range(3)]
    for one, seed in zip(runs, (1, 1, 2)):
        train.train(load_config("gpt", data__source=str(text_file), train__steps=10, train__log_every=1,
                                train__seed=seed), str(one.workdir))
    assert chaos.differences(runs[0], runs[1]) == []
    assert len(chaos.differences(runs[0], runs[2])) > 20
    lines = (tmp_path / "1" / "metrics.jsonl").read_text()
    (tmp_path / "1" / "metrics.jsonl").write_text(lines + lines.splitlines()[0] + "\n")
    assert chaos.differences(runs[0], runs[1]) == ["lines"]


# ---------------------------------------------------------------------- polite stops

@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_ends(text_file, tmp_path):
    """While it trains, compiles, evaluates; by SIGTERM and by Ctrl-C; asked twice. In the end all is as if
    it had never been asked."""
    # An evaluation takes longer than the steps before it; checkpoints come seldom.
    overrides = (f"--config.data.source={text_file}", "--config.train.eval_steps=0",
                 "--config.train.checkpoint_every=1000", "--config.train.eval_every=150")
    undisturbed, asked = (chaos.Run(tmp_path / name, "gpt", 300, overrides) for name in ("one", "other"))
    undisturbed.start()
    undisturbed.finish()

    def ask(words, number, *more):
        asked.start()
        asked.wait_for(words)
        for one in (number, *more):
            asked.process.send_signal(one)
        started = time.monotonic()
        status = asked.process.wait(60)
        assert time.monotonic() - started < 15
        return status, asked.said().splitlines()[-1]

    status, last = ask(" parameters, on ", signal.SIGTERM)
    assert status == 143 and "stopped at once; what is saved is whole" in last
    status, last = ask("step  20/300", signal.SIGTERM, signal.SIGTERM)  # as `timeout` does: that is once
    stopped = r"stopped after step (\d+), which is saved; the same command goes on from there"
    saved = re.fullmatch(stopped, last)
    assert status == 143 and 20 <= int(saved[1]) < 150
    status, last = ask("step 150/300", signal.SIGINT)
    saved = re.fullmatch(stopped, last)
    assert status == 130 and int(saved[1]) == 150  # which was saved before it was to be evaluated
    assert "step 150/300   validation loss" not in asked.said()
    status, last = ask("step 160/300", signal.SIGINT, signal.SIGTERM)
    assert status in (130, 143) and last.startswith("a second time: stopped at once")
    asked.start()
    asked.finish()
    assert chaos.differences(undisturbed, asked) == []
    assert not (asked.workdir / ".lock").exists()


# ---------------------------------------------------------------------- checkpoints

def state_of(step: int) -> TrainState:
    keys = jax.random.split(jax.random.key(step), 3)
    params = {"a": jax.random.normal(keys[0], (40, 30)), "b": {"c": jax.random.normal(keys[1], (7,))}}
    moments = (jax.tree.map(jnp.square, params), jnp.int32(step))
    return TrainState(jnp.int32(step), params, moments)


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.array_equal(a, b, equal_nan=True)
               for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=3)
    for step in (10, 20):
        checkpoints.save(step, state_of(step))
    checkpoints.close()
    return folder


def flip_a_bit(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << random.Random(str(place)).randrange(8)
    path.write_bytes(content)


def cut(path, place):
    path.write_bytes(path.read_bytes()[:int(place * path.stat().st_size)])


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
def test_no_damage_to_a_checkpoint_goes_unnoticed(saved, tmp_path, damage):
    """Every file of the newest one in turn, in several places: what is restored is what was saved, be it
    because the damage does no harm or because the one before is used."""
    names = [path.relative_to(saved / "20") for path in (saved / "20").rglob("*") if path.stat().st_size]
    names = [name for name in names if (saved / "20" / name).is_file()]
    assert len(names) > 15
    outcomes = collections.Counter()
    for number, name in enumerate(names):
        for place in (0.0, 0.37, 0.73) if damage is flip_a_bit else (0.0, 0.6):
            folder, said = tmp_path / f"{number}-{place}" / "checkpoints", []
            shutil.copytree(saved, folder)
            damage(folder / "20" / name, place)
            checkpoints = Checkpoints(folder, keep=3, say=said.append)
            state = checkpoints.restore_newest(ABSTRACT)
            step = int(state.step)
            assert_same(state, state_of(step))
            outcomes[step] += 1
            is_aside = (folder.parent / "damaged_checkpoints" / "20").is_dir()
            assert is_aside == (step == 10) and len(said) == (step == 10), name
            assert checkpoints.steps() == ([10] if is_aside else [10, 20])
            if is_aside:
                assert said[0].startswith("the checkpoint of step 20 is damaged (")
                checkpoints.save(20, state_of(20))  # its place is free again
                checkpoints.finish()
                assert checkpoints.steps() == [10, 20]
            checkpoints.close()
            shutil.rmtree(folder.parent)
    assert outcomes[10] > len(names) / 2


@pytest.mark.parametrize("damage", [
    lambda folder: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in folder.iterdir()],
    lambda folder: shutil.rmtree(folder / "opt_state"),
    lambda folder: shutil.rmtree(folder / "check"),
])
def test_emptied_checkpoints(saved, tmp_path, damage):
    shutil.copytree(saved, tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "20")
    said = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3, say=said.append)
    assert_same(checkpoints.restore_newest(ABSTRACT), state_of(10))
    assert len(said) == 1 and str(tmp_path / "damaged_checkpoints" / "20") in said[0]
    checkpoints.close()


def test_where_no_checkpoint_is_good_none_is_moved(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    for step in ("10", "20"):
        shutil.rmtree(tmp_path / "checkpoints" / step / "check")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    with pytest.raises(UserError, match="no checkpoint in it can be read"):
        checkpoints.restore_newest(ABSTRACT)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.isdecimal()) == ["10", "20"]
    checkpoints.close()


def test_a_save_that_fails_is_told_and_tried_again(tmp_path):
    """Files may not grow beyond 200 bytes for a while, as on a disk that is full."""
    said = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3, say=said.append)
    checkpoints.save(1, state_of(1))
    checkpoints.finish()
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (2, 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))
        try:
            checkpoints.save(step, state_of(step))
            checkpoints.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps() == [1]
        assert os.listdir(tmp_path / "checkpoints") == ["1"]
    assert len(said) == 2
    assert all(line == "a checkpoint could not be written: File too large. Training goes on; the newest one "
               "is that of step 1" for line in said)
    checkpoints.save(4, state_of(4))
    checkpoints.finish()
    assert checkpoints.steps() == [1, 4]
    assert_same(checkpoints.restore_newest(ABSTRACT), state_of(4))
    checkpoints.close()


def test_the_sum_of_bits_does_not_depend_on_the_mesh():
    state, sharded = state_of(3), {}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec in (("x", "y"), (None, "y"), ("y", None)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        sharded[spec] = bit_sums({"a": jax.device_put(state.params["a"], sharding)})
    expected = int((np.asarray(state.params["a"]).reshape(-1).view(np.uint32).astype(object)
                    * (2 * np.arange(1200, dtype=object) + 1)).sum() % 2**32)
    assert all(sums == {"['a']": expected} for sums in sharded.values())


def test_metrics_wait_for_a_disk_that_is_full(tmp_path):
    said = []
    writer = MetricsWriter(tmp_path, 0, say=said.append)
    writer.write(1, "train", {"loss": 1.0})
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, most))
    try:
        for step in (2, 3):
            writer.write(step, "train", {"loss": float(step)})
            assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(4, "train", {"loss": float("nan")})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, None)]
    assert sum("metrics.jsonl: File too large. Training goes on" in line for line in said) == 1
    writer.close()


def test_tensorboard_is_given_up_on_a_disk_that_is_full(tmp_path):
    """What tensorboardX does of its own is to wait for ever."""
    said = []
    writer = MetricsWriter(tmp_path, 0, say=said.append)
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, most))
    try:
        for step in range(1, 40):
            writer.write(step, "train", {"loss": 1.0, "learning_rate": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 40))
    assert sorted(line.split(":")[0].split("/")[-1] for line in said) == [
        "TensorBoard's file cannot be written", "metrics.jsonl"]
    event_files = list(tmp_path.glob("events.out.tfevents.*"))
    assert [path.stat().st_size for path in event_files] == [1500]


def test_damaged_metrics_lose_only_the_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "split": "train", "loss": 1.0}) for step in range(5)]
    path.write_bytes("\n".join([*lines[:2], '{"step": 2, "spl']).encode() + b"\n\xff\xfe\n[1]\n"
                     + "\n".join(lines[3:]).encode())
    assert [line["step"] for line in read_lines(path)] == [0, 1, 3, 4]


@pytest.mark.parametrize("trouble", ["removed", "a folder", "its folder is removed"])
def test_metrics_that_are_gone_do_not_end_a_run(tmp_path, trouble):
    folder, said = tmp_path / "run", []
    folder.mkdir()
    writer = MetricsWriter(folder, 0, say=said.append)
    path = folder / "metrics.jsonl"
    writer.write(1, "train", {"loss": 1.0})
    if trouble == "its folder is removed":
        shutil.rmtree(folder)
    else:
        path.unlink()
    if trouble == "a folder":
        path.mkdir()
    writer.write(2, "train", {"loss": 2.0})
    writer.write(3, "eval", {"loss": 3.0})
    assert len(said) == (trouble != "removed")
    if trouble == "a folder":
        path.rmdir()
    writer.close()
    assert [line["step"] for line in read_lines(path)] == ([] if trouble == "its folder is removed" else [2, 3])
    if trouble == "its folder is removed":
        assert "No such file or directory. Its last 2 lines are lost" in said[-1]


class Gone:
    """A standard output that nobody can read any more."""

    def __init__(self, error):
        self.error = error

    def isatty(self):
        return False

    def write(self, text=""):
        raise self.error

    flush = write


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left")])
def test_a_run_does_not_need_its_standard_output(text_file, tmp_path, monkeypatch, error):
    """Neither to make its store, nor to train, nor for the text at the end."""
    monkeypatch.setattr(sys, "stdout", Gone(error))
    config = load_config("gpt", data__source=str(text_file), data__store=str(tmp_path / "store"), train__steps=10)
    train.train(config, str(tmp_path / "run"))
    summary.closing(str(tmp_path / "run"))
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [10, 10]


@pytest.mark.parametrize("stream, status", [("stdout", 0), ("stderr", 143)])
def test_the_exit_status_does_not_depend_on_a_full_disk(stream, status):
    """Python itself flushes what is left, and exits with 120 where that fails."""
    program = (f"import sys; from smallgpt_jax.output import best_effort\n"
               f"with best_effort({stream!r}):\n    print('x' * 10_000, file=sys.{stream}); sys.exit({status})")
    with open("/dev/full", "w") as full:
        result = chaos.subprocess.run([sys.executable, "-c", program], cwd=ROOT, **{stream: full})
    assert result.returncode == status


def test_what_the_machine_refuses_is_not_called_damaged(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(checkpoints, "_read", refuse)
    with pytest.raises(UserError, match=r"checkpoints/20: cannot be read \(Permission denied\)\. Nothing"):
        checkpoints.restore_newest(ABSTRACT)
    with pytest.raises(UserError, match=r"checkpoints/20: cannot be read \(Permission denied\)$"):
        checkpoints.restore_model(20, ABSTRACT.params, {})
    assert checkpoints.steps() == [10, 20] and not (tmp_path / "damaged_checkpoints").exists()
    checkpoints.close()


@pytest.mark.slow
def test_a_run_on_a_full_disk(text_file, tmp_path):
    """No checkpoint can be written: said each time, training goes on, the end is an error; with room again
    the run ends as any other."""
    def command(workdir):
        return ["--config=configs/gpt.py:tiny", f"--config.data.source={text_file}", f"--workdir={workdir}",
                "--config.train.log_every=1"]

    assert run("main", *command(tmp_path / "one")).returncode == 0
    # With the store made, nothing but a checkpoint has a file of more than 60 kB.
    limited = chaos.subprocess.run(
        ["bash", "-c", 'ulimit -f 60; exec "$@"', "-", sys.executable, "-m", "smallgpt_jax.main",
         *command(tmp_path / "other")], cwd=ROOT, capture_output=True, text=True)
    assert limited.returncode == 1
    assert limited.stdout.count("a checkpoint could not be written: File too large") == 3  # step 40: twice
    assert "step 40/40" in limited.stdout
    assert limited.stderr.startswith(f"error: --workdir={tmp_path}/other: step 40, the last one, could not")
    assert limited.stderr.count("\n") == 1, limited.stderr
    assert run("main", *command(tmp_path / "other")).returncode == 0
    one, other = (chaos.Run(tmp_path / name, "gpt", 40) for name in ("one", "other"))
    assert chaos.differences(one, other) == []


def test_a_run_with_a_damaged_checkpoint_goes_back_and_repeats(text_file, tmp_path, capsys):
    config = load_config("gpt", data__source=str(text_file), train__checkpoint_every=20, train__log_every=5)
    train.train(config, str(tmp_path))
    whole = chaos.Run(tmp_path, "gpt", 40).outcome()
    weights = (tmp_path / "checkpoints" / "40" / "params").rglob("*")
    flip_a_bit(max(weights, key=lambda path: path.stat().st_size), 0.5)
    with pytest.raises(UserError, match=r"checkpoints/40: this checkpoint is damaged \(.*\)\. Continue the"):
        inference.load(tmp_path)
    train.train(config, str(tmp_path))
    out = capsys.readouterr().out
    assert "the checkpoint of step 40 is damaged" in out and "20 of them done" in out
    again = chaos.Run(tmp_path, "gpt", 40).outcome()
    assert all(np.array_equal(whole[0][name], again[0][name]) for name in whole[0])
    assert whole[1] == again[1]
    assert inference.load(tmp_path).generate("the", max_new_tokens=3, temperature=0)


# ---------------------------------------------------------------------- other machines

@pytest.mark.slow
@pytest.mark.parametrize("architecture, meshes", [
    ("pgpt", [(8, dict(data=2, path=2, tensor=2)), (4, dict(fsdp=2, path=2)), (2, {}), (1, {})]),
])
def test_a_run_goes_on_on_other_devices(text_file, tmp_path, monkeypatch, architecture, meshes):
    """Ten steps on each of several meshes, against forty on one device: the same batches, and to rounding
    the same losses."""
    devices = jax.devices()

    def train_on(number, workdir, steps, **mesh):
        monkeypatch.setattr(jax, "devices", lambda *_: devices[:number])
        config = load_config(
            architecture, data__source=str(text_file), train__steps=steps, train__log_every=1,
            train__checkpoint_every=10, **{f"mesh__{axis}": length for axis, length in mesh.items()})
        train.train(config, str(workdir))

    train_on(1, tmp_path / "one", 40)
    for i, (number, mesh) in enumerate(meshes, start=1):
        train_on(number, tmp_path / "many", 10 * i, **{"data": -1, **mesh})
    one, many = ([line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")
                  if line["split"] == "train"] for name in ("one", "many"))
    assert len(many) == 40
    np.testing.assert_allclose(many, one, rtol=2e-5)


# ---------------------------------------------------------------------- divergence

def test_an_update_that_is_not_finite_is_not_made():
    """A batch with a token whose embedding is broken: its step leaves weights and optimiser alone."""
    config = load_config("gpt")
    program = build_program(config, jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 257, (8, 65), np.int32)
    good, bad = Rows(tokens % 256), Rows(np.where(tokens % 9, tokens, 256))
    state = program.initial_state()
    table = state.params["token_embedding"].at[256].set(np.nan)
    state = state._replace(params={**state.params, "token_embedding": table})
    step = jax.jit(lambda state, batch: train_step(
        state, batch, model=program.model, optimizer=program.optimizer, schedule=lambda count: 10.0 * count,
        microbatches=1, loss_chunks=1, seed=0))
    first, metrics = step(state, good)
    assert metrics["skipped"] == 0
    second, metrics = step(first, bad)
    assert np.isnan(metrics["loss"]) and metrics["skipped"] == 1 and second.step == 2
    assert_same(second[1:], first[1:])
    _, metrics = step(second, bad)
    assert metrics["skipped"] == 2
    assert not metrics["is_finite"]
    third, metrics = step(second, good)
    assert metrics["skipped"] == 1 and metrics["learning_rate"] == 10.0  # one update had been made
    direct, _ = step(first, good)
    assert_same(third[1:], direct[1:])


@pytest.mark.parametrize("scale", [3e38, np.inf, np.nan])
def test_weights_that_an_update_leaves_infinite_are_noticed(scale):
    """Those of a token that the batch lacks: neither loss nor gradient knows of them."""
    config = load_config("gpt")
    program = build_program(config, jax.devices()[:1])
    state = program.initial_state()
    optimizer = optax.adamw(40.0, weight_decay=0.1)

    def step(row):
        params = {**state.params, "token_embedding": state.params["token_embedding"].at[256].set(row)}
        return jax.jit(functools.partial(
            train_step, model=program.model, optimizer=optimizer, schedule=lambda count: 40.0, microbatches=1,
            loss_chunks=1, seed=0))(TrainState(jnp.int32(0), params, optimizer.init(params)),
                                    Rows(np.random.default_rng(0).integers(0, 256, (8, 65), np.int32)))[1]

    metrics = step(scale)
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]) and not metrics["is_finite"]
    assert step(1.0)["is_finite"]


DIVERGING = dict(optimizer__learning_rate=1e30, optimizer__warmup_steps=22, optimizer__clip_norm=0.0,
                 train__checkpoint_every=1, train__log_every=1)


@pytest.mark.parametrize("more, words", [
    ({}, [r"training has diverged: step (\d+): loss nan, gradient norm nan; its batch: rows (\d+, ){7}\d+ of",
          r"Try a lower config.optimizer.learning_rate, or --config.train.on_nonfinite=skip"]),
    ({"train__on_nonfinite": "skip", "train__max_nonfinite": 3},
     [r"3 updates in a row \(config.train.max_nonfinite\) were not finite: step (\d+): loss nan"]),
    # Loss and gradient are finite, the weights that they lead to are not.
    ({"train__on_nonfinite": "skip", "optimizer__learning_rate": 3e38, "optimizer__warmup_steps": 1,
      "optimizer__weight_decay": 1e6},
     [r"training has diverged: step (\d+): loss [\d.]+, gradient norm [\d.]+, the updated weights are not finite; "
      r"its batch", r"Try a lower config\.optimizer\.learning_rate$"]),
])
def test_a_run_that_diverges_ends_and_says_where(text_file, tmp_path, capsys, more, words):
    config = load_config("gpt", data__source=str(text_file), **(DIVERGING | more))
    with pytest.raises(UserError) as error:
        train.train(config, str(tmp_path))
    found = [re.search(pattern, str(error.value)) for pattern in words]
    assert all(found), str(error.value)
    step, skips = int(found[0][1]), more.get("train__max_nonfinite", 1) - 1
    out = capsys.readouterr().out
    assert out.count("This update is skipped") == skips
    # The newest checkpoint is the last state whose loss was finite; skipped updates do not change it.
    newest = int(re.search(r"The newest checkpoint, of step (\d+), is good", str(error.value))[1])
    assert newest == step - 1
    arrays, _ = chaos.Run(tmp_path, "gpt", newest).outcome()
    assert all(np.isfinite(x).all() for x in arrays.values())
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl") if line["split"] == "train"]
    assert losses[len(losses) - skips:] == [None] * skips and None not in losses[:len(losses) - skips]
