"""Imports of damaged and hostile files: only UserErrors of one line, at once, and in little memory.

`test_fuzz.py` has mutations of valid files.
"""

import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import build, call, init
from conversion_helpers import GPT2, export
from foreign_helpers import bounded

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import hugging_face
from smallgpt_jax.data import tokenizer_folder, tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.workdir import ImportedModel, check_workdir, write_imported

library = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

DEEP = "[" * 200_000 + "]" * 200_000
SMALL = dict(num_layers=1, d_model=16, context_length=8, vocab_size=300)
MODELS = {
    "gpt2": dict(GPT2),
    "llama": dict(
        position="rope", norm="rms", mlp="gated", activation="silu", num_heads=2, num_kv_heads=1
    ),
    "smallgpt": dict(
        norm="rms", mlp="moe", num_experts=2, experts_per_token=2, attention_windows=(4,)
    ),
}


def read_bounded(read, path: Path) -> str | None:
    """Calls `read(path)` and returns the message of its UserError, or None."""
    try:
        with bounded():
            read(path)
        return None
    except UserError as error:
        message = str(error)
        assert message.count("\n") <= 1 and len(message) < 1000 + 2 * len(str(path)), message[:2000]
        return message


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """Returns {name of the format: an export}. Tests must not change them."""
    folder = tmp_path_factory.mktemp("exports")
    made = {name: build("gpt", **SMALL | fields) for name, fields in MODELS.items()}
    return {
        name: export(
            folder / name,
            model,
            init(model),
            tokenizers.Bytes(),
            {
                "trunk": {
                    "blocks": {
                        "mlp": {
                            "router": {
                                "bias": np.zeros((1, 2), np.float32),
                                "load": np.zeros((1, 2), np.float32),
                            }
                        }
                    }
                }
            },
        )
        for name, model in made.items()
    }


def read_folder(folder: Path):
    return hugging_face.read_folder(str(folder))


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ---------------------------------------------------------------------- Huge values, nesting, types

HUGE = [2**31 - 2, 10**12, 10**30, 10**400]


@pytest.mark.parametrize(
    "name, fields",
    [
        ("gpt2", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"]),
        (
            "llama",
            [
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
            ],
        ),
        (
            "smallgpt",
            [
                "vocab_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "d_model",
                "num_experts",
                "mlp_ratio",
                "experts_per_token",
                "num_shared_experts",
            ],
        ),
    ],
)
def test_huge_sizes_are_compared_with_the_weights(name, fields, exports, tmp_path, monkeypatch):
    """They are refused before a model is built. The message names the field."""
    monkeypatch.setattr(models, "abstract_params", None)
    for field in fields:
        for value in HUGE:
            folder = shutil.copytree(exports[name], tmp_path / "model")
            set_config(folder, **{field: value})
            assert f"{field}=" in (read_bounded(read_folder, folder) or "")
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("llama", "max_position_embeddings", 10**30),
        ("llama", "rms_norm_eps", 10**400),
        ("llama", "rope_parameters", {"rope_theta": 10**400}),
        ("smallgpt", "context_length", 10**30),
        ("smallgpt", "rope_base", 10**400),
        ("smallgpt", "expert_scale", 10**400),
        ("smallgpt", "attention_windows", [10**30]),
        ("smallgpt", "attention_windows", [4] * 10**5),
        ("smallgpt", "norm", "x" * 10**6),
        ("smallgpt", "mlp_ratio", 1e308),
    ],
)
def test_huge_numbers_without_weights(name, field, value, exports, tmp_path):
    folder = shutil.copytree(exports[name], tmp_path / "model")
    set_config(folder, **{field: value})
    assert f"{'rope_theta' if field == 'rope_parameters' else field}=" in (
        read_bounded(read_folder, folder) or ""
    )


