"""Folders of Hugging Face models with several files of the same thing: what is imported equals what
transformers reads, or is refused.
"""

import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init
from conversion_helpers import export, load_in_torch, random_tokens
from hugging_face_folders import TEXTS, WORDS

from smallgpt_jax.conversion import hugging_face
from smallgpt_jax.data import tokenizer_folder
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from smallgpt_jax.data.tokenizers import GPT2, SentencePiece, gpt2_bytes
from smallgpt_jax.errors import UserError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
library = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

# ---------------------------------------------------------------------- weights

SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
MODELS = {
    "gpt2": lambda **fields: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=48, max_position_embeddings=16)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SIZES,
            intermediate_size=48,
            max_position_embeddings=16,
            head_dim=8,
            num_key_value_heads=2,
        )
    ),
}
EMBEDDINGS = {"gpt2": "transformer.wte.weight"}  # others: model.embed_tokens.weight
FILES = ("one file", "an index", "one file and an old index", "a pickle")


def weights_of(theirs, head: str) -> dict[str, torch.Tensor]:
    """Returns all tensors, with a head that is the "same" as the embedding, "another", or absent
    (""), which is possible only if it is the same.
    """
    torch.manual_seed(0)
    weights = {
        name: torch.randn(x.shape) * 0.3 + (x.ndim == 1) for name, x in theirs.state_dict().items()
    }
    embedding = weights[EMBEDDINGS.get(theirs.config.model_type, "model.embed_tokens.weight")]
    if head == "same":
        weights["lm_head.weight"] = embedding.clone()
    if not head:
        weights.pop("lm_head.weight")
    return weights


def write_weights(folder: Path, weights: dict, files: str) -> None:
    if files == "a pickle":
        torch.save(weights, folder / "pytorch_model.bin")
        return
    single = folder / "model.safetensors"
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    if files != "one file":
        of_shard = {name: shards[i % 2] for i, name in enumerate(sorted(weights))}
        old = 1 if files == "an index" else 2  # the old weights are twice the new ones
        for shard in shards:
            kept = {
                name: old * weights[name].numpy() for name in weights if of_shard[name] == shard
            }
            safetensors.save_file(kept, folder / shard, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": of_shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if files != "an index":
        arrays = {name: x.numpy() for name, x in weights.items()}
        safetensors.save_file(arrays, single, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "tied, head",
    [(True, "same"), (True, "another"), (True, ""), (False, "another"), (False, "same")],
)
def test_logits_are_those_of_transformers(name, tied, head, tmp_path):
    theirs = MODELS[name]()
    weights = weights_of(theirs, head)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 16))
    described = {**theirs.config.to_dict(), "tie_word_embeddings": tied, "dtype": "float32"}
    # How the weights are stored matters once: with a head that the config.json does not expect.
    for files in FILES if (tied, head) == (True, "another") else FILES[:1]:
        folder = tmp_path / files
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(described))
        write_weights(folder, weights, files)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = model.eval()(torch.tensor(tokens)).logits.numpy()
        ours = hugging_face.read_folder(str(folder))
        assert ours.model.config.tie_embeddings == (tied and head != "another"), files
        logits = forward(ours.model, ours.params, jnp.asarray(tokens))
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=files)


@pytest.mark.slow
def test_an_export_whose_head_was_replaced(tmp_path):
    """The same holds for the models with this project's PyTorch code."""
    model = build("gpt", num_layers=1, d_model=32, tie_embeddings=True, position="rope")
    folder = export(tmp_path / "out", model, init(model))
    weights = safetensors.load_file(folder / "model.safetensors")
    other = np.random.default_rng(0).standard_normal(weights["token_embedding.weight"].shape)
    weights["head.weight"] = other.astype(np.float32)
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(model)
    with torch.no_grad():
        expected = load_in_torch(folder)(torch.tensor(tokens)).logits.numpy()
    ours = hugging_face.read_folder(str(folder))
    np.testing.assert_allclose(
        forward(ours.model, ours.params, jnp.asarray(tokens)), expected, atol=1e-4
    )


# ---------------------------------------------------------------------- tokenizers

TURNS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CHAT = [{"role": "user", "content": "words to learn"}, {"role": "assistant", "content": "others"}]
WITHOUT_MARKS = [text for text in TEXTS if "<" not in text]


