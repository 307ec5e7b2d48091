"""Tests of the reader of `.pt` files. The files are written by PyTorch, damaged, or malicious."""

import contextlib
import pickle
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conversion_helpers import write_released

from smallgpt_jax.conversion import gpt_variations, torch_file
from smallgpt_jax.errors import UserError

torch = pytest.importorskip("torch")


def test_tensors_equal_those_of_torch_load(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "slice": base[1:3, ::2],
        "transposed": base.T,
        "half": base.half(),
        "bf16": base.bfloat16(),
        "ints": torch.arange(3),
        "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base),
        "nested": [{"bool": torch.tensor([True, False])}],
        "step": 3,
    }
    torch.save(saved, tmp_path / "a.pt")
    read = torch_file.read_torch_file(tmp_path / "a.pt")
    assert read["step"] == 3 and read["nested"][0]["bool"].tolist() == [True, False]
    for name in ("slice", "transposed", "half", "bf16", "ints", "scalar", "empty", "parameter"):
        assert read[name].shape == tuple(saved[name].shape)
        np.testing.assert_array_equal(
            read[name].astype(np.float32), saved[name].detach().float().numpy()
        )


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil-was-here"),)


def calls(*calls: tuple[str, str]) -> bytes:
    """Returns a pickle that makes the given calls in order. A call is (name of the function,
    pickled arguments).

    A `?` in the arguments stands for the result of the previous call.
    """
    content = b""
    for function, arguments in calls:
        module, name = function.rsplit(".", 1)
        content = (
            b"c"
            + module.encode()
            + b"\n"
            + name.encode()
            + b"\n"
            + arguments.encode().replace(b"?", content)
            + b"R"
        )
    return b"}(S'model'\n}(S'x'\n" + content + b"uu."


REBUILD = "torch._utils._rebuild_tensor_v2"
# The pickle opcodes of the persistent id ('storage', FloatStorage, '0', 'cpu', 4). In a pickled
# tensor, they are followed by the offset, the shape and the strides.
STORAGE = "(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"


