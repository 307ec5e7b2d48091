"""Settings for all tests (eight CPU devices, one cache folder per session), shared fixtures, and
helper functions.
"""

import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling the programs of the tests takes far longer than running them, so they are compiled
# without optimization.
OWN_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_force_host_platform_device_count={devices}",
]
if version("jaxlib").startswith("0.10."):  # later versions reject the first of these flags
    # Compilation is four times as fast. Generating code in one thread, since all cores run tests,
    # saves another fifth.
    OWN_FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
OWN_NAMES = {
    flag.partition("=")[0] for flag in OWN_FLAGS
}  # pytest-xdist's workers inherit these flags
CALLERS_FLAGS = [
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if flag.partition("=")[0] not in OWN_NAMES
]
XLA_FLAGS = " ".join(CALLERS_FLAGS + OWN_FLAGS)
os.environ["XLA_FLAGS"] = XLA_FLAGS.format(devices=8)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Other threads of PyTorch and NumPy would take the cores from the other workers, and spin while
# they wait for them.
os.environ["OMP_NUM_THREADS"] = "1"
# Without this, `host_memory.configure` would keep freed memory, which is too much in hundreds of
# tests.
os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"  # glibc's default
# Programs that compile sooner are rarely used again, and storing them takes longer than compiling
# them.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = (
    "false"  # turns off requests that the emulator does not support
)

import atexit
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import io
import json
import math
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

# transformers copies the code of exported models into the folder HF_MODULES_CACHE and imports the
# code from there. Each process has its own folder.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="exported-code-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import app, flags
from data_helpers import prepare_store
from matplotlib.figure import Figure

from smallgpt_jax import models
from smallgpt_jax.data import store
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.devices import compilation_cache
from smallgpt_jax.run import plotting
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.workdir import initialize_workdir
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training import messages, trainer
from smallgpt_jax.training.build import RECENT_PROGRAMS

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(
    50_000, 20, 50
)  # as in commands (smallgpt_jax/cli.py): a third of the time of tracing otherwise
gc.freeze()  # the objects of imported modules are never garbage

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
ARCHITECTURES = sorted(
    models.ARCHITECTURES
)  # tests that use this list cover every registered architecture


def pytest_collection_finish():
    gc.freeze()  # nor are those that the test modules have imported


def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores, because several tests wait for other processes."""
    return (os.cpu_count() or 1) + 2


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """Returns a folder shared by all pytest-xdist workers, empty at the start of the session."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def cache_folder(shared_folder):
    """Sets the cache folder of token stores and compiled programs, shared by all workers and their
    subprocesses.
    """
    folder = shared_folder / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(compilation_cache.folder()))
    return folder


@pytest.fixture(autouse=True)
def no_steps_from_other_code(request):
    """Runs of several tests share compiled steps, except where a test replaces a part of the
    code.
    """
    if "monkeypatch" not in request.fixturenames:
        yield
        return
    RECENT_PROGRAMS.programs.clear()
    yield
    RECENT_PROGRAMS.programs.clear()


@functools.cache
def empty_image(format: str) -> bytes:
    file = io.BytesIO()
    Figure(figsize=(1, 1)).savefig(file, format=format)
    return file.getvalue()


# In the test process, one device writes each small array. Otherwise, each device would write a
# part, and compiling the slices of all shapes takes a second in tiny runs on eight devices.
ocp.type_handlers.get_type_handler(jax.Array)._min_slice_bytes_for_replica_parallel = 2**20

# Figures are made, but drawn only in tests marked `draws`, because drawing takes half the time of a
# report.
RENDER = plotting.render
plotting.render = lambda figure, format, **options: empty_image(format)


@pytest.fixture(autouse=True)
def drawing(request):
    without = plotting.render
    if request.node.get_closest_marker("draws"):
        plotting.render = RENDER
    yield
    plotting.render = without


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the reference data in {SHARED_DATA}, which only developers have")
    return SHARED_DATA


