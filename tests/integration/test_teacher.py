"""Tests of runs with a teacher (`config.train.teacher`): the distance of features, resumption and
refusals.
"""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from conftest import call, init, load_config
from float64_model import full_matrices, plain_blocks, plain_layers
from run_helpers import start_from, train_three_steps

from configs.compare import base as comparison
from smallgpt_jax import models
from smallgpt_jax.comparison import recipe, run_reader
from smallgpt_jax.conversion import low_rank
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import layers, parameters
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.objectives.examples import Examples
from smallgpt_jax.planning import memory_formula
from smallgpt_jax.planning.estimate import estimate
from smallgpt_jax.run.names import CHECKPOINT_FOLDER
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.step import microbatch_loss
from smallgpt_jax.training.trainer import open_trainer, train_and_evaluate

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
    tokenizer = TokenizerSource("bytes").make()
    write_imported(folder, ImportedModel(model, params, tokenizer, zero_state(model)), {})
    return str(folder)


def zero_state(model):
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), models.abstract_model_state(model))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """Returns the workdir of an untrained gpt of size SMALL."""
    model = models.build(**load_config("gpt", **SMALL).model)
    return write_teacher(tmp_path_factory.mktemp("runs") / "teacher", model, init(model, seed=1))


ROWS, TIME = 8, SMALL["model__context_length"]
PACKED = {"data__packing": "best_fit", "data__separate_documents": True}


def random_batch() -> Batch:
    """Returns rows of up to three documents, of which a part is in the loss mask."""
    rng = np.random.default_rng(0)
    return Batch(
        rng.integers(0, 257, (ROWS, TIME + 1), np.int32),
        segment_ids_BxT=np.sort(rng.integers(1, 4, (ROWS, TIME)), axis=1).astype(np.int32),
        loss_mask_BxT=rng.random((ROWS, TIME)) < rng.random((ROWS, 1)),
        targets_BxT=rng.integers(0, 257, (ROWS, TIME), np.int32),
    )


BATCH = random_batch()


def with_weight(program, weight):
    """Returns the program with another weight of the distance, if it has a teacher."""
    terms = program.objective.terms.items()
    terms = {name: dataclasses.replace(term, weight=weight) for name, term in terms}
    return dataclasses.replace(
        program, objective=dataclasses.replace(program.objective, terms=terms)
    )


def loss_on_one_device(batch, architecture="gpt", **fields):
    """Returns the model, and a function (parameters, weight of the distance) → the loss of a
    training step, and its metrics.
    """
    config = load_config(architecture, **{**SMALL, **fields})
    program = build_program(config, jax.devices()[:1])
    constants = program.objective.constants()

    def loss(params, weight=0.0):
        examples = Examples(batch)
        loss_function = microbatch_loss(
            with_weight(program, weight), jax.random.key(0), examples.num_targets, constants
        )
        value, (_, metrics, _) = loss_function(params, zero_state(program.model), 0, examples)
        return value, metrics

    return program.model, loss


def block_outputs(model, params, tokens_T):
    """Returns the output of each block of a gpt for one document, (L, T, D), in float64."""
    params = full_matrices(jax.tree.map(np.float64, params))
    x, outputs = params["token_embedding"][tokens_T], []
    x = x + params["position_embedding"][: len(tokens_T)]
    for i in range(model.config.num_layers):
        block = jax.tree.map(lambda w: w[None], plain_layers(params["trunk"]["blocks"])[i])
        x = plain_blocks(model.config, block, x, tokens_T, first=i)
        outputs.append(x)
    return np.array(outputs)


def mean_square_distance(student, full, batch) -> float:
    """Returns the mean over blocks, over the width, and over the targets in the loss mask."""
    squares = []
    for tokens_T, ids_T, mask_T in zip(
        batch.tokens_BxT1[:, :-1], batch.segment_ids_BxT, batch.loss_mask_BxT
    ):
        for document in np.unique(ids_T):
            in_document = ids_T == document
            x, y = (block_outputs(*model, tokens_T[in_document]) for model in (student, full))
            squares.append(np.square(x - y)[:, mask_T[in_document]].mean(axis=(0, 2)))
    return float(np.mean(np.concatenate(squares)))


@pytest.fixture(scope="module")
def on_eight_devices(teacher):
    """Returns a config and its program, whose features are in a list, not in a stack."""
    config = load_config(
        "gpt",
        **{**SMALL, **PACKED},
        model__rank_ratio=0.5,
        model__remat="full",
        model__scan_layers=False,
        train__teacher=teacher,
        train__feature_weight=0.25,
        train__microbatches=2,
        mesh__data=2,
        mesh__fsdp=2,
        mesh__tensor=2,
    )
    return config, build_program(config)


