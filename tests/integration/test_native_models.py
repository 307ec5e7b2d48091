"""Llama and Qwen3 models: import, training and export, compared with transformers."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, call, forward, init, load_config
from data_helpers import prepare_store

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import gpt2, hugging_face, llama
from smallgpt_jax.conversion.config_json import ConfigJson
from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.packing import PACKINGS
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.planning import memory_formula
from smallgpt_jax.run.state import TrainState

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
library = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

BLOCK = dict(
    position="rope",
    norm="rms",
    mlp="gated",
    activation="silu",
    num_layers=2,
    d_model=32,
    num_heads=4,
    context_length=32,
    vocab_size=300,
    mlp_ratio=2.625,
    dropout=0.1,
)
VARIANTS = {  # class, fields
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, tied, two key-value heads": (
        "LlamaForCausalLM",
        dict(num_kv_heads=2, tie_embeddings=True, rope_base=500.0, norm_epsilon=1e-3),
    ),
    "Llama with wide heads": ("LlamaForCausalLM", dict(head_dim=20, num_kv_heads=1)),
    "Qwen3": (
        "Qwen3ForCausalLM",
        dict(qk_norm=True, num_kv_heads=2, head_dim=16, norm_epsilon=1e-6),
    ),
    "Qwen3, a width that heads do not divide": (
        "Qwen3ForCausalLM",
        dict(qk_norm=True, num_heads=3, head_dim=12),
    ),
}


def assert_equal(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def random_tokens(model) -> np.ndarray:
    return np.random.default_rng(0).integers(
        0, model.config.vocab_size, (2, model.config.context_length)
    )


def their_logits(folder: Path, tokens: np.ndarray, class_name: str) -> np.ndarray:
    """Loads the model in a folder with transformers, without code from the folder. Returns its
    logits.
    """
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(theirs).__name__ == class_name
    with torch.no_grad():
        whole = theirs(torch.tensor(tokens), use_cache=False).logits
        cache, pieces = None, []
        for start, end in ((0, 7), (7, 8), (8, tokens.shape[1])):
            output = theirs(
                torch.tensor(tokens[:, start:end]), past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            pieces.append(output.logits)
    np.testing.assert_allclose(torch.cat(pieces, 1), whole, atol=1e-4)
    return whole.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_and_import(variant, tmp_path):
    class_name, fields = VARIANTS[variant]
    model = build("gpt", **BLOCK | fields)
    params, folder = init(model), tmp_path / "out"
    folder.mkdir()
    hugging_face.export_folder(folder, model, params, tokenizers.Bytes())
    assert not list(folder.glob("*.py")) and "auto_map" not in (folder / "config.json").read_text()
    tokens = random_tokens(model)
    np.testing.assert_allclose(
        their_logits(folder, tokens, class_name),
        forward(model, params, jnp.asarray(tokens)),
        atol=1e-4,
    )
    text = "two  spaces, ünïcödé and <|endoftext|>\n"
    assert transformers.AutoTokenizer.from_pretrained(folder).encode(text) == list(text.encode())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.generation_config.eos_token_id == 256 and theirs.dtype == torch.float32
    theirs.save_pretrained(tmp_path / "again")
    for source in ("out", "again"):
        back = hugging_face.read_folder(str(tmp_path / source))
        assert_equal(back.params, params)
        assert vars(back.model.config) == {
            **vars(model.config),
            "scan_layers": False,
            "dropout": 0.0,
        }


def test_models_that_transformers_lacks_are_not_exported_as_native_models():
    for changed in (
        dict(norm="layer"),
        dict(use_bias=True),
        dict(mlp="dense"),
        dict(activation="gelu"),
        dict(position="none"),
        dict(norm_position="post"),
        dict(attention_windows=(8, 0)),
        dict(num_heads=3, head_dim=12),
    ):
        assert not llama.supports(build("gpt", **BLOCK | changed).config), changed
    assert not llama.supports(build("pgpt", **BLOCK).config)
    for changed in (
        {},
        dict(attention_windows=(0, 0)),
        dict(num_kv_heads=4, head_dim=8, dtype="bfloat16"),
    ):
        assert llama.supports(build("gpt", **BLOCK | changed).config), changed
    gpt2_fields = dict(use_bias=True, tie_embeddings=True, activation="gelu_tanh")
    assert gpt2.supports(build("gpt", **gpt2_fields).config)
    for changed in (
        dict(norm="rms"),
        dict(head_dim=8),
        dict(num_kv_heads=1),
        dict(norm_epsilon=1e-6),
    ):
        assert not gpt2.supports(build("gpt", **gpt2_fields | changed).config), changed


def save_qwen3(folder: Path, **fields) -> None:
    """Saves a Qwen3 with random bfloat16 weights in several files, as in the folders of
    published models.
    """
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **fields,
    )
    theirs = transformers.Qwen3ForCausalLM(config)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    theirs.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def train_tokenizer(folder: Path, texts: list[str]) -> library.Tokenizer:
    """Writes the files of a byte-level tokenizer, named as in the folders of SmolLM2 and Qwen3."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        library.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<pad>", "<|im_end|>"],
            show_progress=False,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return tokenizer


