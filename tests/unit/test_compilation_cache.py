"""The folder of the compilation cache, and installation commands in messages."""

from pathlib import Path

import jax
import pytest

from smallgpt_jax import errors
from smallgpt_jax.devices import compilation_cache
from smallgpt_jax.errors import UserError

CPUINFO = (
    "processor\t: 0\nmodel\t: {number}\nmodel name\t: {model}\ncpu MHz\t\t: {mhz}\n"
    "flags\t\t: sse2 {flag}\n\nprocessor\t: 1\n"
)


@pytest.fixture
def processor(monkeypatch):
    """Returns a function that sets the content of /proc/cpuinfo."""
    read = Path.read_text
    content = {}
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args: content.get(str(path)) or read(path, *args)
    )

    def set_processor(**values):
        content["/proc/cpuinfo"] = CPUINFO.format(
            **{"number": 17, "model": "A", "mhz": 2000, "flag": "avx2", **values}
        )
        return compilation_cache.processor_kind()

    return set_processor


def test_processors_with_other_instructions_have_other_folders(processor):
    assert processor() == processor(mhz=2400)
    kinds = {processor(), processor(flag="avx512f"), processor(model="B"), processor(number=1)}
    assert len(kinds) == 4


def test_the_shared_folder_is_that_of_the_environment(
    processor, monkeypatch, tmp_path, cache_folder
):
    kind = processor()
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    assert compilation_cache.folder() == cache_folder / "smallgpt_jax" / "compiled" / kind
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    assert compilation_cache.folder() == tmp_path / kind
    monkeypatch.setenv(compilation_cache.VARIABLE, "s3://bucket/compiled")
    with pytest.raises(
        UserError,
        match=r"^JAX_COMPILATION_CACHE_DIR: 's3://bucket/compiled' is a URL, and only gs://",
    ):
        compilation_cache.folder()


@pytest.mark.parametrize(
    "variable, before, is_kept",
    [
        ("/shared", "/elsewhere", True),
        (None, "/elsewhere", True),
        ("", "", True),
        ("/shared", "/shared", False),
        (None, None, False),
    ],
)
def test_a_cache_that_the_program_has_set_is_kept(monkeypatch, variable, before, is_kept):
    """If the environment variable is empty, there is no cache."""
    if variable is None:
        monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(compilation_cache.VARIABLE, variable)
    original = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.configure()
        assert jax.config.jax_compilation_cache_dir == (
            before if is_kept else str(compilation_cache.folder())
        )
    finally:
        jax.config.update("jax_compilation_cache_dir", original)


def test_programs_that_compile_in_a_tenth_of_a_second_are_cached(monkeypatch):
    option, variable = (
        "jax_persistent_cache_min_compile_time_secs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )
    before = getattr(jax.config, option)
    try:
        jax.config.update(option, 3.0)
        monkeypatch.setenv(variable, "3")
        compilation_cache.configure()
        assert getattr(jax.config, option) == 3  # the user's setting is kept
        monkeypatch.delenv(variable)
        compilation_cache.configure()
        assert getattr(jax.config, option) == 0.1
    finally:
        jax.config.update(option, before)


def test_installation_commands(monkeypatch, tmp_path):
    assert errors.install_command("hf") == "pip install -c constraints.txt -e '.[hf]'"
    monkeypatch.setattr(
        errors, "__file__", str(tmp_path / "site-packages" / "smallgpt_jax" / "errors.py")
    )
    assert errors.install_command("hf") == "pip install 'smallgpt_jax[hf]'"
