"""The folder of the compilation cache, and installation commands in messages."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import ROOT

from smallgpt_jax import compilation_cache, errors
from smallgpt_jax.errors import UserError

CPUINFO = "processor\t: 0\nmodel name\t: {model}\ncpu MHz\t\t: {mhz}\nflags\t\t: sse2 {flag}\n\nprocessor\t: 1\n"


@pytest.fixture
def processor(monkeypatch):
    """Returns a function that sets the content of /proc/cpuinfo."""
    read = Path.read_text
    content = {}
    monkeypatch.setattr(Path, "read_text", lambda path, *args: content.get(str(path)) or read(path, *args))

    def set_processor(**values):
        content["/proc/cpuinfo"] = CPUINFO.format(**{"model": "A", "mhz": 2000, "flag": "avx2", **values})
        return compilation_cache.processor_kind()

    return set_processor


def test_processors_with_other_instructions_have_other_folders(processor):
    assert processor() == processor(mhz=2400)
    assert len({processor(), processor(flag="avx512f"), processor(model="B")}) == 3


def test_the_shared_folder_is_that_of_the_environment(processor, monkeypatch, tmp_path, cache_folder):
    kind = processor()
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    assert compilation_cache.folder() == cache_folder / "smallgpt_jax" / "compiled" / kind
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    assert compilation_cache.folder() == tmp_path / kind
    monkeypatch.setenv(compilation_cache.VARIABLE, "s3://bucket/compiled")
    with pytest.raises(UserError, match=r"^JAX_COMPILATION_CACHE_DIR: 's3://bucket/compiled' is a URL, and only gs://"):
        compilation_cache.folder()


def test_a_cache_that_the_program_has_set_is_kept(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.configure()
    assert jax.config.jax_compilation_cache_dir == before


COMPILE = """
import jax
from smallgpt_jax import compilation_cache
compilation_cache.configure()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
print(jax.jit(lambda x: x @ x + 3)(jax.numpy.ones((4, 4)))[0, 0], sum(hits))
"""


@pytest.mark.slow
def test_processes_share_the_cache_and_survive_a_partial_entry(tmp_path):
    """A process that is killed while it writes an entry leaves a part of a file."""
    def compile_in_process() -> list[str]:
        environment = {**os.environ, compilation_cache.VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-W", "default", "-c", COMPILE], env=environment, capture_output=True,
                              text=True)
        assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
        return done.stdout.split()

    assert compile_in_process() == ["7.0", "0"]
    entries = list((tmp_path / compilation_cache.processor_kind()).glob("*-cache"))
    value, hits = compile_in_process()
    assert (value, int(hits)) == ("7.0", len(entries)) and len(entries) > 0
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-20])
    assert compile_in_process() == ["7.0", "0"]


def test_installation_commands(monkeypatch, tmp_path):
    assert errors.install_command("hf") == "pip install -e '.[hf]'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "smallgpt_jax" / "errors.py"))
    assert errors.install_command("hf") == "pip install 'smallgpt_jax[hf]'"
