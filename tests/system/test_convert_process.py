"""A test of conversion in subprocesses in which PyTorch cannot be imported."""

import pytest
from conftest import init, load_config, run, save_run

from smallgpt_jax import models

pytestmark = pytest.mark.slow


def test_conversion_needs_no_pytorch(text_file, tmp_path):
    config = load_config(
        "cgpt", data__source=str(text_file), model__num_layers=2, model__d_model=32
    )
    saved = save_run(tmp_path / "saved", config, init(models.build(**config.model)))
    (tmp_path / "torch.py").write_text("raise ImportError('PyTorch is imported')\n")
    out = tmp_path / "out"
    for arguments in (
        ["--to=hf", f"--workdir={saved}", f"--output={out}"],
        ["--from=hf", f"--input={out}", f"--workdir={tmp_path / 'back'}"],
    ):
        done = run("convert", *arguments, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "back" / "checkpoints" / "0").is_dir()
