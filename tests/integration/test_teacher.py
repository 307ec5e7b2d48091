"""Tests of runs with a teacher (`config.train.teacher`): the distance of features, resumption and
refusals.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import call, init, load_config
from run_helpers import assert_equal, read_untimed_metrics, start_from, state_of

from configs.compare import base as comparison
from smallgpt_jax import models
from smallgpt_jax.comparison import recipe, run_reader
from smallgpt_jax.conversion import low_rank
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import layers, parameters
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.planning import memory_formula
from smallgpt_jax.planning.estimate import estimate
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train

SMALL = dict(
    model__num_layers=2,
    model__d_model=16,
    model__num_heads=2,
    model__context_length=32,
    train__batch_size=8,
    train__loss_chunks=1,
    optimizer__warmup_steps=0,
    optimizer__learning_rate=5e-3,
)


def write_teacher(folder, model, params) -> str:
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), models.abstract_model_state(model))
    tokenizer = TokenizerSource("bytes").make()
    write_imported(folder, ImportedModel(model, params, tokenizer, state), {})
    return str(folder)


@pytest.fixture
def teacher(tmp_path):
    """Returns a function (architecture, **fields) → the workdir of an untrained model of size
    SMALL.
    """

    def write(architecture="gpt", seed=1, **fields):
        model = models.build(**load_config(architecture, **{**SMALL, **fields}).model)
        return write_teacher(tmp_path / f"teacher-{architecture}-{seed}", model, init(model, seed))

    return write


@functools.cache
def compiled_program(devices, architecture="gpt", **fields):
    """Returns a program and its training step."""
    config = load_config(
        architecture,
        **{**SMALL, "train__teacher_step": 0 if "train__teacher" in fields else -1, **fields},
    )
    program = build_program(config, jax.devices()[:devices])
    return program, program.bind(config)


def first_step(batch, devices=1, params=None, **fields):
    """Returns the metrics of the first training step, and the updated parameters."""
    program, step = compiled_program(devices, **fields)
    state = start_from(program, init(program.model) if params is None else params)
    state, metrics = step(state, jax.device_put(batch, sharding.batch_sharding(program.mesh)))
    return jax.device_get(metrics), jax.device_get(state.params)


def block_outputs(model, params, tokens, context):
    """Returns the output of each block of a gpt, in float64. Output k is that of a model cut after
    k blocks.
    """
    outputs = []
    for k in range(1, model.config.num_layers + 1):
        cut = models.LanguageModel(dataclasses.replace(model.config, num_layers=k))
        blocks = jax.tree.map(lambda x: x[:k], params["trunk"]["blocks"])
        _, captured = jax.jit(
            lambda params, cut=cut: cut.apply(
                {"params": params},
                tokens,
                context,
                method="hidden",
                mutable=["intermediates"],
                capture_intermediates=lambda module, _: module.name == "trunk",
            )
        )({**params, "trunk": {"blocks": blocks}})
        outputs.append(np.float64(captured["intermediates"]["trunk"]["__call__"][0]))
    return outputs


PACKED = {"data__packing": "best_fit", "data__separate_documents": True}


@pytest.mark.slow
def test_distance_matches_a_float64_formula(teacher):
    """On eight devices, the loss grows by 0.25 times the mean-square distance, averaged over blocks
    and over targets in the loss mask.
    """
    student = models.build(**load_config("gpt", **SMALL, model__rank_ratio=0.5).model)
    full = models.build(**load_config("gpt", **SMALL).model)
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 4, (8, 32)), axis=1).astype(np.int32)
    mask = rng.random((8, 32)) < rng.random((8, 1))
    batch = Batch(
        rng.integers(0, 257, (8, 33), np.int32),
        segment_ids_BxT=segments,
        loss_mask_BxT=mask,
        targets_BxT=rng.integers(0, 257, (8, 32), np.int32),
    )
    context = Context(segment_ids_BxT=segments)
    inputs = batch.tokens_BxT1[:, :-1]
    features = [
        block_outputs(model, init(model, seed), inputs, context)
        for model, seed in ((student, 0), (full, 1))
    ]
    expected = np.mean([np.mean((x - y)[mask] ** 2) for x, y in zip(*features, strict=True)])

    fields = {"model__rank_ratio": 0.5, **PACKED}
    axes = {
        "train__microbatches": 2,
        "model__scan_layers": False,
        "mesh__data": 2,
        "mesh__fsdp": 2,
        "mesh__tensor": 2,
    }
    plain, _ = first_step(batch, **fields)
    fields |= {"train__teacher": teacher(), "train__feature_weight": 0.25}
    found, _ = first_step(batch, devices=8, **fields, **axes)
    assert found["feature_distance"] == pytest.approx(expected, rel=1e-5) and expected > 0.01
    assert "feature_distance" not in plain
    one, _ = first_step(batch, **fields)
    for metric in ("loss", "grad_norm"):
        assert found[metric] == pytest.approx(one[metric], rel=1e-5)
    assert one["loss"] - plain["loss"] == pytest.approx(0.25 * expected, rel=1e-4)


BATCH = Batch(np.random.default_rng(0).integers(0, 257, (8, 33), np.int32))


@pytest.mark.slow
def test_gradient_of_the_distance(teacher):
    """With weight 0, the updates are those without a teacher. With weight 10, an update reduces the
    distance.
    """
    fields = {"model__rank_ratio": 0.5}
    plain, expected = first_step(BATCH, **fields)
    fields["train__teacher"] = teacher()
    found, params = first_step(BATCH, train__feature_weight=0.0, **fields)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), params, expected
    )
    assert (
        found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)
        and found["feature_distance"] > 0.01
    )
    distances = {}
    for weight in (0.0, 10.0):
        _, params = first_step(BATCH, train__feature_weight=weight, **fields)
        after, _ = first_step(BATCH, params=params, train__feature_weight=weight, **fields)
        distances[weight] = after["feature_distance"]
    assert distances[10.0] < 0.99 * distances[0.0]


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("gpt", {"model__dropout": 0.3}),
        ("pgpt", {"model__mlp": "moe", "model__num_experts": 4, "model__remat": "full"}),
        ("cgpt", {"model__attention_windows": (4, 0), "model__blocks_per_stage": 1}),
    ],
)
@pytest.mark.slow
def test_full_rank_has_no_distance(tmp_path, monkeypatch, architecture, fields):
    """A student with factors of full rank has the teacher's features. Dropout changes only the
    student's.
    """
    model = models.build(**load_config(architecture, **{**SMALL, **fields}).model)
    params = init(model)
    folder = write_teacher(tmp_path / "teacher", model, params)
    monkeypatch.setattr(layers, "factor_rank", lambda ratio, inputs, outputs: min(inputs, outputs))
    uncached = parameters.trace_variables.__wrapped__
    monkeypatch.setattr(
        parameters, "trace_variables", functools.cache(uncached)
    )  # apart from the usual shapes
    _, factors = low_rank.with_rank_ratio(model, params, 0.5)
    metrics, _ = first_step(
        BATCH,
        params=factors,
        architecture=architecture,
        model__rank_ratio=0.5,
        train__teacher=folder,
        **fields,
    )
    if fields.get("model__dropout"):
        assert metrics["feature_distance"] > 1e-3
    else:
        assert 0 < metrics["feature_distance"] < 1e-9


@pytest.mark.slow
def test_cost(teacher):
    """`plan` includes the teacher's forward pass (without its head) and the memory of its
    weights.
    """
    config = load_config("gpt", **SMALL, model__rank_ratio=0.5)
    plain = estimate(build_program(config, jax.devices()[:1]))
    config.train.teacher = teacher()
    program = build_program(config, jax.devices()[:1])
    found = estimate(program)
    width, blocks, time = 16, 2, 32
    assert (
        found.flops_per_token - plain.flops_per_token
        == 2 * 12 * blocks * width**2 + 4 * time * width * blocks
    )
    size = 4 * models.num_parameters(program.teacher.model)
    assert found.argument_bytes - plain.argument_bytes == size - 4 * (
        512 * width + width
    )  # no head, no final norm
    assert (
        found.account["teacher"]
        == size
        == memory_formula.bytes_on_device(program.teacher.abstract_constants)
    )
    terms = program.objective.terms.values()
    assert train_flops_per_token(program.model, terms) == found.flops_per_token


@pytest.mark.slow
def test_resumption_is_exact_and_refuses_another_teacher(trained_run, text_file, tmp_path, capsys):
    """A run whose last checkpoint is lost repeats its steps bit for bit, on eight devices."""
    full = tmp_path / "full"
    shutil.copytree(trained_run("gpt", **RUN), full)
    config = load_config(
        "gpt",
        data__source=str(text_file),
        **{**RUN, "model__rank_ratio": 0.5, "model__dropout": 0.1, "train__teacher": str(full)},
    )
    folder = tmp_path / "run"
    train(config, str(folder))
    assert config.train.teacher_step == -1
    assert json.loads((folder / "config.json").read_text())["train"]["teacher_step"] == 40
    before, lines = state_of(folder, 40), read_untimed_metrics(folder)
    distances = [line["feature_distance"] for line in lines if line["split"] == "train"]
    assert len(distances) == 4 and min(distances) > 0
    shutil.rmtree(folder / "checkpoints" / "40")
    train(config, str(folder))
    assert ", 20 done" in capsys.readouterr().out
    assert_equal(state_of(folder, 40), before)
    assert read_untimed_metrics(folder) == lines
    with pytest.raises(
        UserError,
        match=r"was trained with config\.train\.teacher, which comparisons do not support",
    ):
        run_reader.read_run("run", folder)
    config.train.steps = 41
    (full / "checkpoints" / "40").rename(full / "checkpoints" / "50")
    with pytest.raises(
        UserError, match=r"teacher: .*/full: no checkpoint of step 40; choose from 20, 50"
    ):
        train(config, str(folder))  # a resumed run keeps the teacher's step
    config.train.teacher_step = 50
    with pytest.raises(
        UserError, match=r"config: train\.teacher_step was 40, now 50\.\nUse the same settings"
    ):
        train(config, str(folder))
    config.train.teacher_step = -1
    full.rename(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"config\.train\.teacher: .*/full: no such folder; give the workdir"
    ):
        train(config, str(folder))


RUN = dict(
    model__d_model=16,
    model__num_heads=2,
    model__num_layers=2,
    model__context_length=32,
    train__loss_chunks=1,
)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"train__teacher": "absent"},
            "config.train.teacher: absent: no such folder; give the workdir of a run",
        ),
        ({"train__teacher_step": 3}, "config.train.teacher_step=3: needs config.train.teacher"),
        (
            {"train__feature_weight": float("nan")},
            "config.train.feature_weight=nan: must be a finite number, at least 0",
        ),
        (
            {"model__d_model": 32},
            "config.model.d_model is 32 here, but 16 in the teacher; the teacher must be the same",
        ),
        (
            {"model__vocab_size": 500, "model__context_length": 16},
            "config.model.vocab_size is 500 here, but 512 in the teacher; "
            "config.model.context_length is 16 here, but 32",
        ),
        (
            {"data__tokenizer": "sentencepiece:300"},
            "has another tokenizer (bytes, 257 entries) than this run",
        ),
    ],
)
def test_refused_teachers(teacher, text_file, tmp_path, fields, message):
    fields = {
        **SMALL,
        "train__teacher": "" if "train__teacher_step" in fields else teacher(),
        **fields,
    }
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    result = call(
        "main",
        "--config=configs/gpt.py:tiny",
        f"--config.data.source={text_file}",
        f"--workdir={tmp_path / 'run'}",
        *flags,
    )
    assert result.returncode == 1 and message in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )
    assert not (tmp_path / "run").exists()


def test_refuses_other_architectures_and_comparisons(teacher):
    with pytest.raises(
        UserError, match=r"config\.model\.architecture is 'pgpt' here, but 'gpt' in the teacher; "
    ):
        build_program(load_config("pgpt", **SMALL, train__teacher=teacher()))
    config = comparison.recipes(("gpt",), "tiny")
    config.train.teacher = "runs/full"
    with pytest.raises(
        UserError,
        match=r"run 'gpt': config\.train\.teacher='runs/full': comparisons do not support",
    ):
        recipe.resolve_runs(config)