def test_sizes_between_those_of_the_weights_and_too_large(exports, tmp_path, monkeypatch):
    """No single size is larger than the number of weights, but their product, the embedding, is."""
    monkeypatch.setattr(models, "abstract_params", None)
    folder = shutil.copytree(exports["llama"], tmp_path / "model")
    set_config(
        folder, vocab_size=9_000, hidden_size=9_000, num_attention_heads=1, num_key_value_heads=1
    )
    assert "vocab_size=9000: the model would have a tensor of 81,000,000 weights" in read_bounded(
        read_folder, folder
    )
    set_config(folder, vocab_size=300, hidden_size=16, num_hidden_layers=1_000)
    assert "num_layers=1000: the folder has only 12 tensors" in read_bounded(read_folder, folder)


def write_llama(folder: Path, num_layers: int, width: int = 1) -> None:
    """Writes a llama whose matrices have few elements."""
    row, square = np.ones(width, np.float32), np.ones((width, width), np.float32)
    weights = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), square)
    weights["model.norm.weight"] = row
    for i in range(num_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = row
        for name in "qkvo":
            weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = square
        for name in ("gate", "up", "down"):
            weights[f"model.layers.{i}.mlp.{name}_proj.weight"] = square
    safetensors.save_file(weights, folder / "model.safetensors")
    fields = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), width) | {
        "model_type": "llama",
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
        "num_hidden_layers": num_layers,
    }
    (folder / "config.json").write_text(json.dumps(fields))


def test_thousands_of_layers_are_traced_once(tmp_path, monkeypatch):
    """Layers of few elements are a model, too."""
    calls, eval_shape = [], jax.eval_shape

    def counted(*arguments, **options):
        calls.append(arguments)
        return eval_shape(*arguments, **options)

    monkeypatch.setattr(jax, "eval_shape", counted)
    write_llama(tmp_path, num_layers=200, width=2)
    assert read_bounded(read_folder, tmp_path) is None
    assert len(calls) < 20


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(attention_windows=[4, 8], num_layers=9_999), "9,999 blocks would be traced"),
        (dict(attention_windows=list(range(1, 602)), num_layers=601), "601 blocks would be"),
        (dict(loops=101), "loops=101: must be at most 100"),
        (dict(loops=100, num_layers=9, attention_windows=[4, 8]), "900 blocks would be traced"),
        (dict(mixers=["smallgpt_jax.models.gpt:GPT"]), "is no mixer; use one of attention, "),
        (dict(canon_taps=101), "canon_taps=101: must be at most 100"),
        (dict(mixers=["conv"], conv_taps=10**9), "conv_taps=1000000000: must be at most 100"),
        (dict(vocab_size=2**31), "vocab_size=2147483648: must be at most 2,147,483,647"),
    ],
)
def test_a_workdir_of_endless_work(fields, message, tmp_path):
    """Sizes of a config.json that would be traced for minutes, or are none of JAX."""
    model = build("gpt", **SMALL)
    write_imported(tmp_path / "run", ImportedModel(model, init(model), tokenizers.Bytes()), {})
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    described["model"].update(fields)
    (tmp_path / "run" / "config.json").write_text(json.dumps(described))
    assert message in read_bounded(inference.load_trained, tmp_path / "run")


