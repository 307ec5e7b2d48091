"""Tests that train tiny models.

They cover learning, resumption, changes of devices, and configs and workdirs that are refused.
"""

import json
import math
import os
import re
import resource
import shutil
import sys

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT, call, forward, load_config

from configs import run as run_config
from smallgpt_jax import inference, metrics, models
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.block import layer_configs, stack_blocks
from smallgpt_jax.program import Program, build_program
from smallgpt_jax.summary import print_final_message
from smallgpt_jax.train import train

sys.path.insert(0, str(ROOT / "benchmarks"))


SMALL = dict(model__d_model=16, model__num_heads=2, model__num_layers=2, model__context_length=32, train__loss_chunks=1)


def config_for(text_file, architecture="gpt", **fields):
    """Returns the config of a tiny run on `text_file`, on all eight devices."""
    return load_config(architecture, **{"data__source": str(text_file), **fields})


def state_of(workdir, step):
    """Returns the parameters and the optimizer state saved at a step."""
    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        tree = checkpoints.restore(step, args=ocp.args.Composite(
            params=ocp.args.StandardRestore(), opt_state=ocp.args.StandardRestore()))
    return jax.tree.map(np.asarray, (tree["params"], tree["opt_state"]))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def read_untimed_metrics(workdir) -> list[dict]:
    """Returns the lines of metrics.jsonl without times and speeds."""
    return [{name: value for name, value in line.items() if name not in ("time", "tokens_per_second")}
            for line in metrics.read_lines(workdir / "metrics.jsonl")]


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def losses_in(workdir, split="train", metric="loss"):
    return {line["step"]: line[metric] for line in metrics.read_lines(workdir / "metrics.jsonl")
            if line["split"] == split}


@pytest.fixture
def optimized(monkeypatch):
    """Makes training steps compile with optimization and for one device, which saves time in runs of a hundred steps.
    """
    devices, compile_step = jax.devices()[:1], Program.compile_train_step
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(Program, "compile_train_step",
                        lambda program: compile_step(program, {"xla_backend_optimization_level": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("architecture, fields", [
    ("pgpt", {}), ("cgpt", dict(model__d_model=128, model__blocks_per_stage=1))])  # two paths, two stages
def test_a_run_learns_more_than_bigrams(architecture, fields, text_file, tmp_path, optimized):
    import bigram

    train(config_for(
        text_file, architecture, model__num_layers=2, **fields, optimizer__learning_rate=6e-3,
        optimizer__decay_steps=150, train__steps=150, train__log_every=50, train__eval_every=75,
        train__eval_steps=16), str(tmp_path))
    lines = metrics.read_lines(tmp_path / "metrics.jsonl")
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in trained] == [50, 100, 150]
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(line) for line in trained)
    assert trained[-1]["learning_rate"] == pytest.approx(3e-4, rel=0.05)
    evaluated = [line for line in lines if line["split"] == "eval"]
    assert [line["step"] for line in evaluated] == [75, 150]
    store = json.loads((tmp_path / "store.json").read_text())["splits"]["validation"]
    assert evaluated[-1]["bits_per_byte"] == pytest.approx(
        evaluated[-1]["loss"] / math.log(2) * store["tokens"] / store["text_bytes"])

    comparison = bigram.compare(tmp_path)
    assert comparison["model_loss"] == pytest.approx(evaluated[-1]["loss"])
    assert comparison["model_loss"] < comparison["bigram_loss"] - 0.1

    if architecture == "pgpt":
        flags = [f"--workdir={tmp_path}", "--prompt=the cat", "--max_new_tokens=30"]
        greedy, sampled = call("generate", *flags, "--temperature=0"), call("generate", *flags, "--top_k=1", "--seed=5")
        assert (greedy.returncode, greedy.stderr) == (0, "")
        assert greedy.stdout.startswith("the cat") and len(greedy.stdout) > len("the cat") + 10
        assert sampled.stdout == greedy.stdout


# ---------------------------------------------------------------------- resumption, of copied runs

@pytest.fixture
def copy_of(trained_run, tmp_path):
    """Returns a function (architecture, **fields) → tmp_path/run, a copy of a `trained_run` that tests may change."""
    return lambda *arguments, **fields: shutil.copytree(trained_run(*arguments, **fields), tmp_path / "run")


# log_every must not divide checkpoint_every, so that a checkpoint contains losses that are not logged yet.
RESUMED = dict(**SMALL, model__dropout=0.1, train__log_every=15)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["damaged", "full disk"])
def test_resumption_repeats_lost_steps_bit_for_bit(text_file, copy_of, capsys, failure):
    """If the last checkpoint is damaged or could not be written, the steps since the previous checkpoint are lost.

    The resumed run repeats these steps, and has the same state and metrics afterwards.
    """
    workdir, config = copy_of("pgpt", **RESUMED), config_for(text_file, "pgpt", **RESUMED)
    before, lines = state_of(workdir, 40), read_untimed_metrics(workdir)
    if failure == "damaged":
        for path in (workdir / "checkpoints" / "40" / "params").rglob("d/*"):  # which of these files are read varies
            flip_a_bit(path)
        with pytest.raises(UserError, match=r"checkpoints/40: damaged checkpoint \(.*\); continue the"):
            inference.load(workdir)
    else:
        shutil.rmtree(workdir / "checkpoints" / "40")
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "spl')  # truncated
    if failure == "full disk":
        _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Every save fails, because the limit is below the size of opt_state/_METADATA. The sizes of data files are not
        # a reliable bound, because they vary with the order of writes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, most))
        try:
            with pytest.raises(UserError, match=re.escape(f"--workdir={workdir}: the last step, 40, could not")):
                train(config, str(workdir))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        out = capsys.readouterr().out
        assert out.count("could not write a checkpoint: File too large") == 2 and "step 40/40" in out
    train(config, str(workdir))
    out = capsys.readouterr().out
    assert ", 20 done" in out and ("damaged checkpoint of step 40" in out) == (failure == "damaged")
    assert_equal(state_of(workdir, 40), before)
    assert read_untimed_metrics(workdir) == lines


