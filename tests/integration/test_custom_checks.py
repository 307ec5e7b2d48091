"""Tests of the checks of custom mixers: what they see in training, and their caches in decoding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, init, load_config

from smallgpt_jax import models
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import loading
from smallgpt_jax.inference.decoding_check import ragged_calls
from smallgpt_jax.models.causality_check import check_causality
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.ops.activations import ACTIVATIONS
from smallgpt_jax.training import opening, trainer
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

pytestmark = pytest.mark.slow
SIZES = dict(num_layers=1, d_model=16, num_heads=2, context_length=64)
KEPT = 0.9  # of a state, per token


class Decaying(nn.Module):
    """h_t = 0.9·h_(t−1) + x_t·w within a document, with a cache that is right. The last projection
    is 0 at first.
    """

    config: models.ModelConfig
    mistake: str = ""  # of a subclass

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        width, time = self.config.d_model, x_BxTxD.shape[1]
        v_BxTxD = nn.Dense(width, use_bias=False, dtype=self.compute_dtype)(x_BxTxD)
        powers = jnp.arange(time)[:, None] - jnp.arange(time)[None]
        weights_1xTxT = jnp.where(powers >= 0, KEPT ** jnp.maximum(powers, 0.0), 0)[None]
        if self.mistake == "all positions":
            weights_1xTxT = jnp.full((1, time, time), 1 / time)
        if self.mistake == "the next position":
            weights_1xTxT += 0.1 * (powers == -1)[None]
        if context.segment_ids_BxT is not None and self.mistake != "all documents":
            ids_BxT = context.segment_ids_BxT
            weights_1xTxT = weights_1xTxT * (ids_BxT[:, :, None] == ids_BxT[:, None])
        h_BxTxD = weights_1xTxT.astype(v_BxTxD.dtype) @ v_BxTxD
        if context.decode:
            state, _ = cache_variable(self, "state", (len(x_BxTxD), width), v_BxTxD.dtype)
            decays_T = KEPT ** (jnp.arange(time) + (0 if self.mistake == "exponent" else 1))
            decayed_BxTxD = (decays_T[None, :, None] * state.value[:, None]).astype(v_BxTxD.dtype)
            state.value = self.updated(state.value, h_BxTxD + decayed_BxTxD, context)
            h_BxTxD += decayed_BxTxD
        return nn.Dense(width, use_bias=False, kernel_init=nn.initializers.zeros)(h_BxTxD)

    @property
    def compute_dtype(self):
        return self.config.dtype

    def updated(self, state_BxD, h_BxTxD, context: Context):
        if self.mistake == "padding":
            return h_BxTxD[:, -1]
        last_B = jnp.maximum(context.length_B, 1) - 1
        newest_BxD = jnp.take_along_axis(h_BxTxD, last_B[:, None, None], axis=1)[:, 0]
        if self.mistake == "decayed twice":
            newest_BxD = jnp.where(context.length_B[:, None] > 1, newest_BxD, KEPT * newest_BxD)
        if self.mistake == "waiting":
            return newest_BxD
        return jnp.where(context.length_B[:, None] > 0, newest_BxD, state_BxD)


class AllPositions(Decaying):
    mistake: str = "all positions"


class NextPosition(Decaying):
    mistake: str = "the next position"


class AllDocuments(Decaying):
    mistake: str = "all documents"


class WrongExponent(Decaying):
    mistake: str = "exponent"


class DecayedTwice(Decaying):
    mistake: str = "decayed twice"


class ReadsPadding(Decaying):
    mistake: str = "padding"


class ForgetsWaiting(Decaying):
    """A row without new tokens gets another state."""

    mistake: str = "waiting"


class InBfloat16(Decaying):
    """Whatever config.model.dtype is."""

    @property
    def compute_dtype(self):
        return jnp.bfloat16


def config_of(mixer: type, **fields):
    mixers = (f"{__name__}:{mixer.__name__}",)
    config = load_config("gpt", model__mixers=mixers, model__position="none")
    config.model.update(SIZES)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return config


def test_mixers_that_see_too_much_are_refused_before_training(text_file, tmp_path):
    expected = (
        rf"config.model.mixers='{__name__}:NextPosition': outputs depend on later tokens, which the "
        "model learns to predict"
    )
    with pytest.raises(UserError, match=expected) as error:
        train_and_evaluate(
            config_of(NextPosition, data__source=str(text_file)), str(tmp_path / "run")
        )
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_mixers_that_see_what_they_may_are_accepted_on_eight_devices():
    fields = {"data__separate_documents": True, "mesh__data": 2, "mesh__fsdp": 4}
    program = build_program(config_of(Decaying, **fields))
    params = jax.device_put(jax.device_get(init(program.model)), program.shardings.params)
    with sharding.use_mesh(program.mesh):
        check_causality(program.model, params, {}, separate_documents=True)


def test_documents_of_a_row_are_one_text_unless_separated():
    model = models.build(**config_of(AllDocuments).model)
    check_causality(model, init(model), {}, separate_documents=False)
    expected = (
        rf"'{__name__}:AllDocuments': outputs depend on other documents of their row "
        r"\(config.data.separate_documents=True"
    )
    with pytest.raises(UserError, match=expected):
        check_causality(model, init(model), {}, separate_documents=True)


def test_rounding_and_a_short_context_are_no_dependence():
    model = models.build(**config_of(InBfloat16, model__context_length=4).model)
    check_causality(model, init(model), {})


class Reached(Exception):
    pass


def test_built_in_models_are_not_checked(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "open_pipeline", lambda *_: (_ for _ in ()).throw(Reached()))
    monkeypatch.setattr(opening, "check_causality", None)
    with pytest.raises(Reached):
        train_and_evaluate(load_config("gpt", data__source=str(text_file)), str(tmp_path / "run"))


def load(mixer: type):
    model = models.build(**config_of(mixer).model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + np.float32(rng.normal(0, 0.1, x.shape)), init(model))
    return loading.build_text_model(model, params, Bytes())


@pytest.mark.parametrize("mixer", [Decaying, InBfloat16])
def test_right_caches_are_accepted(mixer):
    load(mixer)


@pytest.mark.parametrize("mixer", [WrongExponent, DecayedTwice, ReadsPadding, ForgetsWaiting])
def test_wrong_caches_are_refused(mixer):
    with pytest.raises(UserError, match=r"wrong logits \(off by .*\): a cache is wrong; in decod"):
        load(mixer)


def test_what_sees_later_tokens_is_named_in_decoding():
    with pytest.raises(UserError, match="outputs depend on later tokens, which the model learns"):
        load(AllPositions)


def test_a_part_that_is_defined_anew_is_another_program(monkeypatch):
    """As in a notebook: the model has the same config, and the part another function."""
    model = build("gpt", **SIZES)
    params, tokens = init(model), [*range(9)]

    def results():
        (score,) = Scorer(model, params).score([TokenSequence(tokens, 5)])
        text = loading.build_text_model(model, params, Bytes()).generate("abc", 20, temperature=0)
        return score, text

    before = results()
    monkeypatch.setitem(ACTIVATIONS, model.config.activation, lambda x: 3 - 5 * x)
    after = results()
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("length", [1, 2, 4, 8, 40])
def test_ragged_calls_fit_the_context(length):
    calls = ragged_calls(length)
    assert 0 < calls.sum(axis=0).max() <= length
    if length >= 8:
        assert (calls[0] > 1).all() and calls[1].max() > 1 and calls.min() == 0
