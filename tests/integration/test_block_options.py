"""Tests of the small options of models: training, sharding, moving averages of weights, counts.

random_models.py checks logits by formulas, packed rows, decoding and export.
"""

import functools
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init, load_config, save_run
from float64_model import plain_logits
from run_helpers import SMALL, assert_bitwise_equal, start_from, train_three_steps

from smallgpt_jax import inference, models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import structure
from smallgpt_jax.models.components import components
from smallgpt_jax.models.flops import forward_operations
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.run.spool import Spool
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline
from smallgpt_jax.training.trainer import Trainer
from smallgpt_jax.training.validation import evaluate

SIZES = dict(
    d_model=16, num_heads=4, num_layers=2, context_length=16, vocab_size=64, dtype="float32"
)
OPTIONS = dict(
    input_mix=True,
    residual_scales=True,
    parallel_block=True,
    canon_taps=3,
    smear=True,
    attention_gate=True,
    value_embeddings=(1,),
    loops=2,
    logit_softcap=2.0,
)
EMA = 0.15


def config_with(model: dict, **fields):
    return load_config(
        "gpt",
        **{f"model__{name}": value for name, value in {**SIZES, **OPTIONS, **model}.items()},
        train__batch_size=4,
        train__ema=EMA,
        train__z_loss=0.01,
        optimizer__warmup_steps=0,
        **fields,
    )


@pytest.mark.slow
def test_training_with_all_options(tmp_path):
    """Four devices, with scanned and rematerialized blocks, train like one device.

    On four devices, a restored state continues bit for bit. The average follows its formula.
    """
    batch, results = Batch(np.random.default_rng(0).integers(0, 64, (4, 17), np.int32)), []
    plain = config_with({})
    mesh = dict(mesh__data=1, mesh__fsdp=2, mesh__tensor=2)
    sharded = config_with(dict(scan_layers=True, remat="full"), **mesh)
    for devices, config in ((1, plain), (4, sharded)):
        program = build_program(config, jax.devices()[:devices])
        params = init(program.model)
        logged, states = train_three_steps(
            program,
            config,
            batch,
            tmp_path if devices == 4 else None,
            start_from(program, params)._replace(ema=params),
        )
        losses = [metrics["loss"] for metrics in logged]
        weights = [state.params for state in states]
        assert losses[0] > losses[1] > losses[2]
        results.append((losses, weights[-1], states[-1].ema))
        assert program.shardings.ema == program.shardings.params
    for path, change in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda new, old: np.abs(new - old).max(), weights[-1], weights[0])
    ):
        assert change > 1e-5, path
    average = weights[0]
    for t, new in enumerate(weights[1:]):
        decay = min(EMA, (1 + t) / (10 + t))  # the second rate is above EMA
        average = jax.tree.map(
            lambda a, x, d=decay: d * np.float64(a) + (1 - d) * np.float64(x), average, new
        )
    jax.tree.map(
        lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6),
        results[1][2],
        average,
    )
    jax.tree.map(
        lambda one, four: np.testing.assert_allclose(one, four, rtol=1e-3, atol=2e-5), *results
    )


def test_commands_use_the_average(text_file, tmp_path, capsys):
    config = load_config("gpt", data__source=str(text_file), train__ema=0.9)
    model = models.build(**config.model)
    params, average = init(model), init(model, 1)
    folder = save_run(tmp_path / "run", config, params, ema=average)
    assert_bitwise_equal(
        jax.device_get(inference.load_trained(folder).params), jax.device_get(average)
    )
    assert "the moving average of the weights" in capsys.readouterr().err
    shutil.rmtree(next((folder / "checkpoints").glob("*/ema")))  # as in an incomplete copy
    with pytest.raises(
        UserError, match=r"damaged checkpoint .*moving average of the weights, ema,"
    ):
        inference.load_trained(folder)
    config.train.ema = 0.0
    folder = save_run(tmp_path / "without", config, params)
    assert_bitwise_equal(
        jax.device_get(inference.load_trained(folder).params), jax.device_get(params)
    )
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_validation_uses_the_average(text_file, tmp_path):
    config = Config.of(
        load_config(
            "gpt", **SMALL, data__source=str(text_file), train__ema=0.9, train__eval_steps=2
        )
    )
    program = build_program(config, jax.devices()[:1])
    pipeline, spool = open_pipeline(config, program), Spool(tmp_path, tmp_path, print)
    weights, average = init(program.model), init(program.model, 1)
    state = start_from(program, weights)._replace(ema=average)
    never = SimpleNamespace(is_requested_anywhere=lambda: False)
    trainer = Trainer(config, program, pipeline, spool, RunProgress(8), never, RunClock())
    logged = []
    trainer.logger = SimpleNamespace(
        log_evaluation=lambda step, *evaluation: logged.append(evaluation[0])
    )
    assert trainer.log_validation_loss(8, state)
    trainer.checkpoints.close()

    def loss(params):
        of_batch = functools.partial(program.evaluate, params, {})
        return evaluate(of_batch, map(pipeline.to_devices, pipeline.validation_batches)).loss

    assert logged == [loss(average)] and abs(logged[0] - loss(weights)) > 1e-3


def test_all_options_in_bfloat16():
    model, tokens = (
        build("gpt", **{**SIZES, **OPTIONS, "dtype": "bfloat16"}),
        np.arange(16)[None] % 7,
    )
    params = init(model)
    np.testing.assert_allclose(
        forward(model, params, tokens)[0], plain_logits(model.config, params, tokens[0]), atol=0.05
    )
    hidden = jax.eval_shape(lambda: model.apply({"params": params}, tokens, method="hidden"))
    assert hidden.dtype == jnp.bfloat16


@pytest.mark.slow
def test_counts_of_loops():
    """Passes count in FLOPs and activations, but not in parameters."""
    once, twice = (build("gpt", **SIZES, loops=loops) for loops in (1, 2))
    assert models.num_parameters(once) == models.num_parameters(twice)
    head = 2 * 16 * 16 * 64
    assert forward_operations(twice).products - head == 2 * (
        forward_operations(once).products - head
    )
    mesh = build_program(config_with({}), jax.devices()[:1]).mesh
    layers = [structure.attention_layers(model, mesh, False)[0].count for model in (once, twice)]
    assert layers == [2, 4]
    parts = components(build("gpt", **SIZES, **OPTIONS))
    assert parts["value embeddings"] == 2 * 64 * 16 and parts["scalars of blocks"] == 2 * 4
    assert parts["convolutions"] == 2 * 3 * 16 and parts["smear"] == 17
