"""Tests of rows that contain several documents, and of training on mixtures.

The tests cover the separation of documents in the model, the loss mask and the targets.
"""

import functools
import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ARCHITECTURES, build, forward, load_config
from data_helpers import random_store
from run_helpers import program_of

from smallgpt_jax import models
from smallgpt_jax.data.corpus import open_mixture
from smallgpt_jax.data.packing import PACKINGS, Batch
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import POSITIONS
from smallgpt_jax.models.context import Context
from smallgpt_jax.objectives.objective import Objective
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.workdir import initialize_workdir
from smallgpt_jax.training import messages
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline
from smallgpt_jax.training.step import Hyperparameters, train_step
from smallgpt_jax.training.validation import eval_step


def random_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), models.abstract_params(model)
    )


def variants():
    """Yields pytest parameters (architecture, config fields) that cover all architectures and
    position encodings.

    The last pair is a cgpt with splash attention and convolutions of kernel size 5.
    """
    for name, position in zip(ARCHITECTURES, itertools.cycle(POSITIONS)):
        yield pytest.param(
            name, {"position": position, "context_length": 32}, id=f"{name}-{position}"
        )
    yield pytest.param(
        "cgpt",
        {"position": "rope", "conv_kernel": 5, "attention": "splash", "context_length": 128},
        id="cgpt-rope-splash",
        marks=pytest.mark.slow,
    )


@pytest.mark.parametrize("name, fields", list(variants()))
def test_separated_documents_do_not_see_each_other(name, fields):
    model = build(name, d_model=16, **fields)
    params, time = random_params(model), model.config.context_length
    apply = jax.jit(
        lambda tokens, segments: model.apply(
            {"params": params}, tokens, Context(segment_ids_BxT=segments)
        )
    )
    lengths = [time // 4, time // 2 - 3, time // 8]
    tokens = np.random.default_rng(0).integers(0, 257, (5, time))
    segments = np.ones((5, time), np.int32)
    # Row 0 has three documents and padding. Rows 1 to 3 have one of these documents each, followed
    # by other tokens. Row 4 has the tokens of row 0 as a single document.
    segments[0] = np.repeat([1, 2, 3, 0], [*lengths, time - sum(lengths)])
    starts = np.cumsum([0, *lengths])
    for row, (start, length) in enumerate(zip(starts, lengths), 1):
        tokens[row, :length] = tokens[0, start : start + length]
    tokens[4] = tokens[0]
    logits = apply(tokens, segments)
    for row, (start, length) in enumerate(zip(starts, lengths), 1):
        np.testing.assert_allclose(
            logits[0, start : start + length], logits[row, :length], atol=2e-5, rtol=1e-4
        )

    other = tokens.copy()
    other[[0, 4], : lengths[0]] = (
        other[0, : lengths[0]] + 1
    ) % 257  # only the first document changes
    changed = np.abs(apply(other, segments) - logits).max(axis=2)
    assert (changed[[0, 4], : lengths[0]] > 0).all()
    assert not changed[0, lengths[0] :].any() and changed[4, lengths[0] :].max() > 0.01


@pytest.mark.slow
def test_loss_is_the_mean_over_targets_in_the_mask():
    """Evaluation and training losses match a direct computation.

    The microbatches have different numbers of targets.
    """
    model, rng = build("gpt", num_layers=1, d_model=16, context_length=16), np.random.default_rng(0)
    params = random_params(model)
    tokens, targets = (
        rng.integers(0, 257, (4, 17), np.int32),
        rng.integers(0, 257, (4, 16), np.int32),
    )
    mask = rng.random((4, 16)) < [[0.9], [0.1], [0.5], [0.0]]
    log_probabilities = jax.nn.log_softmax(forward(model, params, tokens[:, :-1]))
    losses = -np.take_along_axis(log_probabilities, targets[..., None], axis=2)[..., 0]

    batch = Batch(tokens, None, mask, targets)
    optimizer = optax.with_extra_args_support(optax.scale_by_schedule(lambda count: -0.1))
    program = program_of(model, Objective(2), optimizer, microbatches=2)
    sums = jax.jit(functools.partial(eval_step, program))(params, {}, batch)
    assert float(sums.loss) == pytest.approx(float(losses[mask].sum()), rel=1e-5)
    assert sums.counted == sums.targets == mask.sum()
    step = functools.partial(train_step, program)
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    _, metrics = jax.jit(step)(state, batch, Hyperparameters(np.uint32(0), 0.1, 0.0))
    assert float(metrics["loss"]) == pytest.approx(float(losses[mask].mean()), rel=1e-5)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("small", 100), ("large", 500)):
        random_store(folder / name, [70] * count)
    return f"{folder}/small=1,{folder}/large=3"


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("separate", [False, True])
def test_batches_have_the_shapes_of_the_compiled_steps(mixture, packing, separate):
    config = load_config(
        "gpt", data__mixture=mixture, data__packing=packing, data__separate_documents=separate
    )
    program = build_program(config)
    pipeline = open_pipeline(config, program)
    for batches, evaluates in (
        (pipeline.train_batches, False),
        (pipeline.validation_batches, True),
    ):
        batch = pipeline.to_devices(next(iter(batches)))
        expected = program.abstract_batch(evaluates)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), batch) == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding), expected
        )


def test_a_run_on_a_mixture(mixture, tmp_path):
    """Padding does not count as tokens, and changed mixture weights are refused.

    The startup message names the stores of the mixture, and store.json records their weights.
    """
    config = Config.of(load_config("gpt", data__mixture=mixture, data__packing="best_fit"))
    program = build_program(config)
    pipeline = open_pipeline(config, program)
    small, large = (
        rows.padding for rows in open_mixture(mixture).pack("train", "best_fit", False, 64).packings
    )
    padding = 0.25 * small + 0.75 * large
    assert padding > 0.002 and pipeline.tokens_per_step == pytest.approx(8 * 64 * (1 - padding))
    memory_stats = SimpleNamespace(argument_size_in_bytes=0, temp_size_in_bytes=0)
    assert messages.session_facts(program, pipeline, memory_stats, 0)["padding"] == pytest.approx(
        padding
    )
    message = messages.startup_message(config, program, pipeline, 0)
    assert (
        "small, best_fit: " in message
        and "large, best_fit: " in message
        and "of the documents split" in message
    )
    initialize_workdir(tmp_path, config, pipeline.corpus)
    description = json.loads((tmp_path / "store.json").read_text())["mixture"]
    assert [store["weight"] for store in description] == [0.25, 0.75]
    with pytest.raises(UserError, match=r"store 1: weight: from 0\.25 to 0\.33"):
        initialize_workdir(tmp_path, config, open_mixture(mixture.replace("=3", "=2")))