@pytest.fixture(scope="session")
def emulated_storage():
    """Starts an emulator of Google Cloud Storage, which this process and its subprocesses use from
    then on.

    Returns the path of its only bucket.
    """
    for library in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(library, reason=f"needs {library}")
    emulator = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "gcs_emulator.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    url = f"http://localhost:{int(emulator.stdout.readline())}"
    os.environ.update(STORAGE_EMULATOR_HOST=url, TENSORSTORE_GCS_HTTP_URL=url)
    object_storage.file_system()  # configures gcsfs
    yield object_storage.to_epath("bucket")
    emulator.communicate()


@pytest.fixture
def bucket(emulated_storage, tmp_path) -> Path:
    """Returns a new path in an emulated bucket."""
    return emulated_storage / tmp_path.parent.name / tmp_path.name


def load_config(architecture: str, size: str = "tiny", **fields):
    """Returns a shipped config with some fields overridden: model__num_layers=2 sets
    model.num_layers.
    """
    config = importlib.import_module(f"configs.{architecture}").get_config(size)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return config


def build(name: str, **fields) -> models.LanguageModel:
    """Returns the model of a shipped tiny config, with some fields of its `model` group
    overridden.
    """
    config = load_config(name)
    config.model.update(fields)
    return models.build(**config.model)


def init(model, seed: int = 0):
    """Returns random parameters with nonzero biases and with norm scales other than 1.

    The parameters are about as large as initial ones. NumPy draws them, since compiling
    `model.init` takes seconds.
    """
    rng = np.random.default_rng(seed)

    def draw(p):
        centers = {
            "scale": 1.0,
            "path_logits": 0.5,
            "residual_scales": 1.0,
            "input_mix": 0.7,
            "strength": 0.8,
        }
        center = centers.get(p.name, 0.0)
        return jax.device_put(np.float32(center + 0.06 * rng.standard_normal(p.shape)))

    return jax.tree.map(draw, models.abstract_params(model))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BxT, model_state=None):
    """Returns the model's logits, (B, T, V). Jitted for speed."""
    return model.apply({"params": params, "state": model_state or {}}, tokens_BxT)


@functools.cache
def spaced_tokenizer(remove_extra_whitespaces: bool):
    """Returns a SentencePiece tokenizer that adds a space before each text (add_dummy_prefix, the
    default).
    """
    import sentencepiece

    from smallgpt_jax.data.tokenizers import SentencePiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["the model is trained on text", "a cat sat on the text of models"] * 20
        ),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        model_type="bpe",
        minloglevel=2,
        add_dummy_prefix=True,
        remove_extra_whitespaces=remove_extra_whitespaces,
    )
    return SentencePiece(model.getvalue())


def spaced_model(tokenizer, **fields):
    """Returns a gpt with one layer, and parameters with which it prefers tokens that begin with a
    space.
    """
    model = build("gpt", num_layers=1, **fields)
    params, first = init(model), tokenizer.encode(["a"])[0].tolist()
    has_space_V = [
        i < tokenizer.vocab_size and tokenizer.decode([*first, i]).startswith("a ")
        for i in range(model.config.vocab_size)
    ]
    return model, {
        **params,
        "head": params["head"] * np.where(has_space_V, 1.0, 0.01)[:, None].astype(np.float32),
    }


