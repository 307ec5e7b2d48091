"""Tests of imported models, of exported tokenizers and of the command. Models are compared with
`transformers`.

The tests cover `.pt` files of the paper's released code, and Hugging Face folders. Exported models
are tested in test_export.py.
"""

import dataclasses
import functools
import io
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call, forward, init, load_config, save_run
from conversion_helpers import GPT2, export, load_in_torch, random_tokens
from data_helpers import prepare_store
from run_helpers import SMALL, assert_bitwise_equal, program_of

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import gpt2, gpt_variations, hugging_face
from smallgpt_jax.conversion.config_json import ConfigJson
from smallgpt_jax.data import tokenizer_folder, tokenizers
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.pgpt import with_paths
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.training import opening
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.validation import eval_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
safetensors = pytest.importorskip("safetensors.numpy")

# ---------------------------------------------------------------------- The paper's files


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt", "pgpt", "lgpt", "cgpt"])
def test_logits_of_the_papers_checkpoints(architecture, shared_data, tmp_path):
    read = gpt_variations.read_checkpoint(shared_data / f"gpt_variations/{architecture}.pt")
    expected = np.load(shared_data / f"gpt_variations/{architecture}.npz")
    (meta,) = [
        entry
        for entry in json.loads((shared_data / "gpt_variations/meta.json").read_text())
        if entry["arch"] == architecture
    ]
    assert models.num_parameters(read.model) == meta["parameters"]
    assert read.facts["step"] == 123 and 6 < read.facts["val_loss"] < 6.5
    logits = forward(read.model, read.params, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        theirs = load_in_torch(export(tmp_path / "out", read.model, read.params))(
            torch.tensor(expected["tokens"][:, :-1].astype(np.int64))
        ).logits
    np.testing.assert_allclose(theirs, expected["logits"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("path", [0, 1])
def test_logits_of_single_paths(path, shared_data):
    read = gpt_variations.read_checkpoint(shared_data / "gpt_variations/pgpt.pt")
    expected = np.load(shared_data / "gpt_variations/pgpt.npz")
    config, params, _ = with_paths(read.model.config, read.params, {}, [path])
    logits = forward(models.LanguageModel(config), params, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected[f"path{path}_logits"], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize(
    "fields", [{}, dict(n_inner=100, activation_function="gelu", tie_word_embeddings=False)]
)
def test_imports_gpt2(tmp_path, fields):
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=3, **fields
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params, tokenizer, *_ = hugging_face.read_folder(str(tmp_path / "theirs"))
    assert tokenizer is None and models.num_parameters(model) == sum(
        p.numel() for p in theirs.parameters()
    )
    tokens = random_tokens(model)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits
    np.testing.assert_allclose(forward(model, params, jnp.asarray(tokens)), expected, atol=1e-4)
    # Older GPT-2 files are pickles, contain the causal mask, and omit the prefix of the tensor
    # names.
    old = {name.removeprefix("transformer."): x for name, x in theirs.state_dict().items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(old, tmp_path / "theirs" / "pytorch_model.bin")
    assert_bitwise_equal(hugging_face.read_folder(str(tmp_path / "theirs")).params, params)
    if not fields:
        again = load_in_torch(export(tmp_path / "again", model, params))
        assert all(
            torch.equal(x, again.state_dict()[name]) for name, x in theirs.state_dict().items()
        )


def rewrite_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.load_file(path)
    change(weights)
    safetensors.save_file(weights, path)


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def exported_gpt(tmp_path_factory):
    """Returns (folder, model, parameters) of a small exported gpt. Tests must not change the
    folder.
    """
    model = build("gpt", num_layers=2, d_model=32)
    params = init(model)
    return export(tmp_path_factory.mktemp("exported") / "gpt", model, params), model, params


def test_folders_without_newer_fields(exported_gpt, tmp_path):
    """Exports of older versions lack these fields in config.json. They get the values that older
    versions used.
    """
    source, model, params = exported_gpt
    folder = shutil.copytree(source, tmp_path / "out")
    described = json.loads((folder / "config.json").read_text())
    for field, value in dict(
        position="learned",
        norm="layer",
        norm_position="pre",
        norm_epsilon=1e-5,
        mlp="dense",
        num_kv_heads=0,
        qk_norm=False,
        attention_windows=[],
        rope_base=10_000.0,
        head_dim=0,
        num_experts=16,
        experts_per_token=3,
        num_shared_experts=1,
        expert_mlp="dense",
        expert_scale=1.0,
        expert_bias_rate=0.001,
        balance_loss=0.0,
    ).items():
        assert described.pop(field) == value
    (folder / "config.json").write_text(json.dumps(described))
    back = hugging_face.read_folder(str(folder))
    assert back.model.config == dataclasses.replace(model.config, scan_layers=False)
    assert_bitwise_equal(back.params, jax.tree.map(np.asarray, params))
    tokens = random_tokens(model)
    with torch.no_grad():
        np.testing.assert_allclose(
            load_in_torch(folder)(torch.tensor(tokens)).logits,
            forward(model, params, jnp.asarray(tokens)),
            atol=1e-4,
        )


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda f: rewrite_weights(f, lambda w: w.pop("trunk.blocks.1.mlp.up.weight")),
            r"model\.safetensors: missing tensors: trunk\.blocks\.1\.mlp\.up\.weight",
        ),
        (
            lambda f: rewrite_weights(f, lambda w: w.update(extra=np.zeros(3, np.float32))),
            "unexpected tensors: extra",
        ),
        (
            lambda f: rewrite_weights(
                f, lambda w: w.update({"head.weight": np.zeros((3, 3), np.float32)})
            ),
            r"head\.weight \(3, 3\), expected \(512, 32\)",
        ),
        (
            lambda f: rewrite_weights(
                f, lambda w: w.update({"head.weight": np.zeros((512, 32), np.int8)})
            ),
            r"tensors that are no floats: head\.weight int8",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 100),
            "model.safetensors: damaged",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            "no weights; expected model.safetensors or pytorch_model.bin",
        ),
        (
            lambda f: (f / "config.json").unlink(),
            "config.json: No such file or directory; expected a model config",
        ),
        (
            lambda f: (f / "config.json").write_text("{"),
            "config.json: not JSON: .*; expected a model config",
        ),
        (
            lambda f: set_config(f, model_type="bert"),
            "model_type='bert': not supported; must be one of gpt2, llama, qwen3",
        ),
        (lambda f: set_config(f, model_type="gpt2"), "n_embd=None: must be"),
        (
            lambda f: set_config(f, d_model="64"),
            r"config\.json: config\.model\.d_model='64': must be an integer",
        ),
        (lambda f: set_config(f, num_layers=2.5), r"num_layers=2\.5: must be an integer"),
        (lambda f: set_config(f, num_heads=True), "num_heads=True: must be an integer"),
        (lambda f: set_config(f, activation=["gelu"]), r"activation=\['gelu'\]: must be a string"),
        (lambda f: set_config(f, norm=["rms"]), r"norm=\['rms'\]: must be a string"),
        (
            lambda f: set_config(f, norm="batch"),
            r"config\.json: config\.model\.norm='batch': must be one of layer, rms",
        ),
        (lambda f: set_config(f, attention_windows=5), "attention_windows=5: must be integers"),
        (
            lambda f: set_config(f, attention_windows=None),
            "attention_windows=None: must be integers",
        ),
        (lambda f: set_config(f, use_bias="no"), "use_bias='no': must be true or false"),
        (lambda f: set_config(f, training_dropout=None), "dropout=None: must be a number"),
        (lambda f: set_config(f, architecture=["gpt"]), r"architecture=\['gpt'\]: must be one of"),
        (
            lambda f: (
                (f / "model.safetensors").unlink(),
                torch.save([1], f / "pytorch_model.bin"),
            ),
            "pytorch_model.bin: not a checkpoint",
        ),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "unsupported tokenizer .* --tokenizer"),
        (lambda f: set_config(f, architecture="xgpt"), r"config\.model\.architecture='xgpt'"),
        (lambda f: shutil.rmtree(f), "not a local folder, and cannot be downloaded"),
    ],
)
def test_refuses_bad_folders(damage, message, exported_gpt, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = shutil.copytree(exported_gpt[0], tmp_path / "out")
    damage(folder)
    with pytest.raises(UserError, match=message):
        hugging_face.read_folder(str(folder))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(activation_function="relu"), "activation_function='relu': not supported"),
        (
            dict(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx=True: not supported",
        ),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06: not supported"),
        (dict(n_inner="x"), "n_inner='x': must be an integer"),
        (dict(n_inner=0), "n_inner=0: must be an integer, at least 1"),
        (dict(n_head=[12]), r"n_head=\[12\]: must be an integer"),
        (dict(n_layer=True), "n_layer=True: must be an integer"),
        (
            dict(activation_function=["gelu_new"]),
            r"activation_function=\['gelu_new'\]: not supported",
        ),
        (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes': must be true or false"),
        (dict(layer_norm_epsilon="1e-5"), "layer_norm_epsilon='1e-5': not supported"),
    ],
)
def test_refuses_a_gpt2_with_unsupported_fields(fields, message):
    described = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=48, n_layer=1, n_head=3
    ).to_dict()
    with pytest.raises(UserError, match=message):
        gpt2.from_config(ConfigJson({**described, **fields}, Path("config.json")))