@pytest.mark.slow
def test_the_distance_of_features(teacher, on_eight_devices):
    """The loss grows by weight times the mean-square distance, averaged over blocks and over
    targets in the loss mask. With weight 0, the gradient is that without a teacher; a step along
    the gradient with weight 10 reduces the distance. On eight devices as on one.
    """
    fields = {"model__rank_ratio": 0.5, **PACKED}
    student, plain_loss = loss_on_one_device(BATCH, **fields)
    fields["train__teacher"] = teacher
    _, loss = loss_on_one_device(BATCH, **fields)
    full = models.build(**load_config("gpt", **SMALL).model)
    params = init(student)
    expected = mean_square_distance((student, params), (full, init(full, seed=1)), BATCH)

    (plain, no_metrics), plain_gradients = jax.jit(jax.value_and_grad(plain_loss, has_aux=True))(
        params
    )
    loss_and_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, found), gradients = loss_and_gradients(params, 0.0)
    assert found["feature_distance"] == pytest.approx(expected, rel=1e-5) and expected > 0.01
    assert "feature_distance" not in no_metrics
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
        gradients,
        plain_gradients,
    )
    (value, _), gradients = loss_and_gradients(params, 10.0)
    assert value - plain == pytest.approx(10 * expected, rel=1e-5)
    distances = {}
    for name, direction in (("plain", plain_gradients), ("distance", gradients)):
        moved = jax.tree.map(lambda x, g: x - 0.3 * g, params, direction)
        (_, after), _ = loss_and_gradients(moved, 0.0)
        distances[name] = after["feature_distance"]
    assert distances["distance"] < 0.99 * distances["plain"]

    config, program = on_eight_devices
    state, batch = start_from(program, params), sharding.batch_sharding(program.mesh)
    _, found = program.bind(config)(state, jax.device_put(BATCH, batch))
    (value, _), gradients = loss_and_gradients(params, 0.25)
    assert found["feature_distance"] == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(float(value), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)


@pytest.mark.parametrize(
    "architecture, fields",
    [
        ("gpt", {"model__dropout": 0.3}),
        ("pgpt", {"model__mlp": "moe", "model__num_experts": 4}),
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
    fields = {**fields, "model__rank_ratio": 0.5, "train__teacher": folder}
    _, loss = loss_on_one_device(Batch(BATCH.tokens_BxT1), architecture, **fields)
    _, metrics = jax.jit(loss)(factors)
    if fields.get("model__dropout"):
        assert metrics["feature_distance"] > 1e-3
    else:
        assert 0 < metrics["feature_distance"] < 1e-9


@pytest.mark.slow
def test_cost(teacher):
    """`plan` includes the teacher's forward pass (without its head) and the memory of its
    weights.
    """
    config = load_config("gpt", **SMALL, model__rank_ratio=0.5, train__teacher=teacher)
    program = build_program(config, jax.devices()[:1])
    found = estimate(program)
    width, blocks, time = 16, 2, 32
    assert (
        found.flops_per_token - train_flops_per_token(program.model)
        == 2 * 12 * blocks * width**2 + 4 * time * width * blocks
    )
    size = 4 * models.num_parameters(program.teacher.model)
    used = size - 4 * (512 * width + width)  # no head, no final norm
    inputs = memory_formula.bytes_on_device((program.abstract_state, program.abstract_batch()))
    hyperparameters = 2 * 4  # learning rate and weight decay; without dropout, no seed
    assert found.argument_bytes == inputs + hyperparameters + used
    assert (
        found.account["teacher"]
        == size
        == memory_formula.bytes_on_device(program.teacher.abstract_constants)
    )
    terms = program.objective.terms.values()
    assert train_flops_per_token(program.model, terms) == found.flops_per_token


@pytest.mark.slow
def test_resumption_is_exact_and_refuses_another_teacher(
    teacher, on_eight_devices, text_file, tmp_path
):
    """The run keeps the step that the teacher had at its start."""
    config, program = on_eight_devices
    full, folder = shutil.copytree(teacher, tmp_path / "full"), tmp_path / "run"
    config = config.copy_and_resolve_references()
    config.data.source, config.train.teacher = str(text_file), str(full)
    with open_trainer(config, folder):
        pass
    assert config.train.teacher_step == -1
    assert json.loads((folder / "config.json").read_text())["train"]["teacher_step"] == 0
    state = start_from(program, init(program.model))
    train_three_steps(program, config, BATCH, folder / CHECKPOINT_FOLDER, state)
    with open_trainer(config, folder) as trainer:
        assert trainer.config.train.teacher_step == 0
    with pytest.raises(
        UserError,
        match=r"was trained with config\.train\.teacher, which comparisons do not support",
    ):
        run_reader.read_run("run", folder)
    (full / CHECKPOINT_FOLDER / "0").rename(full / CHECKPOINT_FOLDER / "50")
    with pytest.raises(
        UserError, match=r"teacher: .*/full: no checkpoint of step 0; choose from 50"
    ):
        train_and_evaluate(config, folder)  # a resumed run keeps the teacher's step
    config.train.teacher_step = 50
    with pytest.raises(
        UserError, match=r"config: train\.teacher_step was 0, now 50\.\nUse the same settings"
    ):
        train_and_evaluate(config, folder)
    config.train.teacher_step = -1
    full.rename(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"config\.train\.teacher: .*/full: no such folder; give the workdir"
    ):
        train_and_evaluate(config, folder)


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
            {"data__tokenizer": "sentencepiece:300", "model__vocab_size": 512},
            "has another tokenizer (bytes, 257 entries) than this run",
        ),
    ],
)
def test_refused_teachers(teacher, text_file, tmp_path, fields, message):
    fields = {
        **SMALL,
        "train__teacher": "" if "train__teacher_step" in fields else teacher,
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
        build_program(load_config("pgpt", **SMALL, train__teacher=teacher))
    config = comparison.recipes(("gpt",), "tiny")
    config.train.teacher = "runs/full"
    with pytest.raises(
        UserError,
        match=r"run 'gpt': config\.train\.teacher='runs/full': comparisons do not support",
    ):
        recipe.resolve_runs(config)
