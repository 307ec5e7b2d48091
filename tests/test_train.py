"""Whole runs, as a user starts them: training, continuing, text at the end, and refusals."""

import json
import math
import os
import re
import shutil
import sys
import time
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ARCHITECTURES, ROOT, forward, load_config, run

from configs import run as run_config
from smallgpt_jax import inference, metrics, models
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.block import layer_configs, stack_blocks
from smallgpt_jax.program import Program, build_program
from smallgpt_jax.summary import closing
from smallgpt_jax.train import train

sys.path.insert(0, str(ROOT / "benchmarks"))


def config_for(text_file, architecture="gpt", **fields):
    """A tiny run on `text_file`, on all eight devices."""
    return load_config(architecture, **{"data__source": str(text_file), **fields})


def flags_for(text_file, workdir, architecture="gpt", *overrides):
    return [f"--config=configs/{architecture}.py:tiny", f"--workdir={workdir}",
            f"--config.data.source={text_file}", *(f"--config.{field}" for field in overrides)]


def state_of(workdir, step):
    """All arrays of a checkpoint, as they were saved."""
    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        tree = checkpoints.restore(step, args=ocp.args.Composite(
            params=ocp.args.StandardRestore(), opt_state=ocp.args.StandardRestore()))
    return jax.tree.map(np.asarray, (tree["params"], tree["opt_state"]))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def losses_in(workdir, split="train", of="loss"):
    return {line["step"]: line[of] for line in metrics.read_lines(workdir / "metrics.jsonl")
            if line["split"] == split}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_from_the_command_line(architecture, text_file, tmp_path):
    import bigram

    workdir = tmp_path / "new" / "run"
    width = 192 if architecture in ("lgpt", "cgpt") else 64  # of the first stage: the head reads 48
    result = run("main", *flags_for(
        text_file, workdir, architecture, f"model.d_model={width}", "train.steps=150",
        "optimizer.decay_steps=150", "train.log_every=50", "train.eval_every=75", "train.eval_steps=16"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""

    lines = metrics.read_lines(workdir / "metrics.jsonl")
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in trained] == [50, 100, 150]
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(line)
               for line in trained)
    assert trained[-1]["learning_rate"] == pytest.approx(3e-4, rel=0.05)
    evaluated = [line for line in lines if line["split"] == "eval"]
    assert [line["step"] for line in evaluated] == [75, 150]
    store = json.loads((workdir / "store.json").read_text())["splits"]["validation"]
    assert evaluated[-1]["bits_per_byte"] == pytest.approx(
        evaluated[-1]["loss"] / math.log(2) * store["tokens"] / store["text_bytes"])
    assert f"{evaluated[-1]['bits_per_byte']:.4f} bits per byte" in result.stdout.splitlines()[-2]
    assert list(workdir.glob("events.out.tfevents*"))

    # More than word pairs; the quickstart's own figures are in the README.
    comparison = bigram.compare(workdir)
    assert comparison["model_loss"] == pytest.approx(evaluated[-1]["loss"])
    assert comparison["model_loss"] < comparison["bigram_loss"] - 0.1

    def generate(*flags):
        result = run("generate", f"--workdir={workdir}", "--prompt=the cat", "--max_new_tokens=30", *flags)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    text = generate("--temperature=0")
    assert text.startswith("the cat") and len(text) > len("the cat") + 10
    assert generate("--top_k=1", "--seed=5") == text


@pytest.mark.parametrize("architecture", ["cgpt", "pgpt"])
def test_continuing_is_as_if_never_stopped(architecture, text_file, tmp_path):
    config = config_for(text_file, architecture, model__dropout=0.1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, str(whole))
    with config.unlocked():
        config.train.steps = 20
    train(config, str(parts))
    config.train.steps = 40
    train(config, str(parts))
    assert_equal(state_of(parts, 40), state_of(whole, 40))
    assert losses_in(parts) == losses_in(whole)
    assert losses_in(parts, "eval") == losses_in(whole, "eval")


def test_a_finished_run_is_evaluated_again_on_other_rows(text_file, tmp_path):
    """And only then; lines of older versions, without `targets`, are taken for those of the config beside them."""
    path = tmp_path / "metrics.jsonl"

    def targets_after(eval_steps: int) -> list:
        train(config_for(text_file, train__steps=2, train__eval_steps=eval_steps), str(tmp_path))
        assert json.loads((tmp_path / "config.json").read_text())["train"]["eval_steps"] == eval_steps
        return [line.get("targets") for line in metrics.read_lines(path) if line["split"] == "eval"]

    one = 8 * 64  # a batch
    assert targets_after(1) == targets_after(1) == [one]
    assert targets_after(3) == targets_after(3) == [one, 3 * one]
    lines = metrics.read_lines(path)
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "targets"}) + "\n" for line in lines))
    assert targets_after(3) == [None, None]
    assert targets_after(1) == [None, None, one]


