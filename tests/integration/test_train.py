"""Tests that train tiny models.

They cover learning, outputs, divergence, custom architectures, and configs and workdirs that are
refused.
"""

import contextlib
import functools
import json
import math
import os
import re
import sys
from unittest import mock

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import ROOT, call, forward, init
from run_helpers import SMALL, Twice, config_for, losses_in, state_of

from smallgpt_jax import inference, models
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.run import metrics
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.workdir import check_workdir
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.loss_band import BandPoint, LossBand
from smallgpt_jax.training.messages import print_final_message
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.trainer import train_and_evaluate

sys.path.insert(0, str(ROOT / "experiments"))


@pytest.fixture
def optimized(monkeypatch):
    """Makes training steps compile with optimization and for one device. Runs of a hundred steps
    are then faster.
    """
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    compiled = functools.cached_property(
        lambda program: program.lowered_train_step.compile({"xla_backend_optimization_level": 1})
    )
    compiled.__set_name__(Program, "compiled_train_step")
    monkeypatch.setattr(Program, "compiled_train_step", compiled)


@pytest.mark.slow
def test_a_run_learns_more_than_bigrams(text_file, tmp_path, optimized):
    import bigram

    train_and_evaluate(
        config_for(
            text_file,
            model__num_layers=1,
            optimizer__learning_rate=6e-3,
            optimizer__decay_steps=150,
            train__steps=150,
            train__log_every=50,
            train__eval_every=75,
            train__eval_steps=16,
            train__checkpoint_every=75,
        ),
        str(tmp_path),
    )
    lines = metrics.read_lines(tmp_path / "metrics.jsonl")
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in trained] == [50, 100, 150]
    assert all(
        {"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= set(line) for line in trained
    )
    assert trained[-1]["learning_rate"] == pytest.approx(6e-4, rel=0.05)
    evaluated = [line for line in lines if line["split"] == "eval"]
    assert [line["step"] for line in evaluated] == [75, 150]
    store = json.loads((tmp_path / "store.json").read_text())["splits"]["validation"]
    assert evaluated[-1]["bits_per_byte"] == pytest.approx(
        evaluated[-1]["loss"] / math.log(2) * store["tokens"] / store["text_bytes"]
    )

    comparison = bigram.compare(tmp_path)
    assert comparison["model_loss"] == pytest.approx(evaluated[-1]["loss"])
    assert comparison["model_loss"] < comparison["bigram_loss"] - 0.1

    flags = [f"--workdir={tmp_path}", "--prompt=the cat", "--max_new_tokens=30"]
    greedy, sampled = (
        call("generate", *flags, "--temperature=0"),
        call("generate", *flags, "--top_k=1", "--seed=5"),
    )
    assert (greedy.returncode, greedy.stderr) == (0, "")
    assert greedy.stdout.startswith("the cat") and len(greedy.stdout) > len("the cat") + 10
    assert sampled.stdout == greedy.stdout


# ---------------------------------------------------------------------- outputs and divergence


@pytest.mark.slow
def test_unwritable_standard_output_does_not_end_a_run(text_file, tmp_path):
    """Data preparation, training and the final message continue if standard output is closed."""

    class ClosedStream:
        def isatty(self):
            return False

        def write(self, text=""):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    # Not by the fixture monkeypatch, so that compiled steps are shared with other runs.
    with (
        contextlib.redirect_stdout(ClosedStream()),
        mock.patch.object(inference.TextModel, "stream", lambda *_, **__: iter(["a text"])),
    ):
        train_and_evaluate(
            config_for(text_file, **SMALL, data__store=str(tmp_path / "store"), train__steps=2),
            str(tmp_path / "run"),
        )
        print_final_message(str(tmp_path / "run"))
    assert [line["step"] for line in metrics.read_lines(tmp_path / "run" / "metrics.jsonl")] == [
        2,
        2,
    ]


@pytest.mark.slow
def test_divergence_keeps_the_last_finite_state(text_file, tmp_path, capsys, monkeypatch):
    """A run that diverges counts and logs the updates that it skipped, and keeps its finite
    checkpoints. Its first losses are outside of a band that its recipe is made to have.
    """
    band = LossBand(
        "gpt:other", (BandPoint(1, 1, "mean", 1.0, 0.01, 9), BandPoint(2, 2, "mean", 1, 0, 9))
    )
    monkeypatch.setattr(trainer, "find_band", lambda config, text: band)
    config = config_for(
        text_file,
        **SMALL,
        optimizer__learning_rate=1e30,
        optimizer__warmup_steps=22,
        optimizer__clip_norm=0.0,
        train__checkpoint_every=1,
        train__log_every=1,
        train__on_nonfinite="skip",
        train__max_nonfinite=3,
    )
    with pytest.raises(DivergenceError) as error:
        train_and_evaluate(config, str(tmp_path))
    message = re.fullmatch(
        r"3 non-finite updates in a row \(config.train.max_nonfinite\): step (\d+): loss nan, gradient norm nan; "
        r"its batch: rows (?:\d+, ){7}\d+ of the training text\.\n"
        r"The newest checkpoint, of step (\d+), is not affected\. Try a lower config.optimizer.learning_rate",
        str(error.value),
    )
    step, newest = map(int, message.groups())
    assert newest == step - 1
    output = capsys.readouterr().out
    assert output.count("Update skipped") == 2
    assert output.count("of other seeds of gpt:other") == 1  # says it once
    # Skipped updates do not change the state.
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state_of(tmp_path, newest)))
    losses = list(losses_in(tmp_path).values())
    assert losses[-2:] == [None, None] and None not in losses[:-2]
    assert json.loads((tmp_path / "sessions.jsonl").read_text().splitlines()[-1])[
        "diverged"
    ] == str(error.value)
    assert (tmp_path / "curves.png").exists()
    # The newest checkpoint is that of the second update in a row, so one more ends the run again.
    with pytest.raises(DivergenceError, match=f"3 non-finite updates in a row .*: step {step}:"):
        train_and_evaluate(config, str(tmp_path))