def write_tensor(path: Path, arguments: str, *more: tuple[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", calls((REBUILD, f"({STORAGE}{arguments}t"), *more))
        archive.writestr("a/data/0", np.arange(4, dtype=np.float32).tobytes())
    return path


def test_refuses_tensors_beyond_their_storage(tmp_path):
    """Covers sizes that are too large, that overflow or that are not integers, and a tensor in
    place of a storage.
    """
    good = write_tensor(tmp_path / "good.pt", "I1\n(I3\nt(I1\nt")
    assert torch_file.read_torch_file(good)["model"]["x"].tolist() == [1, 2, 3]
    for arguments in (
        "I2\n(I3\nt(I1\nt",
        "I-1\n(I1\nt(I1\nt",
        "I0\n(I2\nt(I4\nt",
        "I0\n(I2\nt(I-1\nt",
        "I0\n(I1000000000\nt(I0\nt",
        "I0\n(L9223372036854775807L\nt(L9223372036854775807L\nt",
        "I0\n(F3.0\nt(I1\nt",
        "I0\n(I2\nI2\nt(I1\nt",
        "I0\nI3\nI1\n",
    ):
        with pytest.raises(UserError, match=r"beyond its storage|invalid tensor arguments"):
            torch_file.read_torch_file(write_tensor(tmp_path / "bad.pt", arguments))
    nested = write_tensor(
        tmp_path / "nested.pt",
        "I0\n(I2000000\nI0\nt(I1\nI1\nt",
        (REBUILD, "(?I0\n(I2000000\nt(I1\ntt"),
    )
    with pytest.raises(UserError, match="invalid tensor arguments"):
        torch_file.read_torch_file(nested)


def write_shared_storage(path: Path, count: int = 1, numbers: int = 4, **zip_settings) -> Path:
    """Writes `count` tensors that all share one storage of `numbers` zeros."""
    storage = STORAGE.replace("I4", f"I{numbers}")
    items = (
        f"S'{i}'\nctorch._utils\n_rebuild_tensor_v2\n({storage}I0\n(I{numbers}\nt(I1\nttR"
        for i in range(count)
    )
    with zipfile.ZipFile(path, "w", **zip_settings) as archive:
        archive.writestr("a/data.pkl", b"}(" + "".join(items).encode() + b"u.")
        archive.writestr("a/data/0", bytes(4 * numbers))
    return path


def write_false_size(path: Path) -> Path:
    """Writes a file with a storage of four numbers. Its pickle and its zip directory claim 2²⁶
    numbers.
    """
    with zipfile.ZipFile(write_shared_storage(path)) as archive:
        program = archive.read("a/data.pkl").replace(b"I4\n", b"I%d\n" % 2**26)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/data/0", bytes(16))
        member = archive.getinfo("a/data/0")
        member.file_size = member.compress_size = 2**28
    return path


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda p: write_shared_storage(p, numbers=2**24, compression=zipfile.ZIP_DEFLATED),
            "is compressed",
        ),
        (
            lambda p: write_shared_storage(p, count=1000, numbers=2**14),
            "more than 8 times as large as the file",
        ),
        (
            lambda p: write_pickle(p, b"Nr\xff\xff\xff\x00)0."),
            "opcode POP, which no checkpoint needs",
        ),
        (
            lambda p: write_pickle(p, b"\x8e" + (2**28).to_bytes(8, "little") + b"."),
            "expected 268435456 bytes",
        ),
        (lambda p: write_pickle(p, b"]" * 2**22 + b"."), "larger than 4,194,304 bytes"),
        (write_false_size, "data/0 is larger than the file"),
    ],
)
def test_memory_is_bounded_by_the_file_size(make, message, tmp_path):
    path = make(tmp_path / "a.pt")
    assert path.stat().st_size < 5_000_000
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message):
            torch_file.read_torch_file(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size + 1_000_000
    finally:
        tracemalloc.stop()


def write_pickle(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)
    return path


# A tuple that contains another tuple twice, and so on, forty levels deep. Hashing it takes 2⁴⁰
# steps.
NESTED = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(40))
PAIRS = b"](" + b"".join(b"(I%d\nNt" % i for i in range(1000)) + b"e"  # a list of a thousand pairs
ENTRIES = b"}(" + b"".join(b"I%d\nN" % i for i in range(1000)) + b"u"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"}" + NESTED + b"Ns.", "a key of a dictionary is not a name"),
        (b"}(" + NESTED + b"Nu.", "a key of a dictionary is not a name"),
        (
            b"ccollections\nOrderedDict\n](" + NESTED + b"N\x86e\x85R.",
            "unexpected arguments of collections.OrderedDict",
        ),
        (b"cmodels\nGPTConfig\n)\x81](" + NESTED + b"N\x86eb}N\x86.", None),
        (b"\x8f(" + NESTED + b"\x90.", "opcode EMPTY_SET"),
        (b"(" + NESTED + b"\x91.", "opcode FROZENSET"),
        (
            PAIRS + b"q\x000" + b"ccollections\nOrderedDict\nh\x00\x85R0" * 5000 + b"N.",
            "opcode POP",
        ),
        (
            PAIRS + b"q\x00(" + b"ccollections\nOrderedDict\nh\x00\x85R" * 5000 + b"t.",
            "unexpected arguments",
        ),
        (ENTRIES + b"q\x00cmodels\nGPTConfig\n)\x81" + b"h\x00b" * 200_000 + b"\x86.", None),
        (
            b"("
            + b"NN" * 10_000
            + b"tq\x00("
            + b"ctorch._utils\n_rebuild_tensor_v2\nh\x00R" * 9000
            + b"t.",
            "invalid tensor arguments",
        ),
        (
            b"}\x8b" + (2**18).to_bytes(4, "little") + b"\x01" * 2**18 + b"Ns.",
            "does not fit into 64 bits",
        ),
        (
            b"}X" + (2**18).to_bytes(4, "little") + b"a" * 2**18 + b"Ns.",
            "a key of a dictionary is not a name",
        ),
        (b"]" * 2**21 + b".", "more than 524,288 opcodes"),
        (b"t.", "IndexError"),
        (b"(N\x86.", "values that it has not made"),
        (b"N(N\x86.", "values that it has not made"),
        (b"Ne.", "IndexError"),
        (b"h\x05.", "KeyError"),
        (b".", "IndexError"),
        (b"Na.", "IndexError"),
        (b"NNs.", "IndexError"),
        (b"](NNe}b.", None),
        (b"N)R.", "calls what is not a function"),
        (b"ccollections\nOrderedDict\n]R.", "calls what is not a function"),
        (b"NQ.", "TypeError"),
        (
            b"cos\n" + b"x" * 10**6 + b"\n.",
            "refused: its pickle names os.x{97}, which no checkpoint needs",
        ),
    ],
)
def test_work_is_bounded(content, message, tmp_path):
    """With some of these pickles, Python's unpickler works for hours, and no signal interrupts
    it.
    """
    path = write_pickle(tmp_path / "a.pt", content)
    started = time.process_time()
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        torch_file.read_torch_file(path, records=("models.GPTConfig",))
    assert time.process_time() - started < 10


def write_tensor_beyond_its_storage(path: Path) -> Path:
    """Writes a file with a storage of four numbers. Its pickle claims that the storage contains a
    million numbers.
    """
    torch.save({"model": {"x": torch.arange(4.0)}}, path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    root = next(name for name in files if name.endswith("data.pkl"))
    files[root] = files[root].replace(b"K\x04\x85", b"J\x40\x42\x0f\x00\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda p, data: p.write_bytes((data / "gpt.pt").read_bytes()[:500_000]) and p,
            "truncated",
        ),
        (lambda p, data: p.write_text("hello") and p, "not written by torch.save"),
        (lambda p, data: p, "No such file"),
        (
            lambda p, data: write_pickle(p, pickle.dumps(Evil())),
            r"names pathlib\.Path\.touch|names builtins",
        ),
        (
            lambda p, data: write_pickle(p, b"cos\nsystem\n(S'touch evil-was-here'\ntR."),
            "names os.system",
        ),
        (lambda p, data: write_pickle(p, pickle.dumps({"model": {3: np.zeros(3)}})), "names numpy"),
        (lambda p, data: write_pickle(p, b"garbage"), "damaged, or not a checkpoint"),
        (lambda p, data: write_pickle(p, pickle.dumps({"model": 3})), "no 'model' entry"),
        (
            lambda p, data: write_pickle(p, pickle.dumps({"model": {"x": 3}})),
            "dictionary of named tensors",
        ),
        (lambda p, data: write_tensor_beyond_its_storage(p), "beyond its storage"),
        (lambda p, data: torch.save({"model": {"x": torch.zeros(3)}}, p) or p, "no n_head"),
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
    evil = Path("evil-was-here")
    path = make(tmp_path / "a.pt", shared_data / "gpt_variations")
    with pytest.raises(UserError, match=message) as error:
        gpt_variations.read_checkpoint(path)
    assert str(tmp_path / "a.pt") in str(error.value) and not evil.exists()