def test_a_run_of_before_a_field_existed_goes_on(text_file, tmp_path):
    train(config_for(text_file, train__steps=10), str(tmp_path))
    path = tmp_path / "config.json"
    groups = json.loads(path.read_text())
    for field in ("position", "activation"):
        del groups["model"][field]
    path.write_text(json.dumps(groups))
    with pytest.raises(UserError, match=r"config: model\.position was 'learned', now 'rope'\.\n"):
        train(config_for(text_file, train__steps=20, model__position="rope"), str(tmp_path))
    assert json.loads(path.read_text()) == groups
    train(config_for(text_file, train__steps=20), str(tmp_path))
    assert list(losses_in(tmp_path)) == [10, 20]
    assert json.loads(path.read_text())["model"]["position"] == "learned"


def test_a_run_that_lost_its_last_steps_repeats_them(text_file, tmp_path):
    config = config_for(text_file, train__log_every=15)  # a checkpoint lies between two lines
    train(config, str(tmp_path))
    before, losses, means = state_of(tmp_path, 40), losses_in(tmp_path), losses_in(tmp_path, of="loss_mean")
    shutil.rmtree(tmp_path / "checkpoints" / "40")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "spl')  # cut short
    train(config, str(tmp_path))
    assert_equal(state_of(tmp_path, 40), before)
    assert losses_in(tmp_path) == losses and losses_in(tmp_path, of="loss_mean") == means
    steps = [(line["split"], line["step"]) for line in metrics.read_lines(tmp_path / "metrics.jsonl")]
    assert len(steps) == len(set(steps)) == 5


def test_a_run_stopped_before_its_evaluation_makes_up_for_it(text_file, tmp_path):
    config = config_for(text_file)
    train(config, str(tmp_path))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:-1]) + "\n")
    train(config, str(tmp_path))
    again = path.read_text().splitlines()
    assert again[:-1] == whole[:-1]
    assert {**json.loads(again[-1]), "time": 0} == {**json.loads(whole[-1]), "time": 0}


def test_what_is_logged(text_file, tmp_path, monkeypatch):
    """Each step and every tenth give the same losses, means over the lines' steps, and the tokens so far; saving
    is no time of training."""
    save, late = Checkpoints.save, []

    def save_slowly(*arguments):
        late.append(1000)
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", save_slowly)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(
        time=time.time, monotonic=lambda: time.monotonic() + sum(late)))
    started = time.time()
    each, tenth = tmp_path / "each", tmp_path / "tenth"
    for folder, log_every in ((each, 1), (tenth, 10)):
        train(config_for(text_file, train__log_every=log_every, train__steps=20, train__checkpoint_every=15),
              str(folder))
    losses = losses_in(each)
    assert losses_in(each, of="loss_mean") == losses
    assert losses_in(tenth) == {step: losses[step] for step in (10, 20)}
    assert losses_in(tenth, of="loss_mean") == {
        step: pytest.approx(np.mean([losses[i] for i in range(step - 9, step + 1)])) for step in (10, 20)}
    lines = metrics.read_lines(tenth / "metrics.jsonl")
    assert [(line["split"], line["tokens"]) for line in lines] == [
        ("train", 10 * 8 * 64), ("train", 20 * 8 * 64), ("eval", 20 * 8 * 64)]
    times = [started, *(line["time"] for line in lines), time.time()]
    assert times == sorted(times)
    assert lines[1]["tokens_per_second"] > 10 * 8 * 64 / 1000


def test_a_run_whose_metrics_are_gone_has_last_words(text_file, tmp_path, capsys):
    workdir = tmp_path / "my run"
    train(config_for(text_file, train__steps=10), str(workdir))
    (workdir / "metrics.jsonl").unlink()
    closing(str(workdir))
    assert capsys.readouterr().out.endswith(
        f"\nMore text:\n  python -m smallgpt_jax.generate '--workdir={workdir}' --prompt=\"...\"\n")


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_trained_model_goes_on_at_a_longer_context(text_file, tmp_path, monkeypatch, position):
    """Taken into a new workdir; where positions are learned that is refused."""
    monkeypatch.chdir(ROOT)
    train(config_for(text_file, model__position=position), str(tmp_path / "short"))
    trained = inference.load_trained(tmp_path / "short")
    longer = tmp_path / "longer"
    run_folder.plant(longer, trained.model, trained.params, {}, trained.tokenizer, {})
    config = run_config.get_config(str(longer))
    config.data.source = str(text_file)
    config.model.context_length = 128
    config.optimizer.warmup_steps = 1
    config.train.update(steps=4, log_every=1, eval_steps=4, loss_chunks=4)
    if position == "learned":
        with pytest.raises(UserError, match=r"model\.context_length was 64, now 128"):
            train(config, str(longer))
        return
    train(config, str(longer))
    assert inference.load(longer).model.config.context_length == 128
    assert losses_in(longer)[1] == pytest.approx(losses_in(tmp_path / "short", "eval")[40], rel=0.1)
    config.train.steps = 5
    train(config, str(longer))
    with pytest.raises(UserError, match=r"context_length was 64, now 128.\n.*convert --from=run"):
        train(config_for(text_file, model__position=position, model__context_length=128), str(tmp_path / "short"))


