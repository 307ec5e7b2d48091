"""Models in and out: the paper's own files, Hugging Face folders, against PyTorch and `transformers`."""

import dataclasses
import io
import json
import pickle
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, ROOT, build, forward, init, load_config, run

from smallgpt_jax import inference, models, workdir
from smallgpt_jax.conversion import gpt_variations, hugging_face, tokenizer_files, torch_file
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.metrics import read_lines
from smallgpt_jax.models.pgpt import with_paths
from smallgpt_jax.program import build_program
from smallgpt_jax.step import target_weights, weighted_loss
from smallgpt_jax.train import train

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

GPT2 = dict(use_bias=True, tie_embeddings=True, activation="gelu_tanh")
VARIANTS = {
    "gpt": ("gpt", {}), "pgpt": ("pgpt", {}), "lgpt": ("lgpt", {}), "cgpt": ("cgpt", {"conv_kernel": 1}),
    "gpt of GPT-2's shape": ("gpt", GPT2),
    "gpt with a tied head": ("gpt", dict(tie_embeddings=True)),
    "pgpt with four paths and biases": ("pgpt", dict(num_paths=4, use_bias=True)),
    "pgpt with one path": ("pgpt", dict(num_paths=1)),
    "pgpt with equal paths": ("pgpt", dict(num_paths=4, path_weights="equal")),
    "lgpt with narrowing heads": ("lgpt", dict(stage_heads="scaled", compress_last_stage=False)),
    "cgpt with three taps": ("cgpt", dict(use_bias=True, activation="gelu_tanh")),
    "gpt of GPT-2's shape, rotated": ("gpt", dict(**GPT2, position="rope")),
    "gpt without positions": ("gpt", dict(position="none")),
    "pgpt with rotation": ("pgpt", dict(position="rope")),
    "lgpt with ALiBi": ("lgpt", dict(position="alibi", stage_heads="scaled", compress_last_stage=False)),
    "cgpt with ALiBi": ("cgpt", dict(position="alibi", conv_kernel=3, d_model=96, num_heads=6)),
}


def exported(folder: Path, model, params, tokenizer=None) -> Path:
    folder.mkdir()
    hugging_face.export(folder, model, params, tokenizer, "# a card\n")
    return folder


def in_torch(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def random_tokens(model, rows: int = 3, seed: int = 0) -> np.ndarray:
    size = (rows, model.config.context_length)
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, size)