# ---------------------------------------------------------------------- custom architectures


def test_a_custom_architecture_is_counted(text_file, monkeypatch):
    """It applies its blocks twice, so they have twice the FLOPs of gpt's blocks."""
    monkeypatch.setitem(models.ARCHITECTURES, "twice", Twice)
    config = config_for(text_file, model__architecture="twice", model__num_layers=1)
    model, gpt = (
        models.build(**config.model),
        models.build(**config_for(text_file, model__num_layers=1).model),
    )
    assert models.num_parameters(model) == models.num_parameters(gpt)
    head = 6 * 64 * 512
    assert train_flops_per_token(model) - head == 2 * (train_flops_per_token(gpt) - head)


class WithFlaxLayers(nn.Module):
    """A trunk with Flax layers, whose parameters have no axis names."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        x_BxTxD = stack_blocks(layer_configs(self.config, self.config.num_layers), context)(x_BxTxD)
        return x_BxTxD + nn.Dense(self.config.d_model, name="plain")(
            nn.RMSNorm(name="rms")(x_BxTxD)
        )


@pytest.mark.slow
def test_parameters_without_axis_names_are_replicated(text_file, monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "plain", WithFlaxLayers)
    config = config_for(
        text_file,
        model__architecture="plain",
        model__num_layers=1,
        model__d_model=16,
        model__num_heads=2,
        mesh__fsdp=2,
        mesh__tensor=2,
    )
    program = build_program(config)
    trunk = program.shardings.params["trunk"]
    whole = [trunk["plain"]["kernel"], trunk["plain"]["bias"], trunk["rms"]["scale"]]
    assert all(sharding.is_fully_replicated for sharding in whole)
    assert not trunk["blocks"]["mlp"]["up"]["kernel"].is_fully_replicated
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), models.abstract_params(program.model))
    zeros = jax.tree.map(np.zeros_like, ones)
    state = jax.tree.map(
        lambda x: np.full(x.shape, x.dtype == np.int32, x.dtype),  # moments 0, counts 1
        jax.eval_shape(program.optimizer.init, ones),
    )
    update = functools.partial(program.optimizer.update, learning_rate=0.1, weight_decay=0.1)
    decay = jax.jit(update)(zeros, state, ones)[0]["trunk"]
    assert np.all(decay["plain"]["kernel"] < 0)
    assert not np.any(decay["plain"]["bias"]) and not np.any(decay["rms"]["scale"])

    model, params = program.model, init(program.model)
    ids = np.arange(12)[None] % 256
    whole_logits = forward(model, params, ids)[0, -1]
    texts = decoder.DecodeSession(
        decoder.Decoder(model, 512), layout.pack(model, params), ids[:, :5]
    )
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


@pytest.mark.parametrize(
    "fields, substrings",
    [
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
        (
            {"data__source": "hf:some/corpus", "data__store": "nowhere"},
            ["smallgpt_jax.prepare", "nowhere"],
        ),
        (
            {"data__source": "tfds:lm1b", "data__store": "nowhere"},
            ["smallgpt_jax.prepare", "nowhere"],
        ),
        ({"data__source": " "}, ["config.data.source: is empty"]),
        ({"data__invalid_items": "drop"}, ["invalid_items='drop'", "refuse, skip"]),
        ({"data__workers": -1}, ["workers=-1"]),
        ({"data__mixture": "somewhere"}, ["'somewhere' is not FOLDER=WEIGHT"]),
        ({"train__on_nonfinite": "go on"}, ["on_nonfinite='go on'"]),
        ({"train__max_nonfinite": 0}, ["max_nonfinite=0"]),
        ({"train__z_loss": -1e-4}, ["config.train.z_loss=-0.0001", "at least 0"]),
        ({"train__z_loss": float("nan")}, ["config.train.z_loss=nan", "finite"]),
        (
            {"model__norm_position": "sandwich"},
            ["config.model.norm_position='sandwich'", "pre, post, deepnorm"],
        ),
        ({"train__batch_size": 80_000}, ["one batch takes 80000 rows"]),
        ({"optimizer__name": "adam"}, ["'adam'"]),
    ],
)
def test_refused_configs_create_no_workdir(text_file, tmp_path, fields, substrings):
    config = config_for(text_file, **fields)
    with pytest.raises(UserError) as error:
        train_and_evaluate(config, str(tmp_path / "run"))
    assert all(s in str(error.value) for s in substrings), str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_out_of_memory_message(text_file, tmp_path, monkeypatch):
    def refused_with(report, raised):
        def fail(program):
            raise jax.errors.JaxRuntimeError(report)

        monkeypatch.setattr(Program, "compiled_train_step", property(fail))
        with pytest.raises(raised) as error:
            train_and_evaluate(config_for(text_file, **SMALL), str(tmp_path / "run"))
        return str(error.value)

    message = refused_with(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 26.90G of 15.75G hbm.",
        UserError,
    )
    substrings = [
        "batch_size=8",
        "Used 26.90G",
        "increase config.train.microbatches",
        "remat='full'",
        "mesh.fsdp",
    ]
    assert all(s in message for s in substrings) and message.count("\n") == 1
    for report in (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.",
        "INTERNAL: failure",
    ):
        assert refused_with(report, jax.errors.JaxRuntimeError) == report


@pytest.mark.slow
def test_refuses_workdirs_of_other_runs(text_file, tmp_path, copy_of):
    def assert_refused(config, workdir, *substrings):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as error:
            train_and_evaluate(config, str(workdir))
        assert all(s in str(error.value) for s in substrings), str(error.value)
        assert {
            path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
        } == before

    run_dir = copy_of("gpt", **SMALL)
    assert_refused(
        config_for(text_file, "lgpt", **SMALL),
        run_dir,
        "model.architecture was 'gpt', now 'lgpt'",
        "model.blocks_per_stage was None, now 2",
    )
    assert_refused(
        config_for(text_file, **SMALL, train__seed=1), run_dir, "train.seed was 1337, now 1"
    )
    assert_refused(
        config_for(text_file, **SMALL, optimizer__learning_rate=0.1),
        run_dir,
        "optimizer.learning_rate",
    )
    assert_refused(
        config_for(text_file, **SMALL, train__steps=39), run_dir, "existing run of 40 steps"
    )
    longer = config_for(
        text_file, **SMALL, train__steps=50, train__log_every=5, train__microbatches=2
    )
    check_workdir(run_dir, Config.of(longer, read_config(run_dir)))

    store = json.loads((run_dir / "store.json").read_text())
    store["splits"]["train"]["tokens"] -= 1
    (run_dir / "store.json").write_text(json.dumps(store))
    assert_refused(
        config_for(text_file, **SMALL),
        run_dir,
        "the training text has changed",
        "tokens for training: from",
    )

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    assert_refused(
        config_for(text_file, **SMALL), tmp_path / "full", "folder is not empty and not a run"
    )
    assert_refused(
        config_for(text_file, **SMALL), tmp_path / "full" / "thesis.tex", "not a writable folder"
    )
    assert_refused(
        config_for(text_file, **SMALL),
        tmp_path / "full" / "thesis.tex" / "below",
        "not a writable folder",
    )
    assert_refused(config_for(text_file, **SMALL), tmp_path / "[a]" / "run", "a path with [")
    with jax.enable_x64(True):
        assert_refused(config_for(text_file, **SMALL), tmp_path / "new", "JAX_ENABLE_X64")
    for content in ("{", "{}", "[]"):
        (run_dir / "config.json").write_text(content)
        assert_refused(config_for(text_file, **SMALL), run_dir, "config.json")


def test_refuses_unwritable_workdirs(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # os.access always returns True for root
    for workdir in (tmp_path, tmp_path / "run"):
        with pytest.raises(UserError, match="not a writable folder"):
            train_and_evaluate(config_for(text_file), str(workdir))
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be created"):
        train_and_evaluate(config_for(text_file), "/proc/run")


def test_prepare_and_a_store_of_other_settings(text_file, tmp_path):
    flags = [
        "--config=configs/gpt.py:tiny",
        f"--config.data.source={text_file}",
        f"--config.data.store={tmp_path / 'store'}",
    ]
    first, second = (call("prepare", *flags) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert re.search(r"1 file, \d+ passages, [\d.]+ M tokens for training", first.stdout)
    assert "existing token store" in second.stdout
    assert (tmp_path / "store" / "metadata.json").is_file()
    config = config_for(
        text_file, data__store=str(tmp_path / "store"), data__validation_fraction=0.3
    )
    with pytest.raises(UserError, match=r"was made with validation_fraction=0\.1"):
        train_and_evaluate(config, str(tmp_path / "run"))


def test_an_error_is_one_line(text_file, tmp_path):
    result = call(
        "main",
        "--config=configs/gpt.py:tiny",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.source={text_file}",
        "--config.train.batch_size=0",
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: config.train.batch_size=0: must be at least 1\n"