def assert_has_the_logits(folder: Path, model, params) -> None:
    tokens = random_tokens(model)
    np.testing.assert_allclose(
        forward(model, params, jnp.asarray(tokens)),
        their_logits(folder, tokens, "Qwen3ForCausalLM"),
        atol=1e-4,
    )


@pytest.mark.slow
def test_imports_trains_and_exports(text_file, tmp_path):
    """A Qwen3 in bfloat16 is imported with its tokenizer, trained, and exported again."""
    theirs, run, out = (tmp_path / part for part in ("theirs", "run", "out"))
    save_qwen3(theirs, head_dim=12, tie_word_embeddings=True)
    tokenizer = train_tokenizer(theirs, [text_file.read_text()[:5000]])
    result = call("convert", "--from=hf", f"--input={theirs}", f"--workdir={run}")
    assert result.returncode == 0 and "tokenizer: hugging_face, 300 entries" in result.stdout, (
        result.stderr
    )
    imported = inference.load_trained(run)
    assert_has_the_logits(theirs, imported.model, imported.params)
    text = "the cat <|im_end|> sat"
    assert imported.tokenizer.end_of_text == tokenizer.token_to_id("<|im_end|>") == 1
    tokenizer.encode_special_tokens = True
    assert imported.tokenizer.encode([text])[0].tolist() == tokenizer.encode(text).ids

    result = call(
        "main",
        f"--config=configs/run.py:{run}",
        f"--workdir={run}",
        f"--config.data.source={text_file}",
        "--config.train.steps=2",
        "--config.train.eval_every=2",
        "--config.train.eval_steps=1",
        "--config.optimizer.warmup_steps=0",
        "--config.model.context_length=32",
    )
    assert result.returncode == 0, result.stderr
    trained = inference.load_trained(run)
    difference = np.abs(
        trained.params["token_embedding"] - imported.params["token_embedding"]
    ).max()
    assert trained.step == 2 and difference > 1e-5
    result = call("convert", "--to=hf", f"--workdir={run}", f"--output={out}")
    assert result.returncode == 0 and "as Qwen3ForCausalLM\n" in result.stdout, result.stderr
    assert_has_the_logits(out, trained.model, trained.params)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / file).read_bytes() == (theirs / file).read_bytes()
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert (
        again.eos_token_id == 1
        and again.encode("the cat sat") == tokenizer.encode("the cat sat").ids
    )


