"""What exports and imports leave behind when they are killed, or when the disk is full."""

import fcntl
import os
import resource
import subprocess
import sys

import pytest
from conftest import build, call, init

from smallgpt_jax.conversion import hugging_face
from smallgpt_jax.data import tokenizers
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.storage import atomic
from smallgpt_jax.storage.temporary import temporary_folder

KILLED = """
import os, sys
from pathlib import Path
from smallgpt_jax.storage.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
"""


def kill_an_export(path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, path])
    assert done.returncode == -9


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    """Not what a running process writes, and nothing of other names."""
    kill_an_export(tmp_path / "model[1]")
    (left,) = tmp_path.iterdir()
    assert (left / "model[1]" / "weights").exists()
    others = (".model[1].backup", ".model[1].partial-of-mine", "model1")
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with atomic.atomic_folder(tmp_path / "model[1]") as slow:
        assert not left.exists()
        with atomic.atomic_folder(tmp_path / "model[1]") as fast:
            assert slow.exists() and fast.parent != slow.parent
        (tmp_path / "model[1]").rmdir()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "model[1]"}


def test_where_locks_are_not_supported_nothing_is_removed(tmp_path, monkeypatch):
    """Another process may still use the folder."""
    kill_an_export(tmp_path / "model")
    (left,) = tmp_path.iterdir()

    def no_locks(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with atomic.atomic_folder(tmp_path / "model"):
        assert left.exists()


def test_a_folder_of_another_user_is_not_removed(tmp_path, monkeypatch):
    kill_an_export(tmp_path / "model")
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with temporary_folder(tmp_path, ".model.partial-"):
        assert left.exists()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a folder with a workdir and an export of a model of 1.3 MB."""
    folder = tmp_path_factory.mktemp("models")
    llama = dict(position="rope", norm="rms", mlp="gated", activation="silu", use_bias=False)
    model = build("gpt", num_layers=1, d_model=128, **llama)
    params = init(model)
    write_imported(folder / "run", ImportedModel(model, params, tokenizers.Bytes()), {})
    (folder / "export").mkdir()
    hugging_face.export_folder(folder / "export", model, params, tokenizers.Bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, output",
    [
        ("--to=hf --workdir=MODELS/run --output=OUTPUT", "new"),
        ("--to=gguf --workdir=MODELS/run --output=OUTPUT", "new.gguf"),
        ("--from=hf --input=MODELS/export --workdir=OUTPUT", "new"),
        ("--from=run --input=MODELS/run --workdir=OUTPUT", "new"),
    ],
)
def test_convert_on_a_full_disk(flags, output, models, tmp_path):
    """A limit of the size of files has the error numbers of a full disk, for all libraries."""
    path = tmp_path / output
    flags = flags.replace("MODELS", str(models)).replace("OUTPUT", str(path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        result = call("convert", *flags.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"error: {path}: ")
    assert result.stderr.strip().endswith(("File too large", "No space left on device"))
    assert list(tmp_path.iterdir()) == []
