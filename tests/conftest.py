"""Where and how all tests run: on the CPU, as eight devices, with a cache folder of their own."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here are compiled far longer than they run, so they are compiled without optimisation.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
os.environ["XLA_FLAGS"] = XLA_FLAGS.format(devices=8)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# All programs are kept, however small: the same few are compiled by many tests.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import atexit
import functools
import importlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Where transformers puts the code of exported models, and imports it from: one place a process.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="exported-code-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

import jax
import numpy as np
import pytest

from smallgpt_jax import models
from smallgpt_jax.data import prepare, store

jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
ARCHITECTURES = sorted(models.ARCHITECTURES)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """Stores and compiled programs, shared by workers and the commands that they start, kept for the session."""
    workers = tmp_path_factory.getbasetemp()
    folder = (workers.parent if "PYTEST_XDIST_WORKER" in os.environ else workers) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "smallgpt_jax" / "compiled"))
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the reference data in {SHARED_DATA}, which only developers have")
    return SHARED_DATA


def load_config(architecture: str, size: str = "tiny", **fields):
    """A shipped config; `fields` are overrides, with __ for the dot: model__num_layers=2."""
    config = importlib.import_module(f"configs.{architecture}").get_config(size)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return config


def build(name: str, **fields) -> models.LanguageModel:
    """The model of a shipped tiny config, with these fields of its `model` group changed."""
    config = load_config(name)
    config.model.update(fields)
    return models.build(**config.model)


def init(model, seed: int = 0):
    """Initial parameters of a model, moved a little at random so that no bias or scale is trivial."""
    from flax import linen as nn

    tokens = jax.numpy.zeros((1, model.config.context_length), int)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(seed), tokens))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.device_put(x + 0.05 * rng.standard_normal(x.shape, np.float32)),
                        jax.device_get(params))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BxT):
    """The model's own forward pass, (B, T, V), compiled whole: operation by operation takes longer."""
    return model.apply({"params": params}, tokens_BxT)


@functools.cache
def spaced_tokenizer(remove_extra_whitespaces: bool):
    """A SentencePiece model as others train them: with a space in front of each text (add_dummy_prefix)."""
    import sentencepiece

    from smallgpt_jax.data.tokenizers import SentencePiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the model is trained on text", "a cat sat on the text of models"] * 20),
        model_writer=model, vocab_size=60, hard_vocab_limit=False, model_type="bpe", minloglevel=2,
        add_dummy_prefix=True, remove_extra_whitespaces=remove_extra_whitespaces)
    return SentencePiece(model.getvalue())


def spaced_model(tokenizer, **fields):
    """A gpt of one layer and its weights, which prefer tokens that begin with a space."""
    model = build("gpt", num_layers=1, **fields)
    params, first = init(model), tokenizer.encode(["a"])[0].tolist()
    has_space_V = [i < tokenizer.vocab_size and tokenizer.decode([*first, i]).startswith("a ")
                   for i in range(model.config.vocab_size)]
    return model, {**params, "head": params["head"] * np.where(has_space_V, 1.0, 0.01)[:, None].astype(np.float32)}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Forty thousand words that a model can learn something about."""
    words = ("the cat sat on a mat while some dog ran to its warm house and slept there "
             "till it was dark").split()
    lines = []
    for i in range(4000):
        lines.append(" ".join(words[(i * j + j) % len(words)] for j in range(1, 11)) + ".")
        if i % 7 == 0:
            lines.append("")
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def token_store(text_file, tmp_path_factory) -> store.TokenStore:
    folder = tmp_path_factory.mktemp("store") / "words"
    return prepare.prepare_store(
        folder, source=str(text_file), tokenizer="bytes", validation_fraction=0.2,
        text_field="text", invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None)


def run(*command, devices: int = 1, cwd: Path = ROOT, input: str | None = None,
        **environment) -> subprocess.CompletedProcess:
    """`python -m smallgpt_jax.COMMAND …` as a user starts it, on `devices` CPU devices."""
    return subprocess.run(
        [sys.executable, "-m", f"smallgpt_jax.{command[0]}", *map(str, command[1:])],
        cwd=cwd, env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=devices), **environment},
        capture_output=True, text=True, input=input, timeout=600)