def assert_same(one, other):
    """To the last bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes()
               for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


# ---------------------------------------------------------------------- the paper's files

@pytest.mark.parametrize("architecture", ["gpt", "pgpt", "lgpt", "cgpt"])
def test_the_papers_files_give_the_papers_logits(architecture, shared_data, tmp_path):
    read = gpt_variations.read(shared_data / f"gpt_variations/{architecture}.pt")
    expected = np.load(shared_data / f"gpt_variations/{architecture}.npz")
    meta, = [entry for entry in json.loads((shared_data / "gpt_variations/meta.json").read_text())
             if entry["arch"] == architecture]
    assert models.num_parameters(read.model) == meta["parameters"]
    assert read.facts["step"] == 123 and 6 < read.facts["val_loss"] < 6.5
    logits = forward(read.model, read.params, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        theirs = in_torch(exported(tmp_path / "out", read.model, read.params))(
            torch.tensor(expected["tokens"][:, :-1].astype(np.int64))).logits
    np.testing.assert_allclose(theirs, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("path", [0, 1])
def test_one_path_of_the_papers_pgpt(path, shared_data):
    read = gpt_variations.read(shared_data / "gpt_variations/pgpt.pt")
    expected = np.load(shared_data / "gpt_variations/pgpt.npz")
    config, params = with_paths(read.model.config, read.params, [path])
    logits = forward(models.LanguageModel(config), params, expected["tokens"][:, :-1])
    np.testing.assert_allclose(logits, expected[f"path{path}_logits"], atol=1e-5, rtol=1e-5)


def test_torch_files_are_read_as_torch_reads_them(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {"slice": base[1:3, ::2], "transposed": base.T, "half": base.half(), "bf16": base.bfloat16(),
             "ints": torch.arange(3), "scalar": torch.tensor(0.5), "empty": torch.zeros(0, 3),
             "parameter": torch.nn.Parameter(base), "nested": [{"bool": torch.tensor([True, False])}], "step": 3}
    torch.save(saved, tmp_path / "a.pt")
    read = torch_file.read(tmp_path / "a.pt")
    assert read["step"] == 3 and read["nested"][0]["bool"].tolist() == [True, False]
    for name in ("slice", "transposed", "half", "bf16", "ints", "scalar", "empty", "parameter"):
        assert read[name].shape == tuple(saved[name].shape)
        np.testing.assert_array_equal(read[name].astype(np.float32), saved[name].detach().float().numpy())


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil-was-here"),)


def calls(*calls: tuple[str, str]) -> bytes:
    """A pickle that calls these functions with these arguments, the first `?` of which is the result before."""
    content = b""
    for function, arguments in calls:
        module, name = function.rsplit(".", 1)
        content = b"c" + module.encode() + b"\n" + name.encode() + b"\n" + arguments.encode().replace(
            b"?", content) + b"R"
    return b"}(S'model'\n}(S'x'\n" + content + b"uu."


REBUILD = "torch._utils._rebuild_tensor_v2"
# ((S'storage' FloatStorage S'0' S'cpu' I4) as a persistent id, then offset, shape, strides.
STORAGE = "(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"


def of_tensor(path: Path, arguments: str, *more: tuple[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", calls((REBUILD, f"({STORAGE}{arguments}t"), *more))
        archive.writestr("a/data/0", np.arange(4, dtype=np.float32).tobytes())
    return path


def test_no_tensor_reads_what_is_not_its_own(tmp_path):
    """Sizes that do not fit, that overflow, that are not numbers; a tensor in the place of a storage."""
    good = of_tensor(tmp_path / "good.pt", "I1\n(I3\nt(I1\nt")
    assert torch_file.read(good)["model"]["x"].tolist() == [1, 2, 3]
    for arguments in ("I2\n(I3\nt(I1\nt", "I-1\n(I1\nt(I1\nt", "I0\n(I2\nt(I4\nt", "I0\n(I2\nt(I-1\nt",
                      "I0\n(I1000000000\nt(I0\nt", "I0\n(L9223372036854775807L\nt(L9223372036854775807L\nt",
                      "I0\n(F3.0\nt(I1\nt", "I0\n(I2\nI2\nt(I1\nt", "I0\nI3\nI1\n"):
        with pytest.raises(UserError, match=r"beyond its storage|no known form"):
            torch_file.read(of_tensor(tmp_path / "bad.pt", arguments))
    nested = of_tensor(tmp_path / "nested.pt", "I0\n(I2000000\nI0\nt(I1\nI1\nt",
                       (REBUILD, "(?I0\n(I2000000\nt(I1\ntt"))
    with pytest.raises(UserError, match="no known form"):
        torch_file.read(nested)


def tensors_in_one_storage(path: Path, count: int = 1, numbers: int = 4, **zip_settings) -> Path:
    """`count` tensors, each the whole of the same storage of `numbers` zeros."""
    storage = STORAGE.replace("I4", f"I{numbers}")
    items = (f"S'{i}'\nctorch._utils\n_rebuild_tensor_v2\n({storage}I0\n(I{numbers}\nt(I1\nttR" for i in range(count))
    with zipfile.ZipFile(path, "w", **zip_settings) as archive:
        archive.writestr("a/data.pkl", b"}(" + "".join(items).encode() + b"u.")
        archive.writestr("a/data/0", bytes(4 * numbers))
    return path


def claiming_a_large_member(path: Path) -> Path:
    """A storage of 2²⁶ numbers, says the pickle and the zip directory; there are four."""
    with zipfile.ZipFile(tensors_in_one_storage(path)) as archive:
        program = archive.read("a/data.pkl").replace(b"I4\n", b"I%d\n" % 2**26)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/data/0", bytes(16))
        member = archive.getinfo("a/data/0")
        member.file_size = member.compress_size = 2**28
    return path


@pytest.mark.parametrize("make, message", [
    (lambda p: tensors_in_one_storage(p, numbers=2**24, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    (lambda p: tensors_in_one_storage(p, count=1000, numbers=2**14), "more than 8 times as large as the file"),
    (lambda p: torch_archive(p, b"Nr\xff\xff\xff\x00."), "stores value 16,777,215 of 1"),
    (lambda p: torch_archive(p, b"\x8e" + (2**28).to_bytes(8, "little") + b"."), "expected 268435456 bytes"),
    (lambda p: torch_archive(p, b"]" * 2**22 + b"."), "larger than 4,194,304 bytes"),
    (claiming_a_large_member, "data/0 is larger than the file"),
])
def test_a_small_torch_file_cannot_take_much_memory(make, message, tmp_path):
    path = make(tmp_path / "a.pt")
    assert path.stat().st_size < 5_000_000
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message):
            torch_file.read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size + 1_000_000
    finally:
        tracemalloc.stop()


def torch_archive(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)
    return path


def reaching_beyond(path: Path) -> Path:
    """A tensor of a million numbers in a storage of four."""
    torch.save({"model": {"x": torch.arange(4.0)}}, path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    root = next(name for name in files if name.endswith("data.pkl"))
    files[root] = files[root].replace(b"K\x04\x85", b"J\x40\x42\x0f\x00\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def without(path: Path, name: str) -> Path:
    """A checkpoint of the paper's form that lacks a tensor."""
    model = torch.nn.Module()
    tensors_ = {"transformer.wte.weight": torch.zeros(8, 4), "transformer.wpe.weight": torch.zeros(8, 4),
                "transformer.ln_f.weight": torch.zeros(4), "lm_head.weight": torch.zeros(8, 4),
                **{f"transformer.h.0.{part}.weight": torch.zeros(shape) for part, shape in {
                    "ln_1": 4, "attn.c_attn": (12, 4), "attn.c_proj": (4, 4), "ln_2": 4, "mlp.c_fc": (16, 4),
                    "mlp.c_proj": (4, 16)}.items()}}
    del tensors_[name]
    model.__class__ = type("GPTConfig", (), {"__module__": "models"})
    config = model.__class__.__new__(model.__class__)
    config.__dict__["n_head"] = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "models", type("M", (), {"GPTConfig": config.__class__}))
        torch.save({"model": tensors_, "config": config, "step": 1}, path)
    return path