@pytest.fixture(scope="module")
def llama_with_begin(tmp_path_factory) -> Path:
    """Returns the folder of a small Llama whose tokenizer puts <s> before each text. Tests must not
    change it.
    """
    folder = tmp_path_factory.mktemp("begin") / "llama"
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=256,
            eos_token_id=257,
        )
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    with torch.no_grad():
        model.lm_head.weight[94:] *= 0.01  # the other ids are printable characters of ASCII
    model.save_pretrained(folder)
    vocabulary = {character: i for i, character in enumerate(tokenizers.gpt2_bytes())} | {
        "<s>": 256,
        "</s>": 257,
    }
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_texts_begin_as_in_transformers(llama_with_begin, tmp_path):
    """generate, evaluate and the token store begin a text with <s>, and end a document with
    </s>.
    """
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        llama_with_begin, dtype=torch.float32
    ).eval()
    encode = transformers.AutoTokenizer.from_pretrained(llama_with_begin)
    read = hugging_face.read_folder(str(llama_with_begin))
    model = inference.build_text_model(read.model, read.params, read.tokenizer)
    with torch.no_grad():
        for prompt in ("the cat", ""):
            ids = torch.tensor([encode(prompt).input_ids])
            assert ids[0, 0] == 256
            expected = theirs.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=257)[
                0, ids.shape[1] :
            ]
            expected = read.tokenizer.decode(expected.tolist())
            assert model.generate(prompt, max_new_tokens=8, temperature=0.0) == expected
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(f'{{"text": "{i:03d}"}}\n' for i in range(40)))
    store = prepare_store(tmp_path / "store", source, tokenizer=str(llama_with_begin))
    documents = store.train.stream.reshape(-1, 5)  # <s>, three bytes, </s>
    assert (documents[:, [0, 4]] == [256, 257]).all() and store.train.starts.tolist() == [
        *range(0, documents.size, 5)
    ]
    rows = PACKINGS["concat"](store.train, 7, separate=True).read_rows(np.arange(1))
    assert rows.segment_ids_BxT.tolist() == [[1, 1, 1, 1, 1, 2, 2]]
    rows = PACKINGS["best_fit"](store.train, 10, separate=True).read_rows(np.arange(1))
    assert rows.targets_BxT[0, [3, 4, 8, 9]].tolist() == [257, 256, 257, 256]


@pytest.mark.slow
def test_scores_begin_as_in_transformers(llama_with_begin):
    api = pytest.importorskip("lm_eval.api.instance")
    from smallgpt_jax.evaluation.lm_eval_model import SmallGPT
    from smallgpt_jax.evaluation.scoring import Scorer

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        llama_with_begin, dtype=torch.float32
    ).eval()
    encode = transformers.AutoTokenizer.from_pretrained(llama_with_begin)
    read = hugging_face.read_folder(str(llama_with_begin))
    trained = inference.TrainedModel(read.model, read.params, {}, read.tokenizer, 0)
    harness = SmallGPT(Scorer(read.model, read.params), trained, lambda *_: None)

    def request(kind: str, *arguments):
        return api.Instance(kind, {}, arguments, 0)

    def log_likelihood(context: str, continuation: str) -> float:
        ids = torch.tensor([encode(context + continuation).input_ids])
        with torch.no_grad():
            log_p = torch.log_softmax(theirs(ids).logits[0, :-1], -1)
        first = len(encode(context).input_ids)
        return sum(float(log_p[i - 1, ids[0, i]]) for i in range(first, ids.shape[1]))

    cases = [("the cat", " sat"), ("", "sat")]
    scores = harness.loglikelihood([request("loglikelihood", *case) for case in cases])
    for case, (score, _) in zip(cases, scores):
        assert score == pytest.approx(log_likelihood(*case), abs=1e-3)
    (rolling,) = harness.loglikelihood_rolling([request("loglikelihood_rolling", "the cat sat")])
    assert rolling == pytest.approx(log_likelihood("", "the cat sat"), abs=1e-3)


# The config.json of two published models, in the form of transformers 4.
SMOLLM2 = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    hidden_act="silu",
    hidden_size=576,
    intermediate_size=1536,
    max_position_embeddings=8192,
    mlp_bias=False,
    num_attention_heads=9,
    num_hidden_layers=30,
    num_key_value_heads=3,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=100_000,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    vocab_size=49_152,
)
QWEN3 = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    head_dim=128,
    hidden_act="silu",
    hidden_size=1024,
    intermediate_size=3072,
    max_position_embeddings=40_960,
    max_window_layers=28,
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1_000_000,
    sliding_window=None,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151_936,
)


