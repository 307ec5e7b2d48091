"""Custom models whose FLOPs cannot be counted, or do not contain all of their work: runs, plans,
comparisons.
"""

import functools
import json
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from conftest import build, load_config

from configs.compare import base
from smallgpt_jax import models
from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.record import Record
from smallgpt_jax.comparison import recipe, run_reader
from smallgpt_jax.devices import chips
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import train_cost
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.planning import estimate
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.report.cautions import cautions, uncounted_work
from smallgpt_jax.training import messages
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

CHIP = chips.Chip(flops=1e12, hbm=16e9)
TIME, WIDTH, LAYERS, VOCABULARY = 64, 64, 4, 512  # of size `tiny`


def causal_fft(x_BxTxD):
    """Returns the mean over the current and all earlier positions, computed by FFT."""
    time = x_BxTxD.shape[1]
    spectra = (jnp.fft.rfft(x, 2 * time, axis=1) for x in (x_BxTxD, jnp.ones((1, time, 1))))
    sums_BxTxD = jnp.fft.irfft(functools.reduce(jnp.multiply, spectra), 2 * time, axis=1)[:, :time]
    return sums_BxTxD / jnp.arange(1, time + 1)[None, :, None]


def unknown_loop(x_BxTxD):
    """Multiplies with the identity until a condition is met. Only a forward pass can contain such a
    loop.
    """
    return jax.lax.while_loop(
        lambda x: jnp.any(jnp.isnan(x)), lambda x: x @ jnp.eye(x.shape[-1]), x_BxTxD
    )


def recurrence(x_BxTxD):
    def step(h_BxD, x_BxD):
        for _ in range(100):
            h_BxD = 0.5 * h_BxD + x_BxD
        return h_BxD, h_BxD

    return jnp.swapaxes(
        jax.lax.scan(step, jnp.zeros_like(x_BxTxD[:, 0]), jnp.swapaxes(x_BxTxD, 0, 1))[1], 0, 1
    )


class MixedBlock(nn.Module):
    config: models.ModelConfig
    mix: callable

    @nn.compact
    def __call__(self, x_BxTxD, context):
        width = x_BxTxD.shape[-1]
        mixed_BxTxD = self.mix or nn.Conv(width, (4,), padding="CAUSAL", feature_group_count=width)
        return x_BxTxD + nn.Dense(width, use_bias=False)(mixed_BxTxD(x_BxTxD))


class Mixed(nn.Module):
    """A stack of blocks with the function `mix`, by default a convolution per channel, and a dense
    layer.
    """

    config: models.ModelConfig
    mix: callable = None

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        configs = layer_configs(self.config, self.config.num_layers)
        return stack_blocks(configs, context, block=functools.partial(MixedBlock, mix=self.mix))(
            x_BxTxD
        )


class Fourier(Mixed):
    mix: callable = causal_fft


class Loop(Mixed):
    mix: callable = unknown_loop


class Recurrent(Mixed):
    mix: callable = recurrence


def own_config(trunk: type, **fields):
    return load_config(
        "gpt", model__architecture=f"{__name__}:{trunk.__name__}", model__position="none", **fields
    )


@pytest.fixture
def known_chip(monkeypatch):
    monkeypatch.setattr(chips, "find_chip", lambda kind: CHIP)


def test_a_convolution_counts_as_flops(known_chip):
    """A depthwise convolution with four taps multiplies 4 numbers per channel."""
    program = build_program(own_config(Mixed), jax.devices()[:1])
    flops = 6 * (LAYERS * (WIDTH**2 + 4 * WIDTH) + WIDTH * VOCABULARY)
    assert train_cost(program.model).flops == flops
    assert messages.peak_tokens_per_second(program) == CHIP.flops / flops


@pytest.mark.parametrize("trunk, reason", [(Fourier, "fft"), (Loop, "while")])
def test_unknown_flops(trunk, reason, known_chip, capsys, tmp_path):
    """There is no MFU, and a message says why. A comparison with equal FLOPs refuses the model."""
    program = build_program(own_config(trunk), jax.devices()[:1])
    assert messages.peak_tokens_per_second(program) is None
    assert (
        capsys.readouterr().out.startswith("MFU is not logged: ")
        and reason in train_cost(program.model).problem
    )
    comparison = base.comparison(
        load_config("gpt"),
        {"gpt": {}, "own": {"model": {"architecture": program.model.config.architecture}}},
        budget="flops",
    )
    with pytest.raises(
        UserError, match=f"budget='flops': .*{trunk.__name__}: .*{reason}.*another budget"
    ):
        recipe.make_comparison(comparison, tmp_path)


@pytest.mark.slow
def test_a_run_a_plan_and_a_report_without_flops(known_chip, text_file, tmp_path, capsys):
    config = own_config(
        Fourier,
        model__num_layers=1,
        model__d_model=16,
        data__source=str(text_file),
        data__validation_fraction=0.2,
        train__steps=2,
        train__eval_every=2,
        train__eval_steps=1,
        train__log_every=1,
    )
    train_and_evaluate(config, str(tmp_path / "own"))
    assert "MFU is not logged: the FLOPs of fft cannot be counted" in capsys.readouterr().out
    lines = [
        json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["split"] for line in lines] == ["train", "train", "eval"] and not any(
        "mfu" in line for line in lines
    )

    program = build_program(config)
    planned = estimate.estimate(program)
    assert planned.flops_per_token is planned.flops_per_step is planned.estimated_mfu is None
    assert "FLOPs unknown: the FLOPs of fft cannot be counted" in format_plan(program, planned)

    run = run_reader.read_run("own", tmp_path / "own")
    assert run.flops_per_token is None
    content = Record("one", "no budget", "none", "own", (run,))
    lines = cautions(analyse(content), content)
    assert "The FLOPs of own are unknown: the FLOPs of fft cannot be counted." in lines


def test_the_report_names_runs_with_uncounted_work():
    """A recurrence of 200 operations per position and channel is not a matrix product, but it is
    work.
    """
    costs = {
        name: train_cost(build("gpt", position="none", **fields))
        for name, fields in (
            ("plain", {"architecture": f"{__name__}:Mixed"}),
            ("deep", {"architecture": f"{__name__}:Recurrent"}),
        )
    }
    products = LAYERS * WIDTH**2 + WIDTH * VOCABULARY
    assert costs["deep"].flops == 6 * products
    assert 0 < costs["deep"].uncounted - LAYERS * WIDTH * 200 / (2 * products) < 0.05
    runs = [
        SimpleNamespace(model=name, uncounted=cost.uncounted, flops_problem="")
        for name, cost in costs.items()
    ]
    (line,) = uncounted_work(runs)
    assert (
        f"{costs['plain'].uncounted:.0%} in plain to {costs['deep'].uncounted:.0%} in deep" in line
    )
    assert not uncounted_work(runs[:1])