def gpt2_files() -> dict[str, str]:
    """Returns a vocab.json and merges.txt in the order of GPT-2's."""
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(WORDS, trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    tokens = [*gpt2_bytes(), *("".join(merge) for merge in merges), "<|endoftext|>"]
    return {
        "vocab.json": json.dumps({token: i for i, token in enumerate(tokens)}),
        "merges.txt": "".join(f"{left} {right}\n" for left, right in merges),
    }


def sentencepiece_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(WORDS).split("\n")),
        model_writer=model,
        vocab_size=320,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Returns folders with the files of one tokenizer each, without a tokenizer.json."""
    made = {name: tmp_path_factory.mktemp("tokenizers") / name for name in ("gpt2", "llama")}
    for folder in made.values():
        folder.mkdir()
    for name, content in gpt2_files().items():
        (made["gpt2"] / name).write_text(content)
    (made["llama"] / "tokenizer.model").write_bytes(sentencepiece_model())
    for name, folder in made.items():
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
    return made


def add_tokenizer_json(name: str, folder: Path, added: list[str]) -> None:
    """Writes what transformers makes of the other files and `added`, as published folders have."""
    classes = {"gpt2": transformers.GPT2Tokenizer, "llama": transformers.LlamaTokenizer}
    theirs = classes[name].from_pretrained(folder)
    theirs.add_special_tokens({"additional_special_tokens": added})
    theirs.backend_tokenizer.save(str(folder / "tokenizer.json"))


def write_settings(folder: Path, added: str) -> None:
    """Names the tokens of a chat in the file `added`; "": in none."""
    settings = {"chat_template": TEMPLATE}
    entries = {str(1000 + i): {"content": token} for i, token in enumerate(TURNS)}
    if added == "decoder":
        settings["added_tokens_decoder"] = entries
    elif added == "tokenizer_config.json":
        settings["additional_special_tokens"] = TURNS
    elif added == "added_tokens.json":
        (folder / added).write_text(json.dumps({token: 1000 + i for i, token in enumerate(TURNS)}))
    elif added == "special_tokens_map.json":
        (folder / added).write_text(json.dumps({"additional_special_tokens": TURNS}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("in_json", [TURNS, []])
def test_a_tokenizer_json_precedes_other_files(name, in_json, folders, tmp_path):
    """Ids of texts and of a chat, with added tokens that only the tokenizer.json has."""
    folder = shutil.copytree(folders[name], tmp_path / name)
    add_tokenizer_json(name, folder, in_json)
    write_settings(folder, "")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = hugging_face.read_tokenizer(folder)
    assert isinstance(ours, HuggingFaceTokenizer)
    for text in WITHOUT_MARKS:
        assert ours.encode([text])[0].tolist() == theirs(text, add_special_tokens=False).input_ids
    chat = ChatTemplate(TEMPLATE, ours.special_tokens).render(CHAT)
    ids = ours.encode_chat(chat)
    assert ids == theirs.apply_chat_template(CHAT).input_ids
    assert (len(set(ids) & set(ours.special_tokens.ids.values())) == 2) == bool(in_json)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name, kind", [("gpt2", GPT2), ("llama", SentencePiece)])
@pytest.mark.parametrize(
    "added",
    ["", "decoder", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"],
)
def test_added_tokens_without_a_tokenizer_json_are_refused(name, kind, added, folders, tmp_path):
    folder = shutil.copytree(folders[name], tmp_path / name)
    write_settings(folder, added)
    if not added:
        assert isinstance(hugging_face.read_tokenizer(folder), kind)
        return
    with pytest.raises(
        UserError,
        match=r"tokens that its tokenizer lacks, such as '<\|im_end\|>'; write a complete",
    ):
        hugging_face.read_tokenizer(folder)


@pytest.mark.parametrize(
    "added", ["decoder", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"]
)
def test_added_tokens_that_a_tokenizer_json_lacks_are_refused(added, folders, tmp_path):
    """transformers adds them to the vocabulary, after all others."""
    folder = shutil.copytree(folders["gpt2"], tmp_path / "gpt2")
    add_tokenizer_json("gpt2", folder, [])
    write_settings(folder, added)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == 303
    with pytest.raises(UserError, match=r"tokens that its tokenizer lacks, such as '<\|im_end\|>'"):
        hugging_face.read_tokenizer(folder)


@pytest.mark.parametrize(
    "model_type, settings, name",
    [
        ("gpt2", {}, ""),
        ("llama", {}, ""),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast"}, ""),
        ("qwen3", {"tokenizer_class": "PreTrainedTokenizerFast"}, ""),
        ("qwen3", {}, "Qwen2Tokenizer"),
        ("gpt2", {"tokenizer_class": "Qwen2TokenizerFast"}, "Qwen2Tokenizer"),
    ],
)
def test_splitting_rules_that_transformers_replaces_are_named(
    model_type, settings, name, folders, tmp_path, capsys
):
    """Where nothing is said, the ids are those of transformers; otherwise some differ."""
    folder = shutil.copytree(folders["gpt2"], tmp_path / "gpt2")
    add_tokenizer_json("gpt2", folder, [])
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    capsys.readouterr()
    ours = hugging_face.read_tokenizer(folder)
    said = capsys.readouterr().err
    assert (f"transformers 5 reads it as a {name}, which" in said) if name else not said
    texts = [*WITHOUT_MARKS, "a1234 b"]
    equal = [
        ours.encode([text])[0].tolist() == theirs(text, add_special_tokens=False).input_ids
        for text in texts
    ]
    assert all(equal) == (not name)


def test_byte_pairs_of_another_class_are_refused(folders, tmp_path):
    for number, (model_type, settings) in enumerate(
        [("qwen3", {}), ("gpt2", {"tokenizer_class": "Qwen2TokenizerFast"})]
    ):
        folder = shutil.copytree(folders["gpt2"], tmp_path / str(number))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=r"is a Qwen2Tokenizer.*, which splits texts otherwise"):
            hugging_face.read_tokenizer(folder)


@pytest.mark.parametrize("begins", [True, False])
def test_what_begins_a_text_of_sentencepiece(begins, folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "llama")
    settings = {"add_bos_token": begins, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs("a").input_ids[0] == theirs.bos_token_id) == begins
    if begins:
        assert hugging_face.read_tokenizer(folder).begin_of_text == theirs.bos_token_id
    else:
        with pytest.raises(UserError, match="add_bos_token=false"):
            hugging_face.read_tokenizer(folder)


def test_an_export_with_further_tokens(folders, tmp_path):
    """Whoever adds tokens to the tokenizer of an export has them in the import."""
    tokenizer = tokenizer_folder.load(folders["gpt2"])
    model = build("gpt", num_layers=1, vocab_size=320)
    folder = export(tmp_path / "out", model, init(model), tokenizer)
    assert isinstance(tokenizer_folder.load(folder), GPT2)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_special_tokens({"additional_special_tokens": TURNS})
    theirs.save_pretrained(folder)
    ours = tokenizer_folder.load(folder)
    assert ours.encode_chat("a<|im_end|>") == [*b"\x40", len(theirs) - 1]
    assert ours.vocab_size == len(theirs) == tokenizer.vocab_size + 2