def test_a_header_of_gigabytes(exports, tmp_path):
    folder = shutil.copytree(exports["gpt2"], tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((2**31).to_bytes(8, "little") + content[8:])
    assert "its header of 2,147,483,648 bytes is too large" in read_bounded(read_folder, folder)


BAD_JSON = [
    DEEP,
    "[]",
    "3",
    "null",
    '"x"',
    "",
    "{",
    '{"a": ' + DEEP + "}",
    "\ud800",
    "NaN",
    '{"a": ' + "9" * 5000 + "}",
]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_of_the_wrong_form(file, exports, tmp_path):
    folder = shutil.copytree(exports["gpt2"], tmp_path / "model")
    if file != "config.json":  # an index is read only without the single file
        (folder / "model.safetensors").unlink()
    for content in [
        *BAD_JSON,
        *(
            json.dumps({"model_type": value, "weight_map": value})
            for value in (
                None,
                [],
                {},
                {"a": 3},
                {"a": {}},
                {"a": ["b"], "c": "d"},
                {"a": ""},
                "smallgpt",
                "llama",
            )
        ),
    ]:
        (folder / file).write_text(content, errors="surrogatepass")
        assert str(folder / file) in (read_bounded(read_folder, folder) or ""), content[:100]


@pytest.mark.parametrize(
    "file", ["tokenizer_kind.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
)
def test_tokenizer_files_of_the_wrong_form(file, tmp_path):
    keys = ("kind", "eos_token", "model", "<|endoftext|>")
    for content in [
        *BAD_JSON,
        *(
            json.dumps(dict.fromkeys(keys, value))
            for value in (3, 2.5, [[]], ["a"], {"a": 1}, {"content": 3}, {"content": []}, "absent")
        ),
    ]:
        if file == "vocab.json":
            (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        if file == "tokenizer_config.json":
            byte_level().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / file).write_text(content, errors="surrogatepass")
        assert str(tmp_path) in (read_bounded(tokenizer_folder.load, tmp_path) or ""), content[:100]


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/a.safetensors",
        "a/model.safetensors",
        "..",
        ".",
        "config.json",
        "none.safetensors",
    ],
)
def test_an_index_names_only_files_of_its_folder(name, exports, tmp_path):
    folder = shutil.copytree(exports["gpt2"], tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    is_missing = name == "none.safetensors"
    message = (
        "none.safetensors: damaged" if is_missing else "index.json: weight_map.a: expected the name"
    )
    assert message in read_bounded(read_folder, folder)


def byte_level() -> library.Tokenizer:
    """Returns a tokenizer with one token per byte and the special tokens <s> and </s>."""
    vocabulary = {character: i for i, character in enumerate(tokenizers.gpt2_bytes())} | {
        "<s>": 256,
        "</s>": 257,
    }
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


# ---------------------------------------------------------------------- Custom architectures


@pytest.fixture
def named_module(tmp_path, monkeypatch) -> Path:
    """Writes an importable module with an architecture. Returns a file that exists once the module
    is imported.
    """
    imported = tmp_path / "imported"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "foreign_module.py").write_text(
        f"open({str(imported)!r}, 'w').close()\nfrom smallgpt_jax.models.gpt import GPT\nclass "
        "Own(GPT): pass\n"
        "from smallgpt_jax.models.attention import Attention\nclass Mixer(Attention): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield imported
    sys.modules.pop("foreign_module", None)


@pytest.fixture
def foreign(tmp_path, exports, named_module) -> dict[str, Path]:
    """Returns a workdir and an export whose files name the architecture of `named_module`."""
    model = build("gpt", **SMALL)
    write_imported(tmp_path / "run", ImportedModel(model, init(model), tokenizers.Bytes()), {})
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    described["model"]["architecture"] = "foreign_module:Own"
    (tmp_path / "run" / "config.json").write_text(json.dumps(described))
    shutil.copytree(exports["smallgpt"], tmp_path / "export")
    set_config(tmp_path / "export", architecture="foreign_module:Own")
    return {"run": tmp_path / "run", "export": tmp_path / "export"}


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--workdir=RUN", "--max_new_tokens=2"],
        ["convert", "--from=run", "--input=RUN", "--workdir=NEW"],
        ["convert", "--from=hf", "--input=EXPORT", "--workdir=NEW"],
        ["main", "--config=run:RUN", "--workdir=NEW"],
        ["evaluate", "--workdir=RUN", "--tasks=lambada_openai"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_module_that_a_file_names_is_not_imported(command, foreign, named_module, tmp_path):
    if command[0] == "evaluate":
        pytest.importorskip("lm_eval")
    places = {"RUN": foreign["run"], "EXPORT": foreign["export"], "NEW": tmp_path / "new"}
    arguments = [
        functools.reduce(lambda text, name: text.replace(name, str(places[name])), places, argument)
        for argument in command
    ]
    result = call(*arguments)
    assert result.returncode != 0 and result.stderr.count("\n") == 1, result.stderr
    assert (
        "'foreign_module:Own' is not built in" in result.stderr
        and "add --trust_custom_code" in result.stderr
    )
    assert not named_module.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("form, output", [("hf", "new"), ("gguf", "new.gguf")])
def test_a_custom_model_is_not_exported(form, output, foreign, named_module, tmp_path):
    """No format supports it, so its code need not be trusted."""
    result = call(
        "convert", f"--to={form}", f"--workdir={foreign['run']}", f"--output={tmp_path / output}"
    )
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert (
        "'foreign_module:Own' is not built in, and exports support only built-in parts"
        in result.stderr
    )
    assert (
        "trust" not in result.stderr
        and not named_module.exists()
        and not (tmp_path / output).exists()
    )


@pytest.mark.parametrize(
    "command", ["generate --workdir=RUN", "main --config=run:RUN --workdir=NEW"]
)
def test_the_module_of_a_mixer_is_not_imported(command, foreign, named_module, tmp_path):
    described = json.loads((foreign["run"] / "config.json").read_text())
    described["model"].update(architecture="gpt", mixers=["attention", "foreign_module:Mixer"])
    (foreign["run"] / "config.json").write_text(json.dumps(described))
    result = call(
        *command.replace("RUN", str(foreign["run"])).replace("NEW", str(tmp_path / "new")).split()
    )
    assert (
        result.returncode != 0
        and "config.model.mixers='foreign_module:Mixer' is not built in" in result.stderr
    )
    assert not named_module.exists() and not (tmp_path / "new").exists()
    model = read_config(foreign["run"], trust_custom_code=True).model
    assert named_module.exists() and model.mixers == ("attention", "foreign_module:Mixer")


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "foreign_module:Own"},
        {"architecture": "gpt", "mixers": ["foreign_module:Mixer"]},
    ],
)
def test_training_does_not_import_the_module_of_another_model(
    fields, foreign, named_module, tmp_path
):
    """A workdir or a teacher with a class that the config does not name is another model, so no
    trust is needed.
    """
    described = json.loads((foreign["run"] / "config.json").read_text())
    described["model"].update(fields)
    (foreign["run"] / "config.json").write_text(json.dumps(described))
    field, value = next(
        (field, value) for field, value in fields.items() if "foreign_module" in str(value)
    )
    now = {"architecture": "gpt", "mixers": ("attention",)}[field]
    for arguments, message in (
        (
            [f"--workdir={foreign['run']}"],
            f"existing run with another config: model.{field} was {value!r}, now",
        ),
        (
            [f"--workdir={tmp_path / 'new'}", f"--config.train.teacher={foreign['run']}"],
            f"config.model.{field} is {now!r} here, but {value!r} in the teacher; the teacher "
            "must be the same",
        ),
    ):
        result = call("main", "--config=configs/gpt.py:tiny", *arguments)
        assert (result.returncode, "trust_custom_code" in result.stderr) == (
            1,
            False,
        ) and message in result.stderr
    assert not named_module.exists() and not (tmp_path / "new").exists()
    described["model"].update(architecture="foreign_module:Own")
    own = Config.of(
        {"model": described["model"]}
    )  # the user's own config names the class, and imports it
    (foreign["run"] / "config.json").write_text(json.dumps(described))
    assert named_module.exists()
    check_workdir(foreign["run"], own)


@pytest.mark.slow
def test_trusted_modules_are_imported(foreign, named_module, tmp_path):
    result = call(
        "convert",
        "--from=run",
        f"--input={foreign['run']}",
        f"--workdir={tmp_path / 'new'}",
        "--trust_custom_code",
    )
    assert result.returncode == 0 and named_module.exists(), result.stderr
    trained = inference.load_trained(tmp_path / "new")  # the module is imported now
    assert trained.model.config.architecture == "foreign_module:Own"
    assert len(inference.load(foreign["run"]).generate("a", max_new_tokens=3, temperature=0.0)) <= 3
