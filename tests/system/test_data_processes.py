"""Tests of data in subprocesses: a preparation that is killed, and batches that two processes
read.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, XLA_FLAGS, call, load_config
from data_helpers import files_of, write_jsonl

from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline

pytestmark = pytest.mark.slow

# Runs a changed `prepare`. It writes its journal after every batch and hangs in the eleventh batch.
HANGING_PREPARE = """
import runpy, threading
from smallgpt_jax.data import encoding, parts, unfinished_store
parts.BATCH_CHARACTERS, unfinished_store.JOURNAL_SECONDS = 2000, 0
def encode(texts, tokenizer, calls=iter(range(10)), encode=encoding.encode):
    if next(calls, None) is None:
        threading.Event().wait()
    return encode(texts, tokenizer)
encoding.encode = encode
runpy.run_module("smallgpt_jax.prepare", run_name="__main__")
"""


def test_killed_preparation_is_resumed(tmp_path):
    texts = write_jsonl(
        tmp_path / "corpus.jsonl", [f"document {i} " + "text " * (i * 37 % 500) for i in range(300)]
    )
    flags = [
        "--config=configs/gpt.py:tiny",
        f"--config.data.source={texts}",
        "--config.data.tokenizer=sentencepiece:400",
        "--workers=1",
        f"--config.data.store={tmp_path / 'store'}",
    ]
    journal = tmp_path / "store.partial" / "journal.json"
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING_PREPARE, *flags], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 100
    while not (journal.exists() and json.loads(journal.read_text())["place"] != [0, 0]):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "store").exists()
    resumed = call("prepare", *flags)
    assert resumed.returncode == 0 and f"resuming {tmp_path / 'store.partial'}" in resumed.stdout
    store = files_of(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "resumed")
    assert call("prepare", *flags).returncode == 0
    assert files_of(tmp_path / "store") == store


BATCH_HASHES = """
import hashlib, json, sys
from jax.experimental import multihost_utils
from ml_collections import ConfigDict
from smallgpt_jax.devices import distributed
from smallgpt_jax.data import batches
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline
config, coordinator, process, first, last = json.loads(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
distributed.initialize(coordinator, 2, process, 60)
config = ConfigDict(config)
pipeline = open_pipeline(config, build_program(config))
for step, batch in zip(range(first, last), batches.read_ahead(pipeline.train_batches, first, 2)):
    arrays = [multihost_utils.process_allgather(x, tiled=True) for x in pipeline.to_devices(batch) if x is not None]
    print(hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest(), flush=True)
"""


def test_global_batches_do_not_depend_on_processes(text_file):
    """Two processes, with two devices each, read the same batches as one process with eight
    devices.

    The test compares batches in the middle of a run.
    """
    first, last = 23, 31
    config = load_config(
        "gpt",
        data__source=str(text_file),
        data__packing="best_fit",
        data__separate_documents=True,
        model__num_layers=1,
    )
    pipeline = open_pipeline(config, build_program(config))
    expected = []
    for step in range(first, last):
        batch = pipeline.to_devices(pipeline.train_batches[step])
        expected.append(
            hashlib.sha256(
                b"".join(np.asarray(x).tobytes() for x in batch if x is not None)
            ).hexdigest()
        )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
        "XLA_FLAGS": XLA_FLAGS.format(devices=2),
    }
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                BATCH_HASHES,
                config.to_json_best_effort(),
                coordinator,
                *map(str, (i, first, last)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0].split()[-len(expected) :] == expected
