"""Tests of multi-process runs in one process, with fakes of the other processes.

The tests cover flags, equal configs in all processes, failures, and the rows of the batch that a
process reads.
"""

import shutil
import socket
import sys

import numpy as np
import pytest
from conftest import ROOT, call
from process_helpers import run_processes  # noqa: F401

from smallgpt_jax.devices import agreement, distributed, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import provenance, workdir
from smallgpt_jax.training import checks


@pytest.mark.parametrize(
    "flags, substrings",
    [
        (
            ["--coordinator=127.0.0.1:9"],
            [
                "--num_processes and",
                "--process_id: missing",
                "needs --coordinator, --num_processes and --process_id",
            ],
        ),
        (
            ["--num_processes=2", "--process_id=2", "--coordinator=127.0.0.1:9"],
            ["--process_id=2", "expected 0 to 1"],
        ),
        (
            ["--num_processes=2", "--process_id=1", "--coordinator=here"],
            ["--coordinator=here", "HOST:PORT"],
        ),
    ],
)
def test_refuses_invalid_flags(tmp_path, flags, substrings):
    result = call("main", "--config=configs/gpt.py:tiny", f"--workdir={tmp_path / 'run'}", *flags)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(s in result.stderr for s in substrings), result.stderr
    assert not (tmp_path / "run").exists()


def test_processes_with_different_values_are_refused(run_processes):  # noqa: F811
    """All of them raise the same error. Short values are in the message."""

    def start(number):
        distributed.require_equal("--workdir", "runs/a")
        distributed.require_equal("the number of its devices", "8" if number < 2 else "4")

    def start_with_configs(number):
        distributed.require_equal("config", "a long text " * 30 + str(number == 1))

    for error in run_processes(start):
        assert isinstance(error, UserError)
        assert str(error) == (
            "process 2: the number of its devices differs from process 0's (4; there 8); use the "
            "same in all processes"
        )
    for error in run_processes(start_with_configs):
        assert str(error) == (
            "process 1: config differs from process 0's; use the same in all processes"
        )


def test_processes_with_different_code_are_refused(run_processes, monkeypatch, tmp_path):  # noqa: F811
    digests = {"0": "a" * 64, "1": "b" * 64, "2": "a" * 64}
    monkeypatch.setattr(
        checks, "source_digest", lambda: digests[str(agreement.distributed.global_state.process_id)]
    )
    errors = run_processes(lambda number: checks.check_processes(tmp_path / "run"))
    assert {str(error)[:58] for error in errors} == {
        "process 1: the source code of smallgpt_jax differs from pr"
    }


def test_the_digest_of_the_code_depends_on_every_file(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "smallgpt_jax" / "ops", tmp_path / "smallgpt_jax" / "ops")
    monkeypatch.setattr(provenance, "CLONE", tmp_path)
    digests = [provenance.source_digest() for _ in range(2)]
    path = tmp_path / "smallgpt_jax" / "ops" / "matmul.py"
    path.write_text(path.read_text() + "\n")
    digests.append(provenance.source_digest())
    path.rename(path.with_name("product.py"))
    digests.append(provenance.source_digest())
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_workdir_that_is_not_shared_is_refused(run_processes, monkeypatch, tmp_path):  # noqa: F811
    """Process 1 has a folder of its own, with the lock of an earlier run."""
    monkeypatch.setattr(workdir, "VISIBLE_SECONDS", 0.1)
    for name in ("shared", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text(f"process 1 of {name}\n")

    def start(number):
        workdir.require_shared(tmp_path / ("other" if number == 1 else "shared"))

    errors = run_processes(start)
    assert all("process 1 does not see the files of process 0" in str(error) for error in errors)
    assert run_processes(lambda _: workdir.require_shared(tmp_path / "shared")) == [None] * 3


def test_all_processes_raise_if_the_primary_one_fails(run_processes):  # noqa: F811
    def fail():
        raise UserError("it cannot be done")

    first, *others = run_processes(lambda _: distributed.run_on_primary(fail))
    assert str(first) == "it cannot be done"
    assert {str(error) for error in others} == {"process 0 has failed; see its message"}
    found = run_processes(lambda _: distributed.run_on_primary(lambda: 7))
    assert found == [7, None, None]


def test_a_coordinator_whose_port_is_taken(tmp_path):
    """JAX would end with a segmentation fault."""
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        result = run_main(tmp_path, f"--coordinator={coordinator}", "--process_id=0")
    assert result.stderr == (
        f"error: --coordinator={coordinator}: the port cannot be used (Address already in use); "
        "choose another\n"
    )
    result = run_main(tmp_path, "--coordinator=127.0.0.1:99999", "--process_id=0")
    assert "--coordinator=127.0.0.1:99999: the port cannot be used" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract addresses")
def test_two_processes_with_one_id(tmp_path):
    """JAX would abort all processes of the run."""
    coordinator = "127.0.0.1:9"
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0smallgpt_jax {coordinator} 1")
        result = run_main(tmp_path, f"--coordinator={coordinator}", "--process_id=1")
    assert result.stderr == (
        f"error: --process_id=1: another process with --coordinator={coordinator} has this id; "
        "give each process its own, or another coordinator to each run\n"
    )


def run_main(folder, *flags):
    result = call(
        "main",
        "--config=configs/gpt.py:tiny",
        f"--workdir={folder / 'run'}",
        "--num_processes=2",
        *flags,
    )
    assert result.returncode == 1 and not (folder / "run").exists()
    return result


@pytest.mark.parametrize("lengths", [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(tensor=8)])
def test_a_global_batch_has_the_rows_of_the_host_batch(lengths):
    mesh = sharding.make_mesh(sharding.MeshConfig(**{"data": 1, **lengths}))
    batch = np.random.default_rng(0).integers(0, 100, (16, 5))
    rows = sharding.local_rows(mesh, 16)
    np.testing.assert_array_equal(rows, np.arange(16))
    array = sharding.global_batch(mesh, rows, 16, batch[rows])
    np.testing.assert_array_equal(array, batch)
    assert array.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)


def test_local_rows_need_not_be_contiguous(monkeypatch):
    """The devices of a process can be scattered over the mesh, as on TPU slices. Here, they are
    devices 0, 3 and 6.
    """
    mesh = sharding.make_mesh(sharding.MeshConfig(data=4, fsdp=1, tensor=2, path=1))
    whole = sharding.batch_sharding(mesh).devices_indices_map((8,))
    local = {device: index for device, index in whole.items() if device.id in (0, 3, 6)}

    class Sharding:
        def addressable_devices_indices_map(self, shape):
            return local

    monkeypatch.setattr(sharding, "batch_sharding", lambda mesh: Sharding())
    np.testing.assert_array_equal(sharding.local_rows(mesh, 8), [0, 1, 2, 3, 6, 7])
