"""Tests of the reader of `.pt` files. The files are written by PyTorch, damaged, or malicious."""

import os
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conversion_helpers import write_released

from smallgpt_jax.conversion import gpt_variations, torch_file
from smallgpt_jax.errors import UserError

torch = pytest.importorskip("torch")


def test_arrays_equal_the_saved_tensors(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "slice": base[1:3, ::2],
        "transposed": base.T,
        "half": base.half(),
        "bf16": base.bfloat16().T,
        "ints": torch.arange(3),
        "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base),
        "bool": torch.tensor([True, False]),
    }
    path = tmp_path / "a.pt"
    torch.save(saved, path)
    arrays = torch_file.to_arrays(torch_file.read_torch_file(path), path)
    assert arrays["bf16"].dtype == "bfloat16" and arrays["ints"].dtype == np.int64
    for name, tensor in saved.items():
        assert arrays[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(
            arrays[name].astype(np.float32), tensor.detach().float().numpy()
        )


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


def save(path: Path, content) -> Path:
    torch.save(content, path)
    return path


def with_pickle(path: Path, content: bytes) -> Path:
    """Writes a file of torch.save with another pickle."""
    with zipfile.ZipFile(save(path, {"x": torch.zeros(4)})) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["a/data.pkl"] = content
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in files.items():
            archive.writestr(name, member)
    return path


def beyond_its_storage(path: Path) -> Path:
    """Writes a file whose tensor claims a million numbers of a storage of four."""
    with zipfile.ZipFile(save(path, {"model": {"x": torch.arange(4.0)}})) as archive:
        content = archive.read("a/data.pkl")
    changed = content.replace(b"K\x04\x85", b"J\x40\x42\x0f\x00\x85")  # the shape, (4,)
    assert changed != content
    return with_pickle(path, changed)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda p, data: p.write_bytes((data / "gpt.pt").read_bytes()[:500_000]) and p,
            "damaged, or not written by torch.save",
        ),
        (lambda p, data: p.write_text("hello") and p, "not written by torch.save"),
        (lambda p, data: p, "No such file"),
        (lambda p, data: save(p, {"model": Evil()}), r"refused: its pickle names posix\.mkdir"),
        (
            lambda p, data: save(p, {"model": {"x": np.zeros(3)}}),
            r"refused: its pickle names numpy\S+, which no checkpoint needs; no code was run",
        ),
        (lambda p, data: with_pickle(p, b"garbage"), "not written by torch.save"),
        (lambda p, data: with_pickle(p, pickle.dumps({}, 2)[:-1]), "not written by torch.save"),
        (lambda p, data: save(p, {"model": 3}), "no 'model' entry"),
        (lambda p, data: save(p, {"model": {"x": 3}}), "dictionary of named tensors"),
        (lambda p, data: save(p, {"model": {"x": torch.eye(3).to_sparse()}}), "is not dense"),
        (lambda p, data: beyond_its_storage(p), "not written by torch.save"),
        (
            lambda p, data: save(p, {"model": {"x": torch.zeros(1).expand(100_000)}}),
            "more than 8 times as large as the file",
        ),
        (lambda p, data: save(p, {"model": {"x": torch.zeros(3)}}), "no n_head"),
        (
            lambda p, data: write_released(p, "transformer.h.0.ln_2.weight"),
            r"missing tensors: transformer\.h\.0\.ln_2\.weight$",
        ),
        (
            lambda p, data: write_released(p, "transformer.wte.weight"),
            r"no transformer\.wte, transformer\.wpe or MLP",
        ),
    ],
)
def test_refuses_bad_files(make, message, tmp_path, shared_data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path / "a.pt", shared_data / "gpt_variations")
    with pytest.raises(UserError, match=message) as error:
        gpt_variations.read_checkpoint(path)
    assert str(path) in str(error.value) and not Path("evil-was-here").exists()


def test_a_class_is_allowed_only_while_its_file_is_read(tmp_path):
    path = write_released(tmp_path / "released.pt")
    gpt_variations.read_checkpoint(path)
    with pytest.raises(UserError, match=r"refused: its pickle names models\.GPTConfig"):
        torch_file.read_torch_file(path)


def test_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it then fails
    with pytest.raises(UserError, match=r"torch is not installed; run pip install .*\[torch\]"):
        torch_file.read_torch_file(tmp_path / "a.pt")
