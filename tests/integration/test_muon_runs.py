"""Runs with Muon: continued training of another run's model, and FLOPs in reports.
test_resumption.py resumes such runs.
"""

import jax
import pytest
from comparison_helpers import untrained_run
from conftest import call, load_config
from run_helpers import RESUMED, SMALL, config_for, losses_in

from smallgpt_jax.comparison import run_reader
from smallgpt_jax.planning.estimate import estimate
from smallgpt_jax.planning.table import format_plan
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

pytestmark = pytest.mark.slow
# Each of the two layers has four (16, 16) matrices in attention and two (16, 64) matrices in the
# MLP. An update takes five Newton–Schulz steps. A step on an (m, n) matrix takes 2·m²·n + 2·m³ +
# 2·m²·n FLOPs.
UPDATE_FLOPS = 2 * 5 * (4 * 6 * 16**3 + 2 * (4 * 16**2 * 64 + 2 * 16**3))


def test_training_a_copy_of_a_run_starts_with_a_new_optimizer_state(
    text_file, trained_run, tmp_path
):
    """Training of the copy starts from the run's last weights, and the loss falls."""
    source = trained_run("gpt", **SMALL)
    result = call("convert", "--from=run", f"--input={source}", f"--workdir={tmp_path / 'copy'}")
    assert result.returncode == 0, result.stderr
    fields = {**RESUMED, "train__steps": 10, "train__log_every": 1, "optimizer__decay_steps": 10}
    train_and_evaluate(config_for(text_file, **fields), str(tmp_path / "copy"))
    losses = losses_in(tmp_path / "copy")
    assert losses[10] < losses[1] < losses_in(source)[10]


def test_the_updates_count_as_flops(text_file, tmp_path):
    """Reports and plans count the FLOPs of updates, but model FLOPs per token and MFU do not."""
    fields = {**SMALL, "optimizer__name": "muon"}
    muon, adamw = (
        run_reader.read_run("run", untrained_run(tmp_path / name, text_file, **fields))
        for name, fields in (("muon", fields), ("adamw", SMALL))
    )
    assert muon.flops_per_token == adamw.flops_per_token
    assert [point.flops for point in muon.curve] == [
        point.flops + point.step * UPDATE_FLOPS for point in adamw.curve
    ]
    program = build_program(load_config("gpt", **fields), jax.devices()[:1])
    result = estimate(program)
    tokens = program.config.train.batch_size * 32
    assert result.flops_per_step == tokens * muon.flops_per_token + UPDATE_FLOPS
    share = UPDATE_FLOPS / result.flops_per_step
    assert f"of which {UPDATE_FLOPS:.3e} ({share:.1%}) by the optimizer" in format_plan(
        program, result
    )