@pytest.mark.slow
def test_resumption_repeats_a_missing_evaluation(text_file, copy_of):
    workdir = copy_of("gpt", **SMALL)
    path = workdir / "metrics.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:-1]) + "\n")
    train(config_for(text_file, **SMALL), str(workdir))
    again = path.read_text().splitlines()
    assert again[:-1] == whole[:-1]
    assert {**json.loads(again[-1]), "time": 0} == {**json.loads(whole[-1]), "time": 0}


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_only_on_other_rows(text_file, copy_of, capsys):
    """A finished run is evaluated again if train.eval_steps selects other validation rows.

    The rows are identified by the field `targets` in metrics.jsonl. Older versions did not write this field. For their
    runs, the new value of train.eval_steps is compared with the value in the saved config.
    """
    workdir = copy_of("gpt", **SMALL)
    path, batch = workdir / "metrics.jsonl", 8 * 32
    before = path.read_bytes()

    def targets() -> list:
        return [line.get("targets") for line in metrics.read_lines(path) if line["step"] == 40][1:]

    train(config_for(text_file, **SMALL), str(workdir))
    assert path.read_bytes() == before and ", 40 done" in capsys.readouterr().out
    for _ in range(2):
        train(config_for(text_file, **SMALL, train__eval_steps=1), str(workdir))
        assert json.loads((workdir / "config.json").read_text())["train"]["eval_steps"] == 1
        assert targets() == [4 * batch, batch]

    config = config_for(text_file, **SMALL, train__eval_steps=1)
    corpus = build_program(config).open_pipeline().corpus

    def is_evaluated(eval_steps: int) -> bool:
        config = config_for(text_file, **SMALL, train__eval_steps=eval_steps)
        return 40 in run_folder.evaluated_steps(workdir, config, corpus)

    assert is_evaluated(1) and not is_evaluated(4) and not is_evaluated(3)
    lines = metrics.read_lines(path)
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "targets"}) + "\n" for line in lines))
    assert is_evaluated(1) and not is_evaluated(4)


