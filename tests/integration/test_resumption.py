"""Tests of resumption: after damage, with changed settings or devices, and with a config that lacks
newer fields.
"""

import json
import re
import resource
import shutil
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT, forward, init, save_run
from run_helpers import (
    RESUMED,
    SMALL,
    assert_equal,
    config_for,
    flip_a_bit,
    losses_in,
    read_untimed_metrics,
    state_of,
)
from scipy.special import log_softmax

from configs import run as run_config
from smallgpt_jax import inference, models
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import metrics
from smallgpt_jax.run.completion import is_evaluated
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.workdir import ImportedModel, check_workdir, write_imported
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline
from smallgpt_jax.training.trainer import train_and_evaluate


@pytest.mark.slow
def test_resumption_repeats_lost_steps_bit_for_bit(text_file, copy_of, capsys):
    """If the last checkpoint is damaged, and a further session cannot write it, the steps since the
    previous checkpoint are lost.

    The resumed run, with Muon and dropout, repeats these steps, and has the same state and metrics
    afterwards.
    """
    workdir, config = copy_of("gpt", **RESUMED), config_for(text_file, **RESUMED)
    before, lines = state_of(workdir, 40), read_untimed_metrics(workdir)
    moments = [x for x in jax.tree.leaves(before[1]) if x.ndim > 1]
    assert moments and all(np.any(x != 0) for x in moments)
    # All files, since those that are read vary.
    for path in (workdir / "checkpoints" / "40" / "params").rglob("d/*"):
        flip_a_bit(path)
    with pytest.raises(UserError, match=r"checkpoints/40: damaged checkpoint \(.*\); continue the"):
        inference.load(workdir)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "spl')  # truncated
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The limit is below the size of opt_state/_METADATA, so every save fails. The sizes of data
    # files vary too much for such a limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, most))
    try:
        with pytest.raises(
            UserError, match=re.escape(f"--workdir={workdir}: the last step, 40, could not")
        ):
            train_and_evaluate(config, str(workdir))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    out = capsys.readouterr().out
    assert ", 20 done" in out and "damaged checkpoint of step 40" in out
    assert out.count("could not write a checkpoint: File too large") == 1 and "step 40/40" in out
    assert not (workdir / "checkpoints" / "40").exists()
    train_and_evaluate(config, str(workdir))
    out = capsys.readouterr().out
    assert ", 20 done" in out and "damaged checkpoint" not in out
    assert_equal(state_of(workdir, 40), before)
    assert read_untimed_metrics(workdir) == lines


@pytest.mark.slow
def test_resumption_repeats_a_missing_evaluation(text_file, copy_of):
    workdir = copy_of("gpt", **SMALL)
    path = workdir / "metrics.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:-1]) + "\n")
    train_and_evaluate(config_for(text_file, **SMALL), str(workdir))
    again = path.read_text().splitlines()
    assert again[:-1] == whole[:-1]
    assert {**json.loads(again[-1]), "time": 0} == {**json.loads(whole[-1]), "time": 0}


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_only_on_other_rows(
    text_file, copy_of, capsys, monkeypatch
):
    """A finished run is evaluated again if train.eval_steps selects other validation rows.

    The field `targets` in metrics.jsonl identifies the rows.
    """
    workdir = copy_of("gpt", **SMALL)
    path, batch = workdir / "metrics.jsonl", 8 * 32
    before = path.read_bytes()

    def targets() -> list:
        return [line.get("targets") for line in metrics.read_lines(path) if line["step"] == 40][1:]

    train_and_evaluate(config_for(text_file, **SMALL), str(workdir))
    assert path.read_bytes() == before and ", 40 done" in capsys.readouterr().out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in range(2):
        train_and_evaluate(config_for(text_file, **SMALL, train__eval_steps=1), str(workdir))
        assert json.loads((workdir / "config.json").read_text())["train"]["eval_steps"] == 1
        assert targets() == [4 * batch, batch]
    assert "preparing the first step … 0s" in capsys.readouterr().err

    config = config_for(text_file, **SMALL, train__eval_steps=1)
    corpus = open_pipeline(config, build_program(config)).corpus

    for eval_steps, expected in ((1, True), (4, False), (3, False)):
        config = config_for(text_file, **SMALL, train__eval_steps=eval_steps)
        assert is_evaluated(workdir, config, corpus, 40) == expected


