"""Imports of damaged, hostile and mutated files: only UserErrors of one line, at once, and in little memory."""

import functools
import json
import shutil
import signal
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import build, call, init
from conversion_helpers import GPT2, export

from smallgpt_jax import inference, models, workdir
from smallgpt_jax.conversion import hugging_face
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError

library = pytest.importorskip("tokenizers")

SECONDS, MEGABYTES = 10, 64  # for each file
DEEP = "[" * 200_000 + "]" * 200_000
SMALL = dict(num_layers=1, d_model=16, context_length=8, vocab_size=300)
MODELS = {
    "gpt2": dict(GPT2),
    "llama": dict(position="rope", norm="rms", mlp="gated", activation="silu", num_heads=2, num_kv_heads=1),
    "smallgpt": dict(norm="rms", mlp="moe", num_experts=2, experts_per_token=2, attention_windows=(4,))}


@pytest.fixture
def bounded():
    """Returns a function that calls `read(path)` and returns the message of its UserError, or None.

    Fails if the call takes too long, needs too much memory, or raises another exception.
    """
    def expire(*_):
        raise TimeoutError

    def call(read, path) -> str | None:
        signal.alarm(SECONDS)
        tracemalloc.start()
        try:
            read(path)
            return None
        except UserError as error:
            message = str(error)
            assert message.count("\n") <= 1 and len(message) < 1000 + 2 * len(str(path)), message[:2000]
            return message
        finally:
            signal.alarm(0)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MEGABYTES * 2**20

    before = signal.signal(signal.SIGALRM, expire)
    yield call
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """Returns {name of the format: an export}. Tests must not change them."""
    folder = tmp_path_factory.mktemp("exports")
    made = {name: build("gpt", **SMALL | fields) for name, fields in MODELS.items()}
    return {name: export(folder / name, model, init(model), tokenizers.Bytes(),
                         {"trunk": {"blocks": {"mlp": {"router": {
                             "bias": np.zeros((1, 2), np.float32), "load": np.zeros((1, 2), np.float32)}}}}})
            for name, model in made.items()}


def read_folder(folder: Path):
    return hugging_face.read_folder(str(folder))


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ---------------------------------------------------------------------- Huge values, nesting, types

HUGE = [2**31 - 2, 10**12, 10**30, 10**400]


@pytest.mark.parametrize("name, fields", [
    ("gpt2", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"]),
    ("llama", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "head_dim"]),
    ("smallgpt", ["vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_model", "num_experts",
                  "mlp_ratio", "experts_per_token", "num_shared_experts"])])
def test_huge_sizes_are_compared_with_the_weights(name, fields, exports, tmp_path, bounded, monkeypatch):
    """They are refused before a model is built. The message names the field."""
    monkeypatch.setattr(models, "abstract_variables", None)
    for field in fields:
        for value in HUGE:
            folder = shutil.copytree(exports[name], tmp_path / "model")
            set_config(folder, **{field: value})
            assert f"{field}=" in (bounded(read_folder, folder) or "")
            shutil.rmtree(folder)


@pytest.mark.parametrize("name, field, value", [
    ("llama", "max_position_embeddings", 10**30), ("llama", "rms_norm_eps", 10**400),
    ("llama", "rope_parameters", {"rope_theta": 10**400}),
    ("smallgpt", "context_length", 10**30), ("smallgpt", "rope_base", 10**400), ("smallgpt", "expert_scale", 10**400),
    ("smallgpt", "attention_windows", [10**30]), ("smallgpt", "attention_windows", [4] * 10**5),
    ("smallgpt", "norm", "x" * 10**6), ("smallgpt", "mlp_ratio", 1e308)])
def test_huge_numbers_without_weights(name, field, value, exports, tmp_path, bounded):
    folder = shutil.copytree(exports[name], tmp_path / "model")
    set_config(folder, **{field: value})
    assert f"{'rope_theta' if field == 'rope_parameters' else field}=" in (bounded(read_folder, folder) or "")


def test_sizes_between_those_of_the_weights_and_too_large(exports, tmp_path, bounded, monkeypatch):
    """No single size is larger than the number of weights, but their product, the embedding, is."""
    monkeypatch.setattr(models, "abstract_variables", None)
    folder = shutil.copytree(exports["llama"], tmp_path / "model")
    set_config(folder, vocab_size=9_000, hidden_size=9_000, num_attention_heads=1, num_key_value_heads=1)
    assert "vocab_size=9000: the model would have a tensor of 81,000,000 weights" in bounded(read_folder, folder)
    set_config(folder, vocab_size=300, hidden_size=16, num_hidden_layers=1_000)
    assert "num_layers=1000: the folder has only 12 tensors" in bounded(read_folder, folder)