@pytest.mark.slow
def test_resumes_runs_of_older_versions(text_file, copy_of):
    """If a saved config lacks fields of newer versions, these fields get the values that older versions used."""
    workdir = copy_of("gpt", **SMALL)
    path = workdir / "config.json"
    groups = json.loads(path.read_text())
    for field in ("position", "activation", "norm_position"):
        del groups["model"][field]
    del groups["train"]["z_loss"]
    path.write_text(json.dumps(groups))
    with pytest.raises(UserError, match=r"config: model\.position was 'learned', now 'rope'\.\n"):
        train(config_for(text_file, **SMALL, model__position="rope"), str(workdir))
    assert json.loads(path.read_text()) == groups
    train(config_for(text_file, **SMALL, train__steps=42), str(workdir))
    assert list(losses_in(workdir)) == [10, 20, 30, 40, 42]
    assert json.loads(path.read_text())["model"]["position"] == "learned"


@pytest.mark.slow
def test_trained_models_continue_at_a_longer_context(text_file, trained_run, tmp_path, monkeypatch):
    """A model with RoPE trains at a longer context in a new workdir; a model with learned positions is refused."""
    monkeypatch.chdir(ROOT)
    fields = dict(**SMALL, model__position="rope")
    short = trained_run("gpt", **fields)
    trained = inference.load_trained(short)
    longer = tmp_path / "longer"
    run_folder.write_imported(longer, trained.model, trained.params, {}, trained.tokenizer, {})
    config = run_config.get_config(str(longer))
    config.data.source = str(text_file)
    config.model.context_length = 64
    config.optimizer.warmup_steps = 1
    config.train.update(steps=2, log_every=1, eval_steps=4)
    train(config, str(longer))
    assert inference.load(longer).model.config.context_length == 64
    assert losses_in(longer)[1] == pytest.approx(losses_in(short, "eval")[40], rel=0.1)
    config.train.steps = 3
    train(config, str(longer))
    assert list(losses_in(longer)) == [1, 2, 3]
    with pytest.raises(UserError, match=r"context_length was 32, now 64.\n.*convert --from=run"):
        run_folder.check_workdir(short, config_for(text_file, **{**fields, "model__context_length": 64}))

    learned = tmp_path / "learned"
    trained = inference.load_trained(trained_run("gpt", **SMALL))
    run_folder.write_imported(learned, trained.model, trained.params, {}, trained.tokenizer, {})
    config = run_config.get_config(str(learned))
    config.model.context_length = 64
    with pytest.raises(UserError, match=r"model\.context_length was 32, now 64"):
        run_folder.check_workdir(learned, config)


@pytest.mark.slow
def test_resumes_on_other_devices(text_file, tmp_path, monkeypatch):
    """Two steps on each of three meshes give the losses of six steps on one mesh, up to rounding."""
    devices = jax.devices()

    def train_on(number, workdir, steps, **mesh):
        monkeypatch.setattr(jax, "devices", lambda *_: devices[:number])
        train(config_for(
            text_file, "pgpt", **SMALL, train__steps=steps, train__log_every=1, train__checkpoint_every=2,
            train__eval_steps=1, **{f"mesh__{axis}": length for axis, length in mesh.items()}), str(workdir))

    meshes = [(8, dict(data=2, path=2, tensor=2)), (4, dict(fsdp=2, path=2)), (1, {})]
    train_on(8, tmp_path / "one", 6)
    for i, (number, mesh) in enumerate(meshes, start=1):
        train_on(number, tmp_path / "many", 2 * i, **mesh)
    one, many = losses_in(tmp_path / "one"), losses_in(tmp_path / "many")
    assert list(many) == list(one) == list(range(1, 7))
    np.testing.assert_allclose([many[step] for step in many], [one[step] for step in one], rtol=2e-5)


# ---------------------------------------------------------------------- outputs and divergence

