"""Tests of the source `python_packages`: the same text everywhere, or a message that says what to
install.
"""

import base64
import hashlib
import re
from pathlib import Path

import pytest
from conftest import ROOT, load_config
from data_helpers import prepare_store, read

from smallgpt_jax.data import python_packages
from smallgpt_jax.data.corpus import open_existing
from smallgpt_jax.data.source import Source
from smallgpt_jax.errors import UserError

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# {name, version: {file: content}}
DISTRIBUTIONS = {
    ("alpha-lib", "1.2"): {
        "alpha/core.py": "alpha = 1\n",
        "alpha/empty.py": "",
        "alpha/data.json": "{}",
        "alpha/tests/test_core.py": "assert alpha\n",
        "../bin/alpha.py": "script\n",
        "alpha/ünï.py": "text = 'ü'\n",
    },
    ("Beta", "0.1.post1"): {
        "beta/core.py": "beta = 2\n",
        "beta/copy.py": "alpha = 1\n",
    },  # a copy of alpha/core.py
    ("speedups", "3.0"): {
        "speedups/core.py": "version = 'cp311'\n"
    },  # its wheel is for one platform
    ("chardet", "6.0"): {"chardet/tables.py": "table = [1, 2, 3]\n"},
}
CONSTRAINTS = "# comment\n" + "".join(f"{name}=={version}\n" for name, version in DISTRIBUTIONS)


def install(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Writes what pip writes. Returns the .dist-info folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    wheel = (
        WHEEL.replace("py3-none-any", "cp311-cp311-linux_x86_64") if name == "speedups" else WHEEL
    )
    files = {
        **files,
        f"{info.name}/WHEEL": wheel,
        f"{info.name}/METADATA": f"Name: {name}\nVersion: {version}\n",
    }
    record = []
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")
        )
        record.append(f"{path},sha256={digest},{len(content.encode())}\n")
    (info / "RECORD").write_text("".join(record) + f"{info.name}/RECORD,,\n")
    return info


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """Returns a folder of installed distributions, which come first on the path, with a manifest of
    these alone.
    """
    folder = tmp_path / "lib" / "site-packages"
    for (name, version), files in DISTRIBUTIONS.items():
        install(folder, name, version, files)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(python_packages, "MANIFEST", tmp_path / "manifest.txt")
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS)
    python_packages.write_manifest(tmp_path / "constraints.txt")
    return folder


def test_reads_the_python_files_of_pure_distributions(site, tmp_path):
    """No tests, scripts, tables, platform-dependent distributions and empty files. Equal files are
    read once.
    """
    manifest = (tmp_path / "manifest.txt").read_text()
    assert [line.split()[:3] for line in manifest.splitlines()] == [
        ["alpha-lib==1.2", "3", "22"],
        ["Beta==0.1.post1", "2", "19"],
    ]
    found = read("python_packages")
    assert sorted(found) == ["alpha = 1\n", "beta = 2\n", "text = 'ü'\n"]
    assert found == sorted(
        found, key=lambda text: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    )
    source = Source("python_packages")
    assert source.is_local and source.num_bytes == sum(len(text.encode()) for text in found)
    assert (
        source.fingerprint
        == Source("python_packages").fingerprint
        != Source("python_stdlib").fingerprint
    )


def test_a_store_does_not_depend_on_the_machine(site, tmp_path, monkeypatch):
    def tokens(folder: str) -> bytes:
        prepare_store(tmp_path / folder, "python_packages", validation_fraction=0.4)
        return b"".join(
            (tmp_path / folder / f"{split}.bin").read_bytes() for split in ("train", "validation")
        )

    here, elsewhere = tokens("here"), tmp_path / "elsewhere"
    site.rename(elsewhere)
    monkeypatch.syspath_prepend(elsewhere)
    assert tokens("there") == here


def test_refuses_other_distributions(site, tmp_path):
    """A finished store can still be opened."""
    prepare_store(tmp_path / "store", "python_packages", validation_fraction=0.4)
    refused = (
        "config.data.source='python_packages': {}; run pip install --force-reinstall --no-deps {}"
    )

    def assert_refused(why: str, advice: str) -> None:
        with pytest.raises(UserError, match=f"^{re.escape(refused.format(why, advice))}$"):
            read("python_packages")

    beta = site / "Beta-0.1.post1.dist-info"
    record = (beta / "RECORD").read_text()
    (beta / "RECORD").write_text(record.replace("beta/core.py", "beta/other.py"))
    assert_refused(
        "Beta==0.1.post1 is installed with other files than those of its wheel", "Beta==0.1.post1"
    )
    beta.rename(tmp_path / "gone")
    assert_refused("Beta==0.1.post1 is not installed", "Beta==0.1.post1")
    alpha = site / "alpha_lib-1.2.dist-info"
    (alpha / "METADATA").write_text("Name: alpha-lib\nVersion: 1.3\n")
    assert_refused(
        "alpha-lib 1.3 is installed, but the text has 1.2 (1 more of the 2 distributions differ)",
        "alpha-lib==1.2 Beta==0.1.post1",
    )
    assert open_existing(
        load_config(
            "gpt",
            data__source="python_packages",
            data__store=str(tmp_path / "store"),
            data__tokenizer="bytes",
            data__validation_fraction=0.4,
        ).data
    )


def test_many_differences_are_installed_from_the_constraints(site, tmp_path):
    missing = "".join(f"missing{number}==1.0 1 10 0\n" for number in range(9))
    (tmp_path / "manifest.txt").write_text(missing)
    with pytest.raises(
        UserError,
        match=r"missing0==1\.0 is not installed \(8 more .*; run pip install -c constraints",
    ):
        read("python_packages")


def test_refuses_changed_files(site):
    """RECORD still has the hash of the file that was installed."""
    (site / "beta" / "core.py").write_text("beta = 3\n")
    with pytest.raises(
        UserError, match=r"beta/core\.py: was changed after its installation; reinstall its distrib"
    ):
        read("python_packages")
    (site / "beta" / "core.py").unlink()
    with pytest.raises(
        UserError, match=r"beta/core\.py: No such file or directory; reinstall its distribution"
    ):
        read("python_packages")


def test_the_committed_manifest_is_that_of_the_constraints():
    """It has the fingerprints of this environment's distributions. After a change of
    constraints.txt: make corpus.
    """
    constraints = (ROOT / "constraints.txt").read_text()
    assert python_packages.make_manifest(constraints) == python_packages.MANIFEST.read_text()
    packages = python_packages.PythonPackages()
    assert (len(packages.files), packages.num_bytes) == (7767, 99_562_669)  # docs/data.md
    for file in packages.files[::100]:
        assert python_packages.record_hash(file.path.read_bytes()) == file.version
