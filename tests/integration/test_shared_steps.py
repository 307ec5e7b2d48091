"""Runs that differ only in seed, rates, schedule or length share their compiled steps, and have the
same results.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import build, load_config
from run_helpers import SMALL

from smallgpt_jax import models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.models.context import Context
from smallgpt_jax.optim.optimizer import OPTIMIZERS, make_optimizer
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.training.build import RECENT_PROGRAMS, shared_program
from smallgpt_jax.training.opening import open_pipeline

NOT_COMPILED = {
    "data": {"seed"},
    "optimizer": {
        "schedule",
        "learning_rate",
        "warmup_steps",
        "warmup_fraction",
        "decay_steps",
        "decay_fraction",
        "final_learning_rate",
        "final_fraction",
        "weight_decay",
    },
    "train": {
        "size",
        "steps",
        "seed",
        "log_every",
        "eval_every",
        "eval_steps",
        "eval_examples",
        "check_loss",
        "checkpoint_every",
        "keep_checkpoints",
        "kept_steps",
        "trunk",
        "on_nonfinite",
        "max_nonfinite",
        "tracker",
        "profile_from",
        "profile_steps",
        "stall_seconds",
    },
}
OTHERS = {
    bool: lambda x: not x,
    int: lambda x: x + 1,
    float: lambda x: x / 2 + 0.25,
    str: lambda x: x + "x",
    tuple: lambda x: (*x, 1),
}  # another value of the same type


def test_only_these_fields_are_no_constants_of_the_steps():
    """Every other field, also a new one, distinguishes compiled steps."""
    config = Config.of(load_config("gpt"))
    for name in GROUPS:
        group, shared = getattr(config, name), set()
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            changed = config.replace(**{name: {field.name: OTHERS[type(value)](value)}})
            if changed.compiled_part() == config.compiled_part():
                shared.add(field.name)
        assert shared == NOT_COMPILED.get(name, set()), name


def test_a_value_that_is_no_constant_cannot_be_compiled(monkeypatch):
    config = Config.of(load_config("gpt")).compiled_part().optimizer
    params = models.abstract_params(build("gpt"))
    for read in (
        lambda c: optax.sgd(c.learning_rate),
        lambda c: optax.sgd(0.1 if c.weight_decay else 0.2),
        lambda c: optax.sgd(0.1 if c.decay_steps > 9 else 0.2),
    ):
        monkeypatch.setitem(OPTIMIZERS, "own", lambda _, config, read=read: read(config))
        with pytest.raises(TypeError, match=r"NotCompiled|no value in the compiled steps"):
            make_optimizer(params, config.replace(name="own"))


def config_of(**fields):
    return load_config("gpt", **{**SMALL, "model__vocab_size": 64, **fields})


def test_steps_are_found_again_until_others_replace_them(monkeypatch):
    device = jax.devices()[:1]
    first = shared_program(config_of(), device)
    again = shared_program(
        config_of(train__seed=3, train__steps=9, optimizer__schedule="constant"), device
    )
    assert again is first
    assert shared_program(config_of(), jax.devices()[:2]) is not first
    optimizer = OPTIMIZERS["adamw"]
    monkeypatch.setitem(OPTIMIZERS, "adamw", lambda *arguments: optimizer(*arguments))
    assert shared_program(config_of(), device) is not first  # another function has the same name
    monkeypatch.undo()
    assert shared_program(config_of(), device) is first
    monkeypatch.setattr(RECENT_PROGRAMS, "limit", 3)
    for loss_chunks in (2, 4, 8):
        shared_program(config_of(train__loss_chunks=loss_chunks), device)
    assert shared_program(config_of(), device) is not first
    assert len(RECENT_PROGRAMS.programs) == 3


@pytest.mark.slow
def test_runs_with_shared_steps_have_their_own_numbers():
    """The updates of two runs with one compiled step equal optax's with the schedules of optax's
    constructors.
    """
    rng, device = np.random.default_rng(0), jax.devices()[:1]
    tokens = rng.integers(0, 64, (8, 33), np.int32)
    common = dict(
        optimizer__clip_norm=0.0, optimizer__final_learning_rate=0.0, optimizer__decay_steps=6
    )
    runs = {
        (1, 0.3): (
            config_of(
                **common,
                train__seed=1,
                optimizer__warmup_steps=2,
                optimizer__learning_rate=0.02,
                optimizer__weight_decay=0.3,
            ),
            optax.warmup_cosine_decay_schedule(0.0, 0.02, 2, 6),
        ),
        (2**32 - 1, 0.0): (
            config_of(
                **common,
                train__seed=2**32 - 1,
                optimizer__schedule="linear",
                optimizer__warmup_steps=0,
                optimizer__learning_rate=0.01,
                optimizer__weight_decay=0.0,
                train__steps=6,
            ),
            optax.linear_schedule(0.01, 0.0, 6),
        ),
    }
    programs = [shared_program(config, device) for config, _ in runs.values()]
    assert programs[0] is programs[1]
    program = programs[0]
    for (seed, decay), (config, schedule) in runs.items():
        state, step = program.initial_state(seed), program.bind(config)
        model, params = program.model, jax.device_get(state.params)
        variables = jax.jit(lambda seed=seed, model=model: models.init_variables(model, seed))()
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6), params, variables["params"]
        )
        is_matrix = jax.tree.map(lambda p: p.is_matrix, models.abstract_params(model))
        optimizer = optax.adamw(schedule, 0.9, 0.95, weight_decay=decay, mask=is_matrix)
        expected, found = expected_losses(model, params, optimizer, tokens), []
        for number in range(4):
            state, metrics = step(state, Batch(jnp.asarray(tokens)))
            assert float(metrics["learning_rate"]) == pytest.approx(
                float(schedule(number)), rel=1e-6
            )
            found.append(float(metrics["loss"]))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(model, params, tokens):
    def loss(params):
        logits = model.apply({"params": params}, tokens[:, :-1], Context(train=True))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return jax.value_and_grad(loss)(params)


def expected_losses(model, params, optimizer, tokens) -> list[float]:
    @jax.jit
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, found = optimizer.init(params), []
    for _ in range(4):
        value, gradients = loss_and_gradients(model, params, tokens)
        params, state = update(gradients, state, params)
        found.append(float(value))
    return found


def test_the_order_of_batches_and_the_initial_weights_have_seeds_of_their_own(text_file):
    def weights_and_rows(**seeds):
        config = Config.of(config_of(data__source=str(text_file), model__vocab_size=300, **seeds))
        program = shared_program(config, jax.devices()[:1])
        weights = jax.tree.leaves(program.initial_state(config.train.seed).params)
        rows = open_pipeline(config, program).row_numbers_at(1)
        return np.concatenate([np.ravel(x) for x in weights]), rows

    weights, rows = weights_and_rows(train__seed=1)
    same_weights, other_rows = weights_and_rows(train__seed=1, data__seed=2)
    other_weights, same_rows = weights_and_rows(train__seed=2, data__seed=1)
    assert (weights == same_weights).all() and rows != other_rows
    assert rows == same_rows and (weights != other_weights).any()
    assert weights_and_rows(train__seed=2)[1] == other_rows