@pytest.mark.slow
def test_resumes_a_run_whose_config_lacks_newer_fields(text_file, copy_of):
    """Fields that are added later have neutral defaults, so they do not stop a run from
    resuming.
    """
    workdir = copy_of("gpt", **SMALL)
    path = workdir / "config.json"
    groups = json.loads(path.read_text())
    for field in ("position", "activation", "norm_position"):
        del groups["model"][field]
    del groups["train"]["z_loss"]
    path.write_text(json.dumps(groups))
    with pytest.raises(UserError, match=r"config: model\.position was 'learned', now 'rope'\.\n"):
        train_and_evaluate(config_for(text_file, **SMALL, model__position="rope"), str(workdir))
    assert json.loads(path.read_text()) == groups
    train_and_evaluate(config_for(text_file, **SMALL, train__steps=42), str(workdir))
    assert list(losses_in(workdir)) == [10, 20, 30, 40, 42]
    assert json.loads(path.read_text())["model"]["position"] == "learned"


@pytest.mark.slow
def test_trained_models_continue_at_a_longer_context(text_file, trained_run, tmp_path, monkeypatch):
    """A model with RoPE trains at a longer context in a new workdir; a model with learned positions
    is refused.
    """
    monkeypatch.chdir(ROOT)
    fields = dict(**SMALL, model__position="rope")
    short_config = Config.of(config_for(text_file, **fields))
    model = models.LanguageModel(short_config.model)
    params = init(model)
    params["head"] = 20 * params["head"]  # so that the loss is far from that of other weights
    short = save_run(tmp_path / "short", short_config, params)
    trained = inference.load_trained(short)
    longer = tmp_path / "longer"
    imported = ImportedModel(trained.model, trained.params, trained.tokenizer)
    write_imported(longer, imported, {})
    config = run_config.get_config(str(longer))
    config.data.source = str(text_file)
    config.model.context_length = 64
    config.optimizer.warmup_steps = 1
    config.train.update(steps=2, log_every=1, eval_steps=4)
    train_and_evaluate(config, str(longer))
    assert inference.load(longer).model.config.context_length == 64
    tokens = trained.tokenizer.encode([text_file.read_text()[:3300]])[0].reshape(-1, 33)
    log_p = log_softmax(np.asarray(forward(model, params, tokens[:, :-1])), axis=-1)
    loss = -np.take_along_axis(log_p, tokens[:, 1:, None], 2).mean()
    assert losses_in(longer)[1] == pytest.approx(loss, rel=0.1) and loss > 8
    config.train.steps = 3
    train_and_evaluate(config, str(longer))
    assert list(losses_in(longer)) == [1, 2, 3]
    with pytest.raises(UserError, match=r"context_length was 32, now 64.\n.*convert --from=run"):
        check_workdir(
            short, Config.of(config_for(text_file, **{**fields, "model__context_length": 64}))
        )

    learned = tmp_path / "learned"
    trained = inference.load_trained(trained_run("gpt", **SMALL))
    imported = ImportedModel(trained.model, trained.params, trained.tokenizer)
    write_imported(learned, imported, {})
    config = run_config.get_config(str(learned))
    config.model.context_length = 64
    with pytest.raises(UserError, match=r"model\.context_length was 32, now 64"):
        check_workdir(learned, Config.of(config))


@pytest.mark.slow
def test_resumes_on_other_devices(text_file, copy_of):
    """Twenty steps on each of two meshes give the losses and the state of forty steps on one mesh,
    up to rounding.
    """
    workdir = copy_of("gpt", **RESUMED)
    one, expected = losses_in(workdir), state_of(workdir, 40)
    shutil.rmtree(workdir / "checkpoints" / "40")
    devices = jax.devices()[:4]
    mesh = dict(mesh__data=1, mesh__fsdp=4, mesh__tensor=1)
    with mock.patch.object(jax, "devices", lambda *_: devices):
        train_and_evaluate(config_for(text_file, **{**RESUMED, **mesh}), str(workdir))
    many = losses_in(workdir)
    assert list(many) == list(one) == [15, 30, 40]
    shutil.copytree(workdir / "checkpoints", workdir / "moved")
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(
        UserError, match=r"missing .the run has been resumed from step 20.; restore"
    ):
        train_and_evaluate(config_for(text_file, **RESUMED), str(workdir))
    (workdir / "moved").rename(workdir / "checkpoints")
    np.testing.assert_allclose(list(many.values()), list(one.values()), rtol=2e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state_of(workdir, 40), expected
    )
