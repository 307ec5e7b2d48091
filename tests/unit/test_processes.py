"""Tests of multi-process runs in one process, with fakes of the other processes.

The tests cover flags, equal configs in all processes, failures, and the rows of the batch that a
process reads.
"""

import numpy as np
import pytest
from conftest import call, load_config
from jax.experimental import multihost_utils

from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.training.trainer import train


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


def test_refuses_processes_with_different_configs(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(distributed, "is_single_process", lambda: False)
    monkeypatch.setattr(
        multihost_utils,
        "process_allgather",
        lambda digest: np.stack([digest, digest, digest ^ (np.arange(8) == 3)]),
    )
    with pytest.raises(UserError, match="process 2: config differs from process 0's"):
        train(load_config("gpt", data__source=str(text_file)), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_all_processes_raise_if_the_primary_one_fails(monkeypatch):
    def fail():
        raise UserError("it cannot be done")

    sent = []
    monkeypatch.setattr(
        distributed, "broadcast_from_primary", lambda numbers: sent.append(numbers) or numbers
    )
    with pytest.raises(UserError, match="it cannot be done"):
        distributed.run_on_primary(fail)
    assert sent == [(True,)]
    monkeypatch.setattr(distributed, "is_primary", lambda: False)
    distributed.run_on_primary(
        fail
    )  # does not raise, because only the primary process calls `fail`
    monkeypatch.setattr(distributed, "broadcast_from_primary", lambda numbers: (1,))
    with pytest.raises(UserError, match="process 0 has failed; see its message"):
        distributed.run_on_primary(fail)


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