def read_config(fields: dict, **changes) -> models.LanguageModel:
    ours = llama.from_config(ConfigJson({**fields, **changes}, Path("config.json")))
    return models.build(dropout=0.0, dtype="float32", scan_layers=True, **ours)


@pytest.mark.parametrize(
    "fields, parameters, rope_base, head_width",
    [(SMOLLM2, 134_515_008, 100_000, 64), (QWEN3, 596_049_920, 1_000_000, 128)],
)
def test_published_configs(fields, parameters, rope_base, head_width):
    model = read_config(fields)
    assert models.num_parameters(model) == parameters
    assert (model.config.rope_base, model.config.head_width) == (rope_base, head_width)
    written = llama.to_config(model.config)  # transformers 4 and 5 read this form
    same = {
        name: value
        for name, value in fields.items()
        if name
        not in (
            "head_dim",
            "rope_scaling",
            "max_window_layers",
            "sliding_window",
            "use_sliding_window",
            "pretraining_tp",
            "torch_dtype",
        )
    }
    assert written.items() >= same.items() and written["head_dim"] == head_width
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": rope_base}


@pytest.mark.parametrize("fields, name", [(SMOLLM2, "Llama"), (QWEN3, "Qwen3")])
@pytest.mark.parametrize("changes", [{}, dict(num_key_value_heads=None)])
def test_missing_key_value_heads(fields, name, changes):
    """A missing field has the default of transformers, which differs from that of null in Qwen3."""
    fields = {
        **{k: v for k, v in fields.items() if k != "num_key_value_heads"},
        "num_attention_heads": 64,
        "hidden_size": 1024,
        **changes,
    }
    expected = getattr(transformers, f"{name}Config")(**fields).num_key_value_heads
    assert read_config(fields).config.kv_heads == expected


@pytest.mark.parametrize(
    "fields, changes, message",
    [
        (
            SMOLLM2,
            dict(rope_scaling={"type": "linear", "factor": 2.0}),
            "rope_scaling={'factor': 2.0, 'type': 'linear'}",
        ),
        (
            SMOLLM2,
            dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}),
            "rope_parameters=.* 'llama3'}",
        ),
        (SMOLLM2, dict(rope_parameters="default"), "rope_parameters='default': not supported"),
        (
            SMOLLM2,
            dict(
                rope_scaling={"rope_type": "default"},
                rope_parameters={"rope_type": "yarn", "factor": 4.0},
            ),
            "rope_parameters=.* 'yarn'}",
        ),
        (
            SMOLLM2,
            dict(rope_parameters={"partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5: not supported",
        ),
        (
            SMOLLM2,
            dict(rope_parameters={"full_attention": {"rope_theta": 5.0}}),
            "must not depend on the type of a layer",
        ),
        (SMOLLM2, dict(rope_theta="1e4"), "rope_theta='1e4': must be a number above 0"),
        (SMOLLM2, dict(attention_bias=True), "attention_bias=True: not supported; must be False"),
        (SMOLLM2, dict(mlp_bias=True), "mlp_bias=True: not supported; must be False"),
        (SMOLLM2, dict(hidden_act="gelu"), "hidden_act='gelu': not supported; must be 'silu'"),
        (SMOLLM2, dict(rms_norm_eps=0), "rms_norm_eps=0: must be a number above 0"),
        (
            SMOLLM2,
            dict(quantization_config={"bits": 4}),
            "quantization_config={'bits': 4}: not supported",
        ),
        (SMOLLM2, dict(hidden_size=None), "hidden_size=None: must be an integer"),
        (
            SMOLLM2,
            dict(num_key_value_heads=2),
            "num_kv_heads=2: must divide config.model.num_heads=9",
        ),
        (
            SMOLLM2,
            dict(head_dim=63),
            "needs an even head width, but heads in blocks of width 576 have 63",
        ),
        (SMOLLM2, dict(tie_word_embeddings=1), "tie_word_embeddings=1: must be true or false"),
        (
            QWEN3,
            dict(use_sliding_window=True, sliding_window=4096),
            "use_sliding_window=True: not supported",
        ),
        (
            QWEN3,
            dict(layer_types=["full_attention", "sliding_attention"]),
            "layer_types=.*: not supported",
        ),
    ],
)
def test_refuses_unsupported_configs(fields, changes, message):
    with pytest.raises(UserError, match=message):
        read_config(fields, **changes)


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory) -> Path:
    """Returns the folder of a small Llama in one file. Tests must not change it."""
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    ).save_pretrained(folder)
    return folder


NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda w: w.pop(NAME),
            r"missing tensors: model\.layers\.0\.self_attn\.\{q,k,v\}_proj\.weight",
        ),
        (
            lambda w: w.update({NAME: w[NAME][:4]}),
            r"wrong shapes: .*k_proj\.weight \(4, 16\), expected \(8, 16\)",
        ),
        (
            lambda w: w.update({NAME.replace("weight", "bias"): np.zeros(8)}),
            r"unexpected tensors: .*k_proj\.bias",
        ),
        (lambda w: w.pop("lm_head.weight"), r"missing tensors: lm_head\.weight"),
    ],
)
def test_refuses_damaged_weights(change, message, small_llama, tmp_path):
    folder = shutil.copytree(small_llama, tmp_path / "llama")
    weights = safetensors.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: {message}"):
        hugging_face.read_folder(str(folder))


def test_tensors_of_other_forms(small_llama, tmp_path):
    """Some folders contain a copy of the tied embedding, rotary frequencies, or tensor names
    without a prefix.
    """
    folder = shutil.copytree(small_llama, tmp_path / "llama")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": True}))
    weights = safetensors.load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    safetensors.save_file(weights, folder / "model.safetensors")
    with_copy = hugging_face.read_folder(str(folder))
    assert with_copy.tokenizer is None and with_copy.model.config.tie_embeddings
    del weights["lm_head.weight"]
    weights = {name.removeprefix("model."): x for name, x in weights.items()}
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.save_file(weights, folder / "model.safetensors")
    assert_equal(hugging_face.read_folder(str(folder)).params, with_copy.params)


def test_wide_heads_in_memory_and_flops():
    """The width of the attention, heads · head_dim, differs from d_model."""
    mesh = sharding.make_mesh(
        sharding.MeshConfig(data=1, fsdp=1, tensor=1, path=1), jax.devices()[:1]
    )
    state = TrainState(0, {}, {})
    activations, flops = [], []
    for head_dim in (16, 32):
        model = build("gpt", **BLOCK | dict(head_dim=head_dim))
        activations.append(
            memory_formula.memory_breakdown(model, mesh, state, 1, 1, False)["activations"]
        )
        flops.append(train_flops_per_token(model))
    layers, positions, width, float32 = 2, 32, 4 * 16, 4
    assert activations[1] - activations[0] == layers * positions * 4 * width * float32
    assert flops[1] - flops[0] == layers * (6 * 4 * 32 * width + 12 * positions * width)


def test_parameters_and_flops_at_full_size():
    """The numbers of parameters and FLOPs follow from the shapes of the matrices.

    A layer has query and output matrices of width 768, key and value matrices of a third of this
    width, and three MLP matrices of width 2048.
    """
    model = models.build(**load_config("llama", "paper").model)
    width, layers, vocabulary = 768, 12, 50_304
    multiplied = (
        layers * (2 * width**2 + 2 * width * width // 3 + 3 * width * 2048) + vocabulary * width
    )
    assert models.num_parameters(model) == multiplied + vocabulary * width + 25 * width
    assert train_flops_per_token(model) == 6 * multiplied + 12 * 1024 * layers * width