def test_a_finished_run_stays_as_it_is(text_file, tmp_path, capsys):
    config = config_for(text_file, train__steps=20)
    train(config, str(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train(config, str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert "20 of them done" in capsys.readouterr().out


def test_only_the_newest_checkpoints_stay(text_file, tmp_path):
    train(config_for(text_file, train__checkpoint_every=10, train__keep_checkpoints=2,
                     train__eval_every=40), str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["30", "40"]


@pytest.mark.slow
def test_one_device_and_eight_give_the_same_losses(text_file, tmp_path):
    for devices in (1, 8):
        result = run("main", *flags_for(text_file, tmp_path / str(devices), "pgpt"), devices=devices)
        assert result.returncode == 0, result.stderr
    one, eight = losses_in(tmp_path / "1"), losses_in(tmp_path / "8")
    assert one.keys() == eight.keys()
    assert [eight[step] for step in one] == pytest.approx(list(one.values()), rel=1e-5)


def test_an_architecture_of_ones_own(text_file, tmp_path, monkeypatch):
    """The README's example: one class and one line."""
    readme = (ROOT / "README.md").read_text()
    names = {}
    exec(re.search(r"```python\n(# my_models/twice\.py.*?)```", readme, re.DOTALL)[1], names)
    monkeypatch.setitem(models.ARCHITECTURES, "twice", names["Twice"])
    config = config_for(text_file, model__architecture="twice")
    model, gpt = models.build(**config.model), models.build(**config_for(text_file).model)
    assert models.num_parameters(model) == models.num_parameters(gpt)
    head = 6 * 64 * 512
    assert train_flops_per_token(model) - head == 2 * (train_flops_per_token(gpt) - head)
    train(config, str(tmp_path))
    assert losses_in(tmp_path, "eval")[40] < 0.85 * math.log(257)


class WithFlaxLayers(nn.Module):
    """A trunk with layers of flax, whose parameters name no axes."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        x_BxTxD = stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)
        return x_BxTxD + nn.Dense(self.config.d_model, name="plain")(nn.RMSNorm(name="rms")(x_BxTxD))


def test_parameters_that_name_no_axes_are_whole_on_each_device(text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "plain", WithFlaxLayers)
    config = config_for(text_file, model__architecture="plain", model__num_layers=1, mesh__fsdp=2, mesh__tensor=2,
                        train__steps=2, train__eval_steps=1, train__checkpoint_every=1)
    program = build_program(config)
    trunk = program.shardings.params["trunk"]
    whole = [trunk["plain"]["kernel"], trunk["plain"]["bias"], trunk["rms"]["scale"]]
    assert all(sharding.is_fully_replicated for sharding in whole)
    assert not trunk["blocks"]["mlp"]["up"]["kernel"].is_fully_replicated
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), nn.unbox(models.abstract_params(program.model)))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, program.optimizer.init(ones))  # not step 0
    decay = program.optimizer.update(zeros, state, ones)[0]["trunk"]
    assert jnp.all(decay["plain"]["kernel"] < 0)
    assert not jnp.any(decay["plain"]["bias"]) and not jnp.any(decay["rms"]["scale"])

    train(config, str(tmp_path))
    config.train.steps = 3
    train(config, str(tmp_path))
    assert sorted(losses_in(tmp_path, "eval")) == [2, 3]
    model, params, *_ = inference.load_trained(tmp_path)
    ids = np.arange(12)[None] % 256
    whole_logits = forward(model, params, ids)[0, -1]
    texts = decoder.Texts(model, layout.pack(model, params), 512, ids[:, :5])
    texts.draw(Sampling())
    texts.ids[0] += ids[0, 5:].tolist()
    np.testing.assert_allclose(texts.draw_with_logits(Sampling())[1][0], whole_logits, atol=1e-4)


def test_bigram_loss_is_that_of_the_formula():
    import bigram

    train_tokens, validation = np.array([0, 1, 2, 0, 1, 1]), np.array([0, 1, 2, 2])
    # Counts: 0→1 twice, 1→2 once, 1→1 once, 2→0 once; the last token begins no pair.
    expected = -np.mean(np.log([(2 + 0.5) / (2 + 1.5), (1 + 0.5) / (2 + 1.5), 0.5 / (1 + 1.5)]))
    found = bigram.bigram_loss(train_tokens, validation[:-1], validation[1:], 3, k=0.5)
    assert found == pytest.approx(expected)


# ---------------------------------------------------------------------- refusals

@pytest.mark.parametrize("fields, words", [
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
    ({"data__source": " "}, ["config.data.source is empty"]),
    ({"data__invalid_items": "drop"}, ["invalid_items='drop'", "'skip'"]),
    ({"data__workers": -1}, ["workers=-1"]),
    ({"data__mixture": "somewhere"}, ["'somewhere' is not FOLDER=WEIGHT"]),
    ({"train__on_nonfinite": "go on"}, ["on_nonfinite='go on'"]),
    ({"train__max_nonfinite": 0}, ["max_nonfinite=0"]),
    ({"train__batch_size": 80_000}, ["one batch takes 80000 rows"]),
    ({"optimizer__name": "adam"}, ["'adam'"]),
])
def test_what_cannot_be_trained_leaves_no_workdir(text_file, tmp_path, fields, words):
    config = config_for(text_file, **fields)
    with pytest.raises(UserError) as error:
        train(config, str(tmp_path / "run"))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("report, raised, words", [
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.90G of 15.75G hbm.", UserError,
     ["batch_size=8", "Used 26.90G", "more config.train.microbatches", "remat='full'", "mesh.fsdp"]),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", jax.errors.JaxRuntimeError, ["vmem"]),
    ("INTERNAL: failure", jax.errors.JaxRuntimeError, ["INTERNAL"])])
def test_a_run_that_needs_more_memory_than_there_is(text_file, tmp_path, monkeypatch, report, raised, words):
    def fail(program):
        raise jax.errors.JaxRuntimeError(report)

    monkeypatch.setattr(Program, "compile_train_step", fail)
    with pytest.raises(raised) as error:
        train(config_for(text_file), str(tmp_path / "run"))
    assert all(word in str(error.value) for word in words) and str(error.value).count("\n") <= 1


def test_workdirs_that_are_not_this_runs(text_file, tmp_path):
    def refused(config, workdir, *words):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as error:
            train(config, str(workdir))
        assert all(word in str(error.value) for word in words), str(error.value)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    run_dir = tmp_path / "run"
    train(config_for(text_file, train__steps=10), str(run_dir))
    refused(config_for(text_file, "lgpt"), run_dir, "model.architecture was 'gpt', now 'lgpt'",
            "model.blocks_per_stage was None, now 2")
    refused(config_for(text_file, train__seed=1), run_dir, "train.seed was 1337, now 1")
    refused(config_for(text_file, optimizer__learning_rate=0.1), run_dir, "optimizer.learning_rate")
    train(config_for(text_file, train__steps=20, train__log_every=5, train__microbatches=1), str(run_dir))

    other = tmp_path / "words.txt"
    other.write_text(text_file.read_text())
    train(config_for(other, train__steps=10), str(tmp_path / "changed"))
    other.write_text(text_file.read_text() + "".join(f"{i} more words\n" for i in range(3000)))
    refused(config_for(other, train__steps=20), tmp_path / "changed", "its text has changed")

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    refused(config_for(text_file), tmp_path / "full", "holds files, but no run")
    refused(config_for(text_file), other, "not a folder")
    refused(config_for(text_file), other / "below", "not a folder")
    for content in ("{", "{}", "[]"):
        (run_dir / "config.json").write_text(content)
        refused(config_for(text_file), run_dir, "config.json")


def test_workdir_that_cannot_be_written(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for workdir in (tmp_path, tmp_path / "run"):
        with pytest.raises(UserError, match="may write"):
            train(config_for(text_file), str(workdir))
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be made"):
        train(config_for(text_file), "/proc/run")


def test_store_made_from_something_else(text_file, tmp_path):
    config = config_for(text_file, train__steps=10, data__store=str(tmp_path / "store"))
    train(config, str(tmp_path / "first"))
    with config.unlocked():
        config.data.validation_fraction = 0.3
    with pytest.raises(UserError, match=r"was made with validation_fraction=0\.1"):
        train(config, str(tmp_path / "second"))


def test_errors_are_two_lines_at_most(text_file, tmp_path):
    result = run("main", *flags_for(text_file, tmp_path / "run", "gpt", "train.batch_size=0"))
    assert result.returncode == 1
    assert result.stderr == "error: config.train.batch_size=0: must be at least 1\n"
    assert result.stdout == ""


def test_prepare(text_file, tmp_path):
    flags = ["--config=configs/gpt.py:tiny", f"--config.data.source={text_file}",
             f"--config.data.store={tmp_path / 'store'}"]
    first, second = (run("prepare", *flags) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert re.search(r"\d+ documents, [\d.]+ M tokens for training", first.stdout)
    assert "there already" in second.stdout
    assert (tmp_path / "store" / "metadata.json").is_file()