@pytest.fixture(scope="session")
def text_file(shared_folder) -> Path:
    """Returns the path of a text of forty thousand words with learnable patterns, shared by all
    workers.
    """
    words = (
        "the cat sat on a mat while some dog ran to its warm house and slept there till it was dark"
    ).split()
    lines = []
    for i in range(4000):
        lines.append(" ".join(words[(i * j + j) % len(words)] for j in range(1, 11)) + ".")
        if i % 7 == 0:
            lines.append("")
    path = shared_folder / "words.txt"
    with file_lock(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def token_store(text_file, tmp_path_factory) -> store.TokenStore:
    folder = tmp_path_factory.mktemp("store") / "words"
    return prepare_store(folder, text_file)


@pytest.fixture(scope="session")
def trained_run(text_file, shared_folder):
    """Returns a function (architecture, **fields) → the workdir of a tiny run on `text_file`.

    Each run is trained once per session and shared by all workers. Tests may read or copy it, but
    not change it.
    """

    def get(architecture: str = "gpt", **fields) -> Path:
        config = load_config(architecture, **{"data__source": str(text_file), **fields})
        name = hashlib.sha256(
            json.dumps([architecture, fields], sort_keys=True).encode()
        ).hexdigest()[:16]
        workdir = shared_folder / "runs" / name
        workdir.parent.mkdir(exist_ok=True)
        with file_lock(workdir.with_suffix(".lock"), wait=True):
            if not workdir.with_suffix(".done").exists():
                with contextlib.redirect_stdout(io.StringIO()):
                    trainer.train_and_evaluate(config, str(workdir))
                workdir.with_suffix(".done").touch()
        return workdir

    return get


@pytest.fixture
def copy_of(trained_run, tmp_path):
    """Returns a function (architecture, **fields) → tmp_path/run, a copy of a `trained_run` that
    tests may change.
    """
    return lambda *arguments, **fields: shutil.copytree(
        trained_run(*arguments, **fields), tmp_path / "run"
    )


def save_run(folder: Path, config, params, ema=(), opt_state=None) -> Path:
    """Writes the workdir of a finished run with the given parameters and validation loss 4.125.
    Returns `folder`. Without `opt_state`, the run cannot be resumed.
    """
    corpus, steps = load_or_prepare(config.data), config.train.steps
    folder.mkdir(parents=True)
    initialize_workdir(folder, config, corpus)
    (folder / METRICS_FILE).write_text(
        json.dumps(
            {
                "step": steps,
                "split": "eval",
                "loss": 4.125,
                "bits_per_byte": 4.125 / math.log(2),
                "targets": 64,
            }
        )
        + "\n"
    )
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, keep=1)
    checkpoints.save(
        steps,
        TrainState(
            jax.numpy.int32(steps), params, opt_state or {"count": jax.numpy.int32(steps)}, ema=ema
        ),
    )
    checkpoints.close()
    return folder


app.define_help_flags()
ABSL_FLAGS = copy.deepcopy(flags.FLAGS.__dict__)  # absl's own flags, without those of any command


def call(
    command: str, *arguments, cwd: Path = ROOT, input: str = ""
) -> subprocess.CompletedProcess:
    """Runs `python -m smallgpt_jax.COMMAND …` in this process, on its eight devices.

    This is seconds faster than `run`, which starts a process. `main` prints no sample of the trained
    model, which would take seconds, too.
    """
    before, argv, folder, stdin = dict(flags.FLAGS.__dict__), sys.argv, Path.cwd(), sys.stdin
    flags.FLAGS.__dict__.update(copy.deepcopy(ABSL_FLAGS))
    out, err, status = io.StringIO(), io.StringIO(), 0
    try:
        os.chdir(cwd)
        sys.argv, sys.stdin = [command, *map(str, arguments)], io.StringIO(input)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(messages, "_print_sample", lambda folder: None),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
            runpy.run_module(f"smallgpt_jax.{command}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except Exception:  # the command would print a traceback and exit with status 1
        status = 1
        err.write(traceback.format_exc())
    finally:
        os.chdir(folder)
        sys.argv, sys.stdin = argv, stdin
        flags.FLAGS.__dict__.update(before)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def run(
    *command, devices: int = 1, cwd: Path = ROOT, input: str | None = None, **environment
) -> subprocess.CompletedProcess:
    """Runs `python -m smallgpt_jax.COMMAND …` in a subprocess, on `devices` CPU devices."""
    return subprocess.run(
        [sys.executable, "-m", f"smallgpt_jax.{command[0]}", *map(str, command[1:])],
        cwd=cwd,
        env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=devices), **environment},
        capture_output=True,
        text=True,
        input=input,
        timeout=600,
    )