@pytest.mark.parametrize("make, message", [
    (lambda p, data: p.write_bytes((data / "gpt.pt").read_bytes()[:500_000]) and p, "cut short"),
    (lambda p, data: p.write_text("hello") and p, "not a file of torch.save"),
    (lambda p, data: p, "No such file"),
    (lambda p, data: torch_archive(p, pickle.dumps(Evil())), r"it wants pathlib\.Path\.touch|it wants builtins"),
    (lambda p, data: torch_archive(p, b"cos\nsystem\n(S'touch evil-was-here'\ntR."), "it wants os.system"),
    (lambda p, data: torch_archive(p, pickle.dumps({"model": {3: np.zeros(3)}})), "it wants numpy"),
    (lambda p, data: torch_archive(p, b"garbage"), "damaged, or not a checkpoint"),
    (lambda p, data: torch_archive(p, pickle.dumps({"model": 3})), "it has no 'model'"),
    (lambda p, data: torch_archive(p, pickle.dumps({"model": {"x": 3}})), "more than tensors"),
    (lambda p, data: reaching_beyond(p), "beyond its storage"),
    (lambda p, data: torch.save({"model": {"x": torch.zeros(3)}}, p) or p, "no n_head"),
    (lambda p, data: without(p, "transformer.h.0.ln_2.weight"),
     r"tensors are missing: transformer\.h\.0\.ln_2\.weight$"),
    (lambda p, data: without(p, "transformer.wte.weight"), r"no transformer\.wte, transformer\.wpe or MLP"),
])
def test_bad_torch_files(make, message, tmp_path, shared_data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = Path("evil-was-here")
    path = make(tmp_path / "a.pt", shared_data / "gpt_variations")
    with pytest.raises(UserError, match=message) as error:
        gpt_variations.read(path)
    assert str(tmp_path / "a.pt") in str(error.value) and not evil.exists()


# ---------------------------------------------------------------------- Hugging Face

def test_an_architecture_without_pytorch_code_is_not_exported(tmp_path):
    config = dataclasses.replace(build("gpt").config, architecture="mine")
    with pytest.raises(UserError, match="architecture='mine': has no PyTorch code"):
        hugging_face.export(tmp_path, models.LanguageModel(config), {}, None, "")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_model_computes_the_same_and_comes_back_whole(variant, tmp_path):
    """In PyTorch: logits, with cache and without, rows filled up on the left; saved again by transformers.
    And back here: every bit, every setting."""
    name, fields = VARIANTS[variant]
    model = build(name, **fields)
    params = init(model)
    folder = exported(tmp_path / "out", model, params)
    theirs = in_torch(folder)
    assert type(theirs).__name__ == ("GPT2LMHeadModel" if fields == GPT2 else "SmallGPTForCausalLM")
    assert theirs.generation_config.max_length == model.config.context_length
    tokens = random_tokens(model)
    ours = np.asarray(forward(model, params, jnp.asarray(tokens)))
    with torch.no_grad():
        whole = theirs(torch.tensor(tokens), use_cache=False).logits
        np.testing.assert_allclose(whole, ours, atol=1e-4)
        # Piece by piece, through the cache.
        cache, pieces = None, []
        for start, end in ((0, 7), (7, 8), (8, 20), (20, tokens.shape[1])):
            output = theirs(torch.tensor(tokens[:, start:end]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
        np.testing.assert_allclose(torch.cat(pieces, 1), ours, atol=1e-4)
        # A short row among long ones.
        short, pad = tokens[:1, :9], 4
        rows = np.concatenate([np.pad(short, ((0, 0), (pad, 0))), tokens[1:2, :9 + pad]])
        mask = np.ones_like(rows)
        mask[0, :pad] = 0
        settings = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        batch = theirs.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **settings)
        alone = theirs.generate(torch.tensor(short), **settings)
        uncached = theirs.generate(torch.tensor(short), use_cache=False, **settings)
        assert batch[0, pad:].tolist() == alone[0].tolist() == uncached[0].tolist()
        loss = theirs(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
        log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(ours))[:, :-1], tokens[:, 1:, None], 2)
        assert loss == pytest.approx(-log_p.mean(), abs=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(in_torch(tmp_path / "again")(torch.tensor(tokens), use_cache=False).logits, whole)
    for source in ("out", "again"):
        back = hugging_face.read(str(tmp_path / source))
        assert_same(back.params, jax.tree.map(np.asarray, params))
        wanted = {**vars(model.config), "scan_layers": False}
        assert vars(back.model.config) == wanted


def test_folders_that_do_not_name_positions_have_learned_ones(tmp_path):
    """They were written before there was a choice."""
    model = build("gpt", num_layers=1)
    params = init(model)
    folder = exported(tmp_path / "out", model, params)
    described = json.loads((folder / "config.json").read_text())
    assert described.pop("position") == "learned"
    (folder / "config.json").write_text(json.dumps(described))
    assert_same(hugging_face.read(str(folder)).params, jax.tree.map(np.asarray, params))
    tokens = random_tokens(model)
    with torch.no_grad():
        np.testing.assert_allclose(in_torch(folder)(torch.tensor(tokens)).logits,
                                   forward(model, params, jnp.asarray(tokens)), atol=1e-4)


@pytest.mark.parametrize("more", [{}, dict(n_inner=96, activation_function="gelu", tie_word_embeddings=False)])
def test_any_gpt2_becomes_a_model_of_ours(tmp_path, more):
    config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=3, **more)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params, tokenizer = hugging_face.read(str(tmp_path / "theirs"))
    assert tokenizer is None and models.num_parameters(model) == sum(p.numel() for p in theirs.parameters())
    tokens = random_tokens(model)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits
    np.testing.assert_allclose(forward(model, params, jnp.asarray(tokens)), expected, atol=1e-4)
    # Old files: without the prefix, with the causal mask, as a pickle.
    old = {name.removeprefix("transformer."): x for name, x in theirs.state_dict().items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(old, tmp_path / "theirs" / "pytorch_model.bin")
    assert_same(hugging_face.read(str(tmp_path / "theirs")).params, params)
    if not more:
        again = in_torch(exported(tmp_path / "again", model, params))
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in theirs.state_dict().items())


def test_a_model_in_several_files(tmp_path):
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=3))
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert_same(*(hugging_face.read(str(tmp_path / name)).params for name in ("one", "many")))