def test_a_gpt2_with_a_fractional_mlp_ratio(tmp_path):
    """The inner width, 42, is not a multiple of the width, 32."""
    model = build("gpt", **GPT2, num_layers=1, d_model=32, mlp_ratio=1.3)
    params = init(model)
    folder = export(tmp_path / "out", model, params)
    assert type(load_in_torch(folder)).__name__ == "GPT2LMHeadModel"
    back = hugging_face.read_folder(str(folder))
    assert back.model.config.mlp_width == model.config.mlp_width == 42
    assert_bitwise_equal(back.params, jax.tree.map(np.asarray, params))


# ---------------------------------------------------------------------- Tokenizers


@pytest.fixture(scope="module")
def english(text_file) -> list[str]:
    source = sorted((Path(json.__file__).parent).rglob("*.py"))
    return [
        text_file.read_text()[:20_000],
        *(path.read_text() for path in source),
        *tokenizer_folder.TRIAL_TEXTS,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece:600", "gpt2", "unigram", "byte fallback"])
def test_exported_tokenizers_give_the_same_ids(kind, english, tmp_path, request):
    if kind == "gpt2":
        tokenizer = tokenizer_folder.load(request.getfixturevalue("shared_data") / "tokenizer/gpt2")
    elif kind in ("unigram", "byte fallback"):
        tokenizer = other_sentencepiece(english, kind)
    else:
        tokenizer = TokenizerSource(kind).make(english)
    model = build("gpt", vocab_size=max(512, tokenizer.vocab_size), num_layers=1, d_model=8)
    folder = export(tmp_path / "out", model, init(model), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    begin = (
        [tokenizer.begin_of_text] if kind in ("unigram", "byte fallback") else []
    )  # a piece of its own, <s>
    for text in english:
        ids = tokenizer.encode([text])[0].tolist()
        assert theirs.encode(text) == begin + ids, text[:50]
        if kind != "unigram":  # the unigram tokenizer's normalization removes extra spaces
            assert theirs.decode(ids) == tokenizer.decode(ids)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (
        tokenizer.begin_of_text,
        tokenizer.end_of_text,
    )
    assert (theirs.bos_token_id == theirs.eos_token_id) == (not begin)
    back = hugging_face.read_folder(str(folder)).tokenizer
    assert tokenizers.fingerprint(back) == tokenizers.fingerprint(tokenizer)
    theirs.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.encode(english[0]) == theirs.encode(english[0])


CHAT = """\
{%- for message in messages %}
{{- '\nUser: ' if message.role == 'user' else '\nAssistant:' }}
{{- message.content if message.role == 'user' else ' ' + message.content + eos_token }}
{%- endfor %}
{{- '\nAssistant:' if add_generation_prompt }}
"""


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece:400"])
def test_a_chat_template_is_exported_and_imported(kind, english, tmp_path):
    """In transformers, a conversation has the ids on which the run trained; an import exports the
    same template.
    """
    conversations = [
        [
            {"role": "user", "content": f"a question, {i}"},
            {"role": "assistant", "content": f"yes, {i}"},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": " no"},
        ]
        for i in range(20)
    ]
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    )
    tokenizer = TokenizerSource(kind).make(english)
    run, out, back = (tmp_path / name for name in ("run", "out", "back"))
    model = build("gpt", **GPT2, num_layers=1, d_model=16)
    write_imported(run, ImportedModel(model, init(model), tokenizer), {})
    store = prepare_store(
        tmp_path / "store",
        tmp_path / "a.jsonl",
        format="messages",
        tokenizer=str(run / "tokenizer"),
        chat_template=str(tmp_path / "chat.jinja"),
    )
    shutil.copy(
        tmp_path / "store/metadata.json", run / "store.json"
    )  # as main does when the run starts
    template = inference.load(run).chat()._template
    assert template.render(conversations[0][:1]) == "\nUser: a question, 0"  # as in training
    for direction in (
        ("--to=hf", f"--workdir={run}", f"--output={out}"),
        ("--from=hf", f"--input={out}", f"--workdir={back}"),
        ("--to=hf", f"--workdir={back}", f"--output={tmp_path / 'again'}"),
    ):
        result = call("convert", *direction)
        assert result.returncode == 0, result.stderr
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    found = {(*theirs.apply_chat_template(messages).input_ids,) for messages in conversations}
    # The end of the last answer is the beginning of the next document.
    ours = {
        (*store.train.stream[start : start + length].tolist(), tokenizer.end_of_text)
        for start, length in zip(store.train.starts, store.train.lengths)
    }
    assert len(ours) == store.train.documents > 10 and ours < found
    text = theirs.apply_chat_template(
        conversations[0][:1], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|endoftext|>\nUser: a question, 0\nAssistant:"
    assert (tmp_path / "again/chat_template.jinja").read_bytes() == (
        out / "chat_template.jinja"
    ).read_bytes()


def other_sentencepiece(texts: list[str], kind: str):
    """Returns a SentencePiece tokenizer of the given kind.

    "unigram" is a unigram model that normalizes texts. "byte fallback" is a BPE model with byte
    fallback.
    """
    import sentencepiece

    model = io.BytesIO()
    settings = (
        dict(model_type="unigram")
        if kind == "unigram"
        else dict(
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")),
        model_writer=model,
        vocab_size=500,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return tokenizers.SentencePiece(model.getvalue())


# ---------------------------------------------------------------------- The command


@pytest.mark.slow
def test_a_failed_export_leaves_no_folders(trained_run, tmp_path, monkeypatch):
    def fail(folder, *_):
        (folder / "config.json").touch()
        raise UserError("safetensors is not installed")

    monkeypatch.setattr(hugging_face, "export_folder", fail)
    (tmp_path / "existing").mkdir()
    for output in ("new/folder/export", "existing/export"):
        result = call(
            "convert",
            "--to=hf",
            f"--workdir={trained_run('gpt', **SMALL)}",
            f"--output={tmp_path / output}",
        )
        assert (result.returncode, result.stderr) == (1, "error: safetensors is not installed\n")
    assert list(tmp_path.rglob("*")) == [tmp_path / "existing"]


@pytest.mark.slow
def test_a_run_survives_every_conversion(text_file, tmp_path, monkeypatch, capsys):
    """The weights of a run do not change when they are exported, imported and copied.

    First, the run is exported, and the export is imported. Then, the best path of the imported
    model is exported. Finally, `convert --from=run` copies the run to a second workdir, and the
    second workdir to a third.
    """
    config = load_config(
        "pgpt", data__source=str(text_file), train__steps=20, model__num_layers=2, model__d_model=32
    )
    params = init(models.build(**config.model))
    saved = save_run(tmp_path / "saved", config, params)
    out, back, best = tmp_path / "exports" / "out", tmp_path / "back", tmp_path / "best"
    result = call("convert", "--to=hf", f"--workdir={saved}", f"--output={out}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "pgpt of step 20, 61,665 parameters" in result.stdout
    card = (out / "README.md").read_text()
    assert "4.1250 nats" in card and "20 of 8 × 64 tokens" in card and "2 parallel paths" in card
    assert f"| text | {text_file.name} |" in card and str(tmp_path.parent) not in card
    monkeypatch.chdir(out.parent)
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    assert "<|endoftext|>Once upon a time" in capsys.readouterr().out

    result = call("convert", "--from=hf", f"--input={out}", "--workdir=../back", cwd=out.parent)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert result.stdout.startswith("../back: pgpt, ")  # as given
    assert "--config=run:../back --workdir=../back --config.data" in result.stdout
    imported = inference.load_trained(back)
    assert_bitwise_equal(imported.params, params)
    assert {
        **vars(imported.model.config),
        "scan_layers": True,
    } == config.model.to_dict() and imported.step == 0
    assert tokenizers.fingerprint(imported.tokenizer) == tokenizers.fingerprint(tokenizers.Bytes())

    result = call(
        "convert",
        "--to=hf",
        f"--workdir={back}",
        "--output=../best",
        "--paths=best",
        cwd=out.parent,
    )
    assert result.stdout.startswith("../best: pgpt of step 0, "), result.stderr
    assert hugging_face.read_folder(str(best)).model.config.num_paths == 1
    again = call("convert", "--to=hf", f"--workdir={back}", f"--output={best}")
    assert again.returncode == 1 and "folder is not empty; choose another" in again.stderr

    source, expected = saved, {}
    for name in ("tuned", "tuned again"):
        result = call("convert", "--from=run", f"--input={source}", f"--workdir={tmp_path / name}")
        assert result.returncode == 0 and not result.stderr, result.stderr
        copied = inference.load_trained(tmp_path / name)
        assert_bitwise_equal(copied.params, params)
        assert copied.step == 0 and vars(copied.model.config) == config.model.to_dict()
        origin = json.loads((tmp_path / name / "origin.json").read_text())
        assert origin.items() >= expected.items()
        source, expected = tmp_path / name, {"weights from: steps": origin.get("steps")}
    # "tuned" was not trained before it was copied to "tuned again". So origin.json of the copy has
    # no entry "steps".
    assert expected == {"weights from: steps": None}
    assert origin["weights from: step"] == "20" and origin["weights from: steps"].startswith(
        "20 of 8 × 64 tokens"
    )


def with_large_embedding(params):
    """Returns `params` with the token embedding multiplied by ten. It is also the head.

    No initializer gives such large values, so a test can tell these weights from newly initialized
    weights.
    """
    return {**params, "token_embedding": 10 * params["token_embedding"]}


@pytest.mark.slow
def test_an_imported_model_is_trained_further(text_file, tmp_path, monkeypatch):
    on_one_device = functools.partial(shared_program, devices=jax.devices()[:1])
    monkeypatch.setattr(opening, "shared_program", on_one_device)
    model = build("gpt", **GPT2, num_layers=1, d_model=32, context_length=32)
    theirs = export(
        tmp_path / "theirs", model, with_large_embedding(init(model)), tokenizers.Bytes()
    )
    folder = tmp_path / "run"
    assert call("convert", "--from=hf", f"--input={theirs}", f"--workdir={folder}").returncode == 0
    small = [
        f"--config.data.source={text_file}",
        "--config.train.steps=3",
        "--config.train.log_every=1",
        "--config.train.eval_steps=2",
        "--config.train.loss_chunks=1",
    ]
    recipe = f"--config=configs/run.py:{folder}"
    other = call(
        "main", recipe, f"--workdir={folder}", *small, "--config.data.tokenizer=sentencepiece:400"
    )
    assert (
        other.returncode == 1 and f"set --config.data.tokenizer={folder}/tokenizer" in other.stderr
    )
    other = call("main", recipe, f"--workdir={folder}", *small, "--config.model.num_layers=4")
    assert other.returncode == 1 and "model.num_layers was 1, now 4" in other.stderr
    result = call("main", recipe, f"--workdir={folder}", *small)
    assert result.returncode == 0, result.stderr
    assert (
        "learning rate decay ends" not in result.stdout
    )  # the schedule follows config.train.steps
    losses = [
        line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["split"] == "train"
    ]
    assert len(losses) == 3
    # Training starts from the imported weights, so the first loss is theirs.
    config = read_config(folder)
    batch = opening.open_pipeline(config, on_one_device(config)).train_batches[0]
    evaluate = jax.jit(functools.partial(eval_step, program_of(model)))
    sums = evaluate(with_large_embedding(init(model)), {}, batch)
    expected = sums.loss / sums.counted
    assert losses[0] == pytest.approx(float(expected), rel=1e-4) and expected > 7
    assert read_config(folder).model.activation == "gelu_tanh"
    trained = inference.load_trained(folder)
    assert trained.step == 3 and trained.model.config.use_bias
    again = call("main", recipe, f"--workdir={folder}", "--config.train.steps=4")
    assert again.returncode == 0 and "3 done" in again.stdout, again.stderr


@pytest.mark.parametrize(
    "flags, substrings",
    [
        ([], ["give either --to=hf|gguf|peft or --from=hf"]),
        (["--to=hf"], ["--output: must be given"]),
        (["--from=hf"], ["--input: must be given"]),
        (["--from=hf", "--input=HERE/none"], ["HERE/none", "not a local folder"]),
        (["--to=hf", "--output=HERE/out"], ["HERE/run", "no such folder"]),
        (["--to=hf", "--output=."], ["--output=.: this is the current folder"]),
        (
            ["--from=hf", "--input=HERE/none", "--paths=best"],
            ["--paths: cannot be combined with --from=hf"],
        ),
        (["--from=run", "--input=HERE/none"], ["HERE/none", "no such folder"]),
        (
            ["--from=run", "--input=HERE/none", "--tokenizer=gpt2"],
            ["--tokenizer: cannot be combined with --from=run"],
        ),
        (
            ["--to=hf", "--output=HERE/out", "--tokenizer=gpt2"],
            ["--tokenizer=gpt2: an export contains the run's tokenizer"],
        ),
        (
            [
                "--from=gpt_variations",
                "--input=SHARED/gpt.pt",
                "--tokenizer=SHARED/../tokenizer/gpt2",
            ],
            ["the tokenizer has 50,257 entries, but the model has only 512"],
        ),
    ],
)
def test_bad_flags(flags, substrings, tmp_path, shared_data, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    flags = [
        flag.replace("HERE", str(tmp_path)).replace("SHARED", str(shared_data / "gpt_variations"))
        for flag in flags
    ]
    result = call("convert", f"--workdir={tmp_path}/run", *flags)
    assert result.returncode == 1 and result.stderr.count("\n") <= 2, result.stderr
    assert all(s.replace("HERE", str(tmp_path)) in result.stderr for s in substrings), result.stderr
    assert list(tmp_path.iterdir()) == []
