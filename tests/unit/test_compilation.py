"""Tests of the store of compiled programs, with a compiler that counts its calls, and of the
progress line.
"""

import dataclasses
import gzip
import io
import json
import os
import re
import time
from types import SimpleNamespace

import jax
import pytest
from conftest import call

from smallgpt_jax.output import elapsed_time_shown
from smallgpt_jax.planning import compilation, topologies
from smallgpt_jax.planning.compilation import OPTIONS, CompiledProgram, Compiler

HLO = """HloModule m

ENTRY %main (a: f32[1]) -> f32[1] {
  ROOT %a = f32[1]{0} parameter(0)
}
"""
PROGRAM = CompiledProgram(argument_bytes=16, temp_bytes=5, output_bytes=8, alias_bytes=4, text=HLO)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Returns the list of programs that were compiled. The cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def run_compiler(lowered, platform, options):
        calls.append(lowered)
        return PROGRAM

    monkeypatch.setattr(compilation, "run_compiler", run_compiler)
    return calls


def lower(length: int = 3, factor: float = 2.0) -> jax.stages.Lowered:
    return jax.jit(lambda x: factor * x).lower(jax.ShapeDtypeStruct((length,), "float32"))


def stored_files():
    return list(compilation.folder().iterdir())


def test_the_same_program_is_compiled_once(compiled):
    compilers = [Compiler(jax.devices()[:1]) for _ in range(2)]
    assert [compiler.compile(lower()) for compiler in compilers] == [PROGRAM, PROGRAM]
    assert [compiler.compilations for compiler in compilers] == [1, 0] and len(compiled) == 1
    assert PROGRAM.total_bytes == 16 + 5 + 8 - 4


def device(kind: str, number: int = 0, compiler: str = "XLA 1") -> SimpleNamespace:
    return SimpleNamespace(
        device_kind=kind,
        id=number,
        process_index=0,
        platform="gpu",
        client=SimpleNamespace(platform_version=compiler),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch: (lower(factor=3.0), [device("NVIDIA H100")]),
        lambda monkeypatch: (lower(length=4), [device("NVIDIA H100")]),
        lambda monkeypatch: (lower(), [device("NVIDIA H200")]),
        lambda monkeypatch: (lower(), [device("NVIDIA H100"), device("NVIDIA H100", 1)]),
        lambda monkeypatch: (lower(), [device("NVIDIA H100", compiler="XLA 2")]),
        lambda monkeypatch: monkeypatch.setattr(
            compilation, "PACKAGES", ("jax", "jaxlib", "numpy")
        ),
        lambda monkeypatch: monkeypatch.setenv("XLA_FLAGS", "--xla_new=1"),
        lambda monkeypatch: monkeypatch.setattr(compilation, "code_fingerprint", lambda: "another"),
    ],
    ids=["constant", "shape", "device", "devices", "compiler", "versions", "flags", "code"],
)
def test_another_program_is_compiled(compiled, monkeypatch, change):
    Compiler([device("NVIDIA H100")]).compile(lower())
    lowered, devices = change(monkeypatch) or (lower(), [device("NVIDIA H100")])
    for _ in range(2):
        Compiler(devices).compile(lowered)
    assert len(compiled) == 2 and len(stored_files()) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-9],
        lambda content: b"text",
        lambda content: content[:20] + b"\0\1\2" + content[23:],
        lambda content: gzip.compress(b"[1, 2]"),
        lambda content: gzip.compress(
            json.dumps(dataclasses.asdict(PROGRAM) | {"temp_bytes": -1}).encode()
        ),
    ],
)
def test_a_damaged_file_is_replaced(compiled, damage):
    Compiler(jax.devices()[:1]).compile(lower())
    (file,) = stored_files()
    intact = file.read_bytes()
    file.write_bytes(damage(intact))
    assert Compiler(jax.devices()[:1]).compile(lower()) == PROGRAM
    assert len(compiled) == 2 and file.read_bytes() == intact and stored_files() == [file]