BAD_JSON = [DEEP, "[]", "3", "null", '"x"', "", "{", '{"a": ' + DEEP + "}", "\ud800", "NaN",
            '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_of_the_wrong_form(file, exports, tmp_path, bounded):
    folder = shutil.copytree(exports["gpt2"], tmp_path / "model")
    for content in [*BAD_JSON, *(json.dumps({"model_type": value, "weight_map": value}) for value in (
            None, [], {}, {"a": 3}, {"a": {}}, {"a": ["b"], "c": "d"}, {"a": ""}, "smallgpt", "llama"))]:
        (folder / file).write_text(content, errors="surrogatepass")
        assert str(folder / file) in (bounded(read_folder, folder) or ""), content[:100]


@pytest.mark.parametrize("file", ["tokenizer_kind.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_tokenizer_files_of_the_wrong_form(file, tmp_path, bounded):
    for content in [*BAD_JSON, *(json.dumps({"kind": value, "eos_token": value, "model": value, "<|endoftext|>": value})
                                 for value in (3, 2.5, [], ["a"], {}, {"content": 3}, {"content": []}, "absent"))]:
        if file == "vocab.json":
            (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        if file == "tokenizer_config.json":
            word_level().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / file).write_text(content, errors="surrogatepass")
        assert str(tmp_path) in (bounded(tokenizers.load, tmp_path) or ""), content[:100]


@pytest.mark.parametrize("name", [
    "../model.safetensors", "/etc/a.safetensors", "a/model.safetensors", "..", ".", "config.json", "none.safetensors"])
def test_an_index_names_only_files_of_its_folder(name, exports, tmp_path, bounded):
    folder = shutil.copytree(exports["gpt2"], tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    where = name if name == "none.safetensors" else "model.safetensors.index.json"
    assert f"{folder / where}: damaged" in bounded(read_folder, folder)


def word_level() -> library.Tokenizer:
    tokenizer = library.Tokenizer(library.models.WordLevel({"<unk>": 0, "</s>": 1, "cat": 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens([library.AddedToken("</s>", special=True, normalized=False)])
    return tokenizer


# ---------------------------------------------------------------------- Custom architectures

@pytest.fixture
def named_module(tmp_path, monkeypatch) -> Path:
    """Writes an importable module with an architecture. Returns a file that exists once the module is imported."""
    imported = tmp_path / "imported"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "foreign_module.py").write_text(
        f"open({str(imported)!r}, 'w').close()\nfrom smallgpt_jax.models.gpt import GPT\nclass Own(GPT): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield imported
    sys.modules.pop("foreign_module", None)


@pytest.fixture
def foreign(tmp_path, exports, named_module) -> dict[str, Path]:
    """Returns a workdir and an export whose files name the architecture of `named_module`."""
    model = build("gpt", **SMALL)
    workdir.write_imported(tmp_path / "run", model, init(model), {}, tokenizers.Bytes(), {})
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    described["model"]["architecture"] = "foreign_module:Own"
    (tmp_path / "run" / "config.json").write_text(json.dumps(described))
    shutil.copytree(exports["smallgpt"], tmp_path / "export")
    set_config(tmp_path / "export", architecture="foreign_module:Own")
    return {"run": tmp_path / "run", "export": tmp_path / "export"}


@pytest.mark.parametrize("command", [
    ["generate", "--workdir=RUN", "--max_new_tokens=2"], ["convert", "--from=run", "--input=RUN", "--workdir=NEW"],
    ["convert", "--from=hf", "--input=EXPORT", "--workdir=NEW"],
    ["convert", "--to=hf", "--workdir=RUN", "--output=NEW"],
    ["main", "--config=run:RUN", "--workdir=NEW"], ["evaluate", "--workdir=RUN", "--tasks=lambada_openai"]],
    ids=lambda command: " ".join(command[:2]))
def test_the_module_that_a_file_names_is_not_imported(command, foreign, named_module, tmp_path):
    if command[0] == "evaluate":
        pytest.importorskip("lm_eval")
    places = {"RUN": foreign["run"], "EXPORT": foreign["export"], "NEW": tmp_path / "new"}
    arguments = [functools.reduce(lambda text, name: text.replace(name, str(places[name])), places, argument)
                 for argument in command]
    result = call(*arguments)
    assert result.returncode != 0 and result.stderr.count("\n") == 1, result.stderr
    assert "'foreign_module:Own' is not built in" in result.stderr and "add --trust_custom_code" in result.stderr
    assert not named_module.exists() and not (tmp_path / "new").exists()


def test_trusted_modules_are_imported(foreign, named_module, tmp_path):
    result = call("convert", "--from=run", f"--input={foreign['run']}", f"--workdir={tmp_path / 'new'}",
                  "--trust_custom_code")
    assert result.returncode == 0 and named_module.exists(), result.stderr
    trained = inference.load_trained(tmp_path / "new")  # the module is imported now
    assert trained.model.config.architecture == "foreign_module:Own"
    assert len(inference.load(foreign["run"]).generate("a", max_new_tokens=3, temperature=0.0)) <= 3
