"""Tests of what a comparison keeps between its runs."""

import jax
from conftest import load_config

from smallgpt_jax import models
from smallgpt_jax.comparison import training


def test_programs_of_a_few_models_are_kept(monkeypatch):
    """The seeds of several models are trained in turns. No model's programs are freed before a
    fifth model comes.
    """
    cleared, compiled = [], set()
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(width))
    for width in (16, 32, 48, 64, 16, 64, 32, 80, 16, 80):
        config = load_config("gpt", model__d_model=width).model
        training.free_programs(models.build(**config).config, compiled)
    assert cleared == [80]