def test_the_programs_that_were_used_last_stay(compiled, monkeypatch):
    compiler = Compiler(jax.devices()[:1])
    for age, length in enumerate((3, 2, 1)):
        compiler.compile(lower(length))
        file = max(stored_files(), key=lambda file: file.stat().st_mtime)
        os.utime(file, (1e9 - age, 1e9 - age))
    compiler.compile(lower(1))  # the oldest, which is now the newest
    size = file.stat().st_size
    monkeypatch.setattr(compilation, "MAX_STORED_BYTES", 3 * size + 10)
    compiler.compile(lower(4))  # removes the program of 2 numbers
    assert len(stored_files()) == 3 and len(compiled) == 4
    for length in (1, 3, 4):
        compiler.compile(lower(length))
    assert len(compiled) == 4
    compiler.compile(lower(2))
    assert len(compiled) == 5


def test_a_folder_that_cannot_be_written(compiled, tmp_path):
    compilation.folder().parent.mkdir(parents=True)
    compilation.folder().write_text("")
    for _ in range(2):
        assert Compiler(jax.devices()[:1]).compile(lower()) == PROGRAM
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "platform, expected",
    [
        ("gpu", {"xla_gpu_enable_triton_gemm": False}),
        ("cpu", {}),
        ("tpu", {"xla_dump_hlo_as_text": True}),
    ],
)
def test_the_options_of_the_compilers(platform, expected):
    memory = SimpleNamespace(
        argument_size_in_bytes=1,
        temp_size_in_bytes=2,
        output_size_in_bytes=3,
        alias_size_in_bytes=4,
    )
    options = {}
    program = SimpleNamespace(as_text=lambda: HLO, memory_analysis=lambda: memory)
    lowered = SimpleNamespace(compile=lambda given: options.update(given) or program)
    assert compilation.run_compiler(
        lowered, platform, OPTIONS.get(platform, {})
    ) == CompiledProgram(1, 2, 3, 4, HLO)
    assert (options.pop("xla_dump_to", None) is not None) == (
        platform == "tpu"
    ) and options == expected


@pytest.mark.slow
def test_plan_compiles_a_changed_config_anew(compiled, monkeypatch):
    """A plan has two programs. The seed is not in them."""
    monkeypatch.setattr(topologies, "topology_devices", lambda topology: jax.devices()[:1])

    def plan(*flags) -> str:
        result = call(
            "plan",
            "--config=configs/gpt.py:tiny",
            "--config.model.num_layers=1",
            "--topology=cpu:1",
            *flags,
        )
        assert result.returncode == 0 and not result.stderr, result.stderr
        return result.stdout

    first, again = (json.loads(plan("--json")) for _ in range(2))
    assert (first.pop("compiled_programs"), again.pop("compiled_programs"), len(compiled)) == (
        2,
        0,
        2,
    )
    assert first.pop("compile_seconds") > 0 < again.pop("compile_seconds") and first == again
    assert re.search(
        rf"^0 of 2 programs compiled in \d+ s; earlier compilations are in {compilation.folder()}$",
        plan("--config.train.seed=1"),
        re.MULTILINE,
    )
    assert json.loads(plan("--json", "--config.optimizer.beta1=0.5"))["compiled_programs"] == 1
    wider = plan("--json", "--config.model.d_model=32", "--config.train.microbatches=0")
    assert json.loads(wider)["compiled_programs"] == 2  # also where the plan tries microbatches
    assert len(compiled) == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while stream.getvalue().count(text) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_time_is_shown_on_a_terminal(monkeypatch):
    """The line is updated in place, and removed at the end."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with elapsed_time_shown("compiling", seconds=0.01):
        wait_for(stream, "compiling", 3)
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines[0] == lines[-1] == "" and len(lines) >= 5
    assert all(re.fullmatch(r"compiling … \d+s", line) for line in lines[1:-1])
    time.sleep(0.05)
    assert stream.getvalue().split("\r\x1b[K") == lines


def test_the_time_is_printed_in_lines_elsewhere(monkeypatch):
    """A log shows that a compilation of minutes goes on; a short one prints nothing."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with elapsed_time_shown("compiling", line_seconds=0.01):
        wait_for(stream, "compiling", 2)
    assert re.fullmatch(r"(compiling … 0s\n){2,}", stream.getvalue())
    before = stream.getvalue()
    with elapsed_time_shown("compiling"):
        pass
    assert stream.getvalue() == before