def changed(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.load_file(path)
    change(weights)
    safetensors.save_file(weights, path)


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("damage, message", [
    (lambda f: changed(f, lambda w: w.pop("trunk.blocks.1.mlp.up.weight")),
     r"model\.safetensors: tensors are missing: trunk\.blocks\.1\.mlp\.up\.weight"),
    (lambda f: changed(f, lambda w: w.update(extra=np.zeros(3, np.float32))), "has not: extra"),
    (lambda f: changed(f, lambda w: w.update({"head.weight": np.zeros((3, 3), np.float32)})),
     r"head\.weight is \(3, 3\), not \(512, 64\)"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 100), "model.safetensors: damaged"),
    (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    (lambda f: (f / "config.json").unlink(), "config.json: not the config of a model"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: not the config of a model"),
    (lambda f: set_config(f, model_type="llama"), "type 'llama'; gpt2 and smallgpt can be read"),
    (lambda f: set_config(f, model_type="gpt2"), "n_embd is None"),
    (lambda f: set_config(f, d_model="64"), r"config\.json: config\.model\.d_model='64': must be an integer"),
    (lambda f: set_config(f, num_layers=2.5), r"num_layers=2\.5: must be an integer"),
    (lambda f: set_config(f, num_heads=True), "num_heads=True: must be an integer"),
    (lambda f: set_config(f, activation=["gelu"]), r"activation=\['gelu'\]: must be a string"),
    (lambda f: set_config(f, use_bias="no"), "use_bias='no': must be true or false"),
    (lambda f: set_config(f, training_dropout=None), "dropout=None: must be a number"),
    (lambda f: set_config(f, architecture=["gpt"]), r"architecture=\['gpt'\]: must be one of"),
    (lambda f: ((f / "model.safetensors").unlink(), torch.save([1], f / "pytorch_model.bin")),
     "pytorch_model.bin: not a checkpoint"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "its tokenizer cannot be read here .* --tokenizer"),
    (lambda f: set_config(f, architecture="xgpt"), r"config\.model\.architecture='xgpt'"),
    (lambda f: shutil.rmtree(f), "neither a folder here, nor a model that could be fetched"),
])
def test_bad_folders(damage, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build("gpt")
    folder = exported(tmp_path / "out", model, init(model))
    damage(folder)
    with pytest.raises(UserError, match=message):
        hugging_face.read(str(folder))


@pytest.mark.parametrize("fields, message", [
    (dict(activation_function="relu"), "activation_function='relu' is not supported"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True is not supported"),
    (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06 is not supported"),
    (dict(n_inner=50), "n_inner=50 is not a multiple"),
    (dict(n_inner="x"), "n_inner is 'x'; must be an integer"),
    (dict(n_inner=0), "n_inner is 0; must be an integer, at least 1"),
    (dict(n_head=[12]), r"n_head is \[12\]; must be an integer"),
    (dict(n_layer=True), "n_layer is True; must be an integer"),
    (dict(activation_function=["gelu_new"]), r"activation_function=\['gelu_new'\] is not supported"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; must be true or false"),
    (dict(layer_norm_epsilon="1e-5"), "layer_norm_epsilon='1e-5' is not supported"),
])
def test_a_gpt2_that_ours_does_not_compute_is_refused(fields, message, tmp_path):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=48, n_layer=1, n_head=3)).save_pretrained(tmp_path)
    set_config(tmp_path, **fields)
    with pytest.raises(UserError, match=message):
        hugging_face.read(str(tmp_path))


# ---------------------------------------------------------------------- tokenizers

@pytest.fixture(scope="module")
def english(text_file) -> list[str]:
    source = sorted((Path(json.__file__).parent).rglob("*.py"))
    return [text_file.read_text()[:20_000], *(path.read_text() for path in source), *tokenizer_files.PROBES]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece:600", "gpt2", "unigram", "llama's"])
def test_an_exported_tokenizer_gives_the_same_ids(kind, english, tmp_path, request):
    if kind == "gpt2":
        tokenizer = tokenizers.load(request.getfixturevalue("shared_data") / "tokenizer/gpt2")
    elif kind in ("unigram", "llama's"):
        tokenizer = other_sentencepiece(english, kind)
    else:
        tokenizer = tokenizers.make(kind, english)
    model = build("gpt", vocab_size=max(512, tokenizer.vocab_size))
    folder = exported(tmp_path / "out", model, init(model), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text in english:
        ids = tokenizer.encode([text])[0].tolist()
        assert theirs.encode(text) == ids, text[:50]
        if kind != "unigram":  # whose normalisation loses spaces
            assert theirs.decode(ids) == tokenizer.decode(ids)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_text
    back = hugging_face.read(str(folder)).tokenizer
    assert tokenizers.fingerprint(back) == tokenizers.fingerprint(tokenizer)
    theirs.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.encode(english[0]) == theirs.encode(english[0])


def other_sentencepiece(texts: list[str], kind: str):
    """As others train them: with normalisation, a space in front, with and without byte fallback."""
    import sentencepiece

    model = io.BytesIO()
    settings = dict(model_type="unigram") if kind == "unigram" else dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")), model_writer=model,
        vocab_size=500, hard_vocab_limit=False, minloglevel=2, **settings)
    return tokenizers.SentencePiece(model.getvalue())


# ---------------------------------------------------------------------- the command

def test_the_command_carries_a_run_out_and_in_again(text_file, tmp_path):
    trained = tmp_path / "trained"
    config = load_config("pgpt", data__source=str(text_file), train__steps=20)
    train(config, str(trained))
    out, back = tmp_path / "exports" / "out", tmp_path / "back"
    result = run("convert", "--to=hf", f"--workdir={trained}", f"--output={out}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "pgpt of step 20, 275,137 parameters" in result.stdout
    card = (out / "README.md").read_text()
    evaluated = read_lines(trained / "metrics.jsonl")[-1]
    assert f"{evaluated['loss']:.4f} nats" in card and "20 of 8 × 64 tokens" in card and "2 paths" in card
    result = run("convert", "--from=hf", f"--input={out}", f"--workdir={back}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    one, other = inference.load_trained(trained), inference.load_trained(back)
    assert_same(one.params, other.params)
    assert vars(one.model.config) == {**vars(other.model.config), "scan_layers": True}
    assert other.step == 0
    assert inference.load(trained).generate("the", 20, temperature=0) == inference.load(back).generate(
        "the", 20, temperature=0)
    best = tmp_path / "best"
    assert run("convert", "--to=hf", f"--workdir={back}", f"--output={best}", "--paths=best").returncode == 0
    assert hugging_face.read(str(best)).model.config.num_paths == 1
    tuned = tmp_path / "tuned"
    result = run("convert", "--from=run", f"--input={trained}", f"--workdir={tuned}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    begun = inference.load_trained(tuned)
    assert_same(begun.params, one.params)
    assert begun.step == 0 and begun.model.config == one.model.config
    origin = json.loads((tuned / "origin.json").read_text())
    assert origin["step"] == 20 and origin["steps"].startswith("20 of 8 × 64 tokens")
    assert run("convert", "--from=run", f"--input={tuned}", f"--workdir={tmp_path / 'again'}").returncode == 0
    chained = json.loads((tmp_path / "again" / "origin.json").read_text())
    assert chained["weights from: steps"] == origin["steps"]
    again = run("convert", "--to=hf", f"--workdir={back}", f"--output={best}")
    assert again.returncode == 1 and "there is something in it; name a new folder" in again.stderr


def sharp(params):
    """Weights that no initialiser gives: the embedding, which is the head too, ten times as large."""
    return {**params, "token_embedding": 10 * params["token_embedding"]}


def test_an_imported_model_is_trained_further(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = build("gpt", **GPT2)
    theirs = exported(tmp_path / "theirs", model, sharp(init(model)), tokenizers.Bytes())
    folder = tmp_path / "run"
    assert run("convert", "--from=hf", f"--input={theirs}", f"--workdir={folder}").returncode == 0
    small = [f"--config.data.source={text_file}", "--config.train.steps=12", "--config.train.log_every=1",
             "--config.train.eval_steps=2"]
    recipe = f"--config=configs/run.py:{folder}"
    other = run("main", recipe, f"--workdir={folder}", *small, "--config.data.tokenizer=sentencepiece:400")
    assert other.returncode == 1 and f"set --config.data.tokenizer={folder}/tokenizer" in other.stderr
    other = run("main", recipe, f"--workdir={folder}", *small, "--config.model.num_layers=2")
    assert other.returncode == 1 and "model.num_layers was 4, now 2" in other.stderr
    result = run("main", recipe, f"--workdir={folder}", *small)
    assert result.returncode == 0, result.stderr
    assert "the learning rate falls until step 300, training ends at 12 " in result.stdout
    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if line["split"] == "train"]
    assert len(losses) == 12
    # The first loss is that of the weights that came in: of a model that is sure of what it says.
    program = build_program(workdir.read_config(folder), jax.devices()[:1])
    batch = program.open_pipeline().train_batches[0]
    expected, _ = weighted_loss(sharp(init(model)), {}, model, batch, target_weights(batch, 8 * 64), 1)
    assert losses[0] == pytest.approx(float(expected), rel=1e-4) and expected > 8
    assert workdir.read_config(folder).model.activation == "gelu_tanh"
    trained = inference.load_trained(folder)
    assert trained.step == 12 and trained.model.config.use_bias
    again = run("main", recipe, f"--workdir={folder}", "--config.train.steps=14")
    assert again.returncode == 0 and "12 of them done" in again.stdout, again.stderr


@pytest.mark.parametrize("flags, words", [
    ([], ["either --to=hf or --from=hf"]),
    (["--to=hf"], ["--output must be given"]),
    (["--from=hf"], ["--input must be given"]),
    (["--from=hf", "--input=HERE/none"], ["HERE/none", "neither a folder here"]),
    (["--to=hf", "--output=HERE/out"], ["HERE/run", "no such folder"]),
    (["--to=hf", "--output=."], ["--output=.: is the folder that you are in"]),
    (["--from=hf", "--input=HERE/none", "--paths=best"], ["--paths means nothing with --from=hf"]),
    (["--from=run", "--input=HERE/none"], ["HERE/none", "no such folder"]),
    (["--from=run", "--input=HERE/none", "--tokenizer=gpt2"], ["--tokenizer means nothing with --from=run"]),
    (["--to=hf", "--output=HERE/out", "--tokenizer=gpt2"], ["--tokenizer=gpt2: a run has its own"]),
    (["--from=gpt_variations", "--input=SHARED/gpt.pt", "--tokenizer=SHARED/../tokenizer/gpt2"],
     ["the tokenizer has 50,257 entries, the model only 512"]),
])
def test_bad_flags(flags, words, tmp_path, shared_data):
    flags = [flag.replace("HERE", str(tmp_path)).replace("SHARED", str(shared_data / "gpt_variations"))
             for flag in flags]
    result = run("convert", f"--workdir={tmp_path}/run", *flags, HF_HUB_OFFLINE="1")
    assert result.returncode == 1 and result.stderr.count("\n") <= 2, result.stderr
    assert all(word.replace("HERE", str(tmp_path)) in result.stderr for word in words), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_architectures_can_be_exported():
    """Whoever adds a fifth one finds out here that the exported code has to know it."""
    assert {name for name, _ in VARIANTS.values()} == set(ARCHITECTURES)