@pytest.mark.slow
def test_unwritable_standard_output_does_not_end_a_run(text_file, tmp_path, monkeypatch):
    """A closed standard output does not end data preparation, training or the final message."""

    class ClosedStream:
        def isatty(self):
            return False

        def write(self, text=""):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    monkeypatch.setattr(sys, "stdout", ClosedStream())
    train(config_for(text_file, data__store=str(tmp_path / "store"), train__steps=2), str(tmp_path / "run"))
    monkeypatch.setattr(inference.TextModel, "stream", lambda *_, **__: iter(["a text"]))
    print_final_message(str(tmp_path / "run"))
    assert [line["step"] for line in metrics.read_lines(tmp_path / "run" / "metrics.jsonl")] == [2, 2]


@pytest.mark.slow
def test_divergence_keeps_the_last_finite_state(text_file, tmp_path, capsys):
    """A run that diverges counts and logs the updates that it skipped, and keeps its finite checkpoints."""
    config = config_for(
        text_file, optimizer__learning_rate=1e30, optimizer__warmup_steps=22, optimizer__clip_norm=0.0,
        train__checkpoint_every=1, train__log_every=1, train__on_nonfinite="skip", train__max_nonfinite=3)
    with pytest.raises(DivergenceError) as error:
        train(config, str(tmp_path))
    message = re.fullmatch(
        r"3 non-finite updates in a row \(config.train.max_nonfinite\): step (\d+): loss nan, gradient norm nan; "
        r"its batch: rows (?:\d+, ){7}\d+ of the training text\.\n"
        r"The newest checkpoint, of step (\d+), is not affected\. Try a lower config.optimizer.learning_rate",
        str(error.value))
    step, newest = map(int, message.groups())
    assert newest == step - 1
    assert capsys.readouterr().out.count("Update skipped") == 2
    # Skipped updates do not change the state.
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state_of(tmp_path, newest)))
    losses = list(losses_in(tmp_path).values())
    assert losses[-2:] == [None, None] and None not in losses[:-2]
    assert json.loads((tmp_path / "sessions.jsonl").read_text().splitlines()[-1])["diverged"] == str(error.value)


# ---------------------------------------------------------------------- custom architectures

@pytest.mark.slow
def test_the_readme_architecture_trains(text_file, tmp_path, monkeypatch, optimized):
    """The README's example trains. It applies its blocks twice, so they have twice the FLOPs of gpt's blocks."""
    readme = (ROOT / "README.md").read_text()
    names = {}
    exec(re.search(r"```python\n(# my_models/twice\.py.*?)```", readme, re.DOTALL)[1], names)
    monkeypatch.setitem(models.ARCHITECTURES, "twice", names["Twice"])
    config = config_for(text_file, model__architecture="twice", model__num_layers=1)
    model, gpt = models.build(**config.model), models.build(**config_for(text_file, model__num_layers=1).model)
    assert models.num_parameters(model) == models.num_parameters(gpt)
    head = 6 * 64 * 512
    assert train_flops_per_token(model) - head == 2 * (train_flops_per_token(gpt) - head)
    train(config, str(tmp_path))
    assert losses_in(tmp_path, "eval")[40] < 0.85 * math.log(257)


class WithFlaxLayers(nn.Module):
    """A trunk with Flax layers, whose parameters have no axis names."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        x_BxTxD = stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)
        return x_BxTxD + nn.Dense(self.config.d_model, name="plain")(nn.RMSNorm(name="rms")(x_BxTxD))


@pytest.mark.slow
def test_parameters_without_axis_names_are_replicated(text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "plain", WithFlaxLayers)
    config = config_for(text_file, model__architecture="plain", model__num_layers=1, model__d_model=16,
                        model__num_heads=2, mesh__fsdp=2, mesh__tensor=2, train__steps=2, train__eval_steps=1,
                        train__checkpoint_every=1)
    program = build_program(config)
    trunk = program.shardings.params["trunk"]
    whole = [trunk["plain"]["kernel"], trunk["plain"]["bias"], trunk["rms"]["scale"]]
    assert all(sharding.is_fully_replicated for sharding in whole)
    assert not trunk["blocks"]["mlp"]["up"]["kernel"].is_fully_replicated
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), nn.unbox(program.abstract_params))
    zeros = jax.tree.map(np.zeros_like, ones)
    state = jax.tree.map(lambda x: np.full(x.shape, x.dtype == np.int32, x.dtype),  # moments 0, counts 1
                         jax.eval_shape(program.optimizer.init, ones))
    decay = jax.jit(program.optimizer.update)(zeros, state, ones)[0]["trunk"]
    assert np.all(decay["plain"]["kernel"] < 0)
    assert not np.any(decay["plain"]["bias"]) and not np.any(decay["rms"]["scale"])

    train(config, str(tmp_path))
    model, params, *_ = inference.load_trained(tmp_path)
    ids = np.arange(12)[None] % 256
    whole_logits = forward(model, params, ids)[0, -1]
    texts = decoder.DecodeSession(model, layout.pack(model, params), 512, ids[:, :5])
    texts.sample(Sampling())
    texts.ids[0] += ids[0, 5:].tolist()
    np.testing.assert_allclose(texts.sample_with_logits(Sampling())[1][0], whole_logits, atol=1e-4)


def test_bigram_loss():
    import bigram

    train_tokens, validation = np.array([0, 1, 2, 0, 1, 1]), np.array([0, 1, 2, 2])
    # The bigram 0→1 occurs twice, and 1→2, 1→1 and 2→0 occur once; the last token begins no bigram.
    expected = -np.mean(np.log([(2 + 0.5) / (2 + 1.5), (1 + 0.5) / (2 + 1.5), 0.5 / (1 + 1.5)]))
    found = bigram.bigram_loss(train_tokens, validation[:-1], validation[1:], 3, k=0.5)
    assert found == pytest.approx(expected)


# ---------------------------------------------------------------------- refusals

@pytest.mark.parametrize("fields, substrings", [
    ({"train__batch_size": 12}, ["batch_size=12", "multiple of 8"]),
    ({"train__microbatches": 3}, ["batch_size=8", "3 microbatches"]),
    ({"train__loss_chunks": 5}, ["loss_chunks=5", "context_length=64"]),
    ({"train__steps": 0}, ["train.steps=0"]),
    ({"train__eval_steps": -1}, ["eval_steps=-1"]),
    ({"train__seed": -1}, ["seed=-1"]),
    ({"train__seed": 2**32}, ["config.train.seed=4294967296", "below 2^32"]),
    ({"train__seed": 2**63}, ["config.train.seed=9223372036854775808", "below 2^32"]),
    ({"model__vocab_size": 200}, ["vocab_size=200", "257"]),
    ({"model__num_heads": 5}, ["num_heads=5"]),
    ({"mesh__data": 3}, ["data=3"]),
    ({"mesh__path": 2}, ["path=2", "gpt has no paths"]),
    ({"data__packing": "best"}, ["packing='best'"]),
    ({"data__source": "nothing.txt"}, ["nothing.txt", "no such file"]),
    ({"data__source": "hf:some/corpus", "data__store": "nowhere"}, ["smallgpt_jax.prepare", "nowhere"]),
    ({"data__source": "tfds:lm1b", "data__store": "nowhere"}, ["smallgpt_jax.prepare", "nowhere"]),
    ({"data__source": " "}, ["config.data.source: is empty"]),
    ({"data__invalid_items": "drop"}, ["invalid_items='drop'", "'skip'"]),
    ({"data__workers": -1}, ["workers=-1"]),
    ({"data__mixture": "somewhere"}, ["'somewhere' is not FOLDER=WEIGHT"]),
    ({"train__on_nonfinite": "go on"}, ["on_nonfinite='go on'"]),
    ({"train__max_nonfinite": 0}, ["max_nonfinite=0"]),
    ({"train__z_loss": -1e-4}, ["config.train.z_loss=-0.0001", "at least 0"]),
    ({"train__z_loss": float("nan")}, ["config.train.z_loss=nan", "finite"]),
    ({"model__norm_position": "sandwich"}, ["config.model.norm_position='sandwich'", "pre, post, deepnorm"]),
    ({"train__batch_size": 80_000}, ["one batch takes 80000 rows"]),
    ({"optimizer__name": "adam"}, ["'adam'"]),
])
def test_refused_configs_create_no_workdir(text_file, tmp_path, fields, substrings):
    config = config_for(text_file, **fields)
    with pytest.raises(UserError) as error:
        train(config, str(tmp_path / "run"))
    assert all(s in str(error.value) for s in substrings), str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_out_of_memory_message(text_file, tmp_path, monkeypatch):
    def refused_with(report, raised):
        def fail(program):
            raise jax.errors.JaxRuntimeError(report)

        monkeypatch.setattr(Program, "compile_train_step", fail)
        with pytest.raises(raised) as error:
            train(config_for(text_file), str(tmp_path / "run"))
        return str(error.value)

    message = refused_with(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.90G of 15.75G hbm.", UserError)
    substrings = ["batch_size=8", "Used 26.90G", "increase config.train.microbatches", "remat='full'", "mesh.fsdp"]
    assert all(s in message for s in substrings) and message.count("\n") == 1
    for report in ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", "INTERNAL: failure"):
        assert refused_with(report, jax.errors.JaxRuntimeError) == report


@pytest.mark.slow
def test_refuses_workdirs_of_other_runs(text_file, tmp_path, copy_of):
    def assert_refused(config, workdir, *substrings):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as error:
            train(config, str(workdir))
        assert all(s in str(error.value) for s in substrings), str(error.value)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    run_dir = copy_of("gpt", **SMALL)
    assert_refused(config_for(text_file, "lgpt", **SMALL), run_dir, "model.architecture was 'gpt', now 'lgpt'",
                   "model.blocks_per_stage was None, now 2")
    assert_refused(config_for(text_file, **SMALL, train__seed=1), run_dir, "train.seed was 1337, now 1")
    assert_refused(config_for(text_file, **SMALL, optimizer__learning_rate=0.1), run_dir, "optimizer.learning_rate")
    assert_refused(config_for(text_file, **SMALL, train__steps=39), run_dir, "existing run of 40 steps")
    run_folder.check_workdir(run_dir, config_for(
        text_file, **SMALL, train__steps=50, train__log_every=5, train__microbatches=2))

    store = json.loads((run_dir / "store.json").read_text())
    store["splits"]["train"]["tokens"] -= 1
    (run_dir / "store.json").write_text(json.dumps(store))
    assert_refused(config_for(text_file, **SMALL), run_dir, "the training text has changed",
                   "tokens for training: from")

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    assert_refused(config_for(text_file, **SMALL), tmp_path / "full", "folder is not empty and not a run")
    assert_refused(config_for(text_file, **SMALL), tmp_path / "full" / "thesis.tex", "not a writable folder")
    assert_refused(config_for(text_file, **SMALL), tmp_path / "full" / "thesis.tex" / "below", "not a writable folder")
    for content in ("{", "{}", "[]"):
        (run_dir / "config.json").write_text(content)
        assert_refused(config_for(text_file, **SMALL), run_dir, "config.json")


def test_refuses_unwritable_workdirs(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # os.access always returns True for root
    for workdir in (tmp_path, tmp_path / "run"):
        with pytest.raises(UserError, match="not a writable folder"):
            train(config_for(text_file), str(workdir))
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be created"):
        train(config_for(text_file), "/proc/run")


def test_prepare_and_a_store_of_other_settings(text_file, tmp_path):
    flags = ["--config=configs/gpt.py:tiny", f"--config.data.source={text_file}",
             f"--config.data.store={tmp_path / 'store'}"]
    first, second = (call("prepare", *flags) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert re.search(r"\d+ documents, [\d.]+ M tokens for training", first.stdout)
    assert "existing token store" in second.stdout
    assert (tmp_path / "store" / "metadata.json").is_file()
    config = config_for(text_file, data__store=str(tmp_path / "store"), data__validation_fraction=0.3)
    with pytest.raises(UserError, match=r"was made with validation_fraction=0\.1"):
        train(config, str(tmp_path / "run"))


def test_an_error_is_one_line(text_file, tmp_path):
    result = call("main", "--config=configs/gpt.py:tiny", f"--workdir={tmp_path / 'run'}",
                  f"--config.data.source={text_file}", "--config.train.batch_size=0")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: config.train.batch_size=0: must be at least 1\n"
