"""GGUF files: tensors and fields, read by gguf's reader, and errors. test_llama_cpp.py runs the
files in llama.cpp.
"""

import sys

import jax
import numpy as np
import pytest
from conftest import build, call, init, spaced_tokenizer
from gguf_helpers import BLOCK, small_gpt2, small_sentencepiece

from smallgpt_jax.conversion import gguf_export, tokenizer_files
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.tokenizers import Bytes, Symbols
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import TrainedModel
from smallgpt_jax.run.workdir import ImportedModel, write_imported
from smallgpt_jax.storage.atomic import atomic_file

VARIANTS = {
    "llama": dict(num_kv_heads=2, rope_base=500.0, norm_epsilon=1e-3),
    "llama, tied, wide heads": dict(tie_embeddings=True, head_dim=20),
    "qwen3": dict(qk_norm=True, num_kv_heads=1, head_dim=16),
}


def trained(model, params=None, tokenizer=None) -> TrainedModel:
    return TrainedModel(model, params or {}, {}, tokenizer or Bytes(), 0)


def read_file(path, model, params, tokenizer=None, dtype="float32", template=None):
    """Writes a file. Returns {name: tensor of gguf's reader}, and a function that returns the value
    of a field.
    """
    gguf = pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    gguf_export.write(path, "a model", trained(model, params, tokenizer), dtype, template)
    reader = gguf.GGUFReader(path)
    return {tensor.name: tensor for tensor in reader.tensors}, lambda name: reader.fields[
        name
    ].contents()


def expected_tensors(config, params) -> dict[str, np.ndarray]:
    """Returns the tensors that llama.cpp expects by name. Those of llama have each head's entries i
    and i + K/2 side by side, because llama.cpp rotates adjacent entries.
    """
    width, half = config.head_width, config.head_width // 2
    order = (
        np.arange(width)
        if config.qk_norm
        else np.array([i // 2 + i % 2 * half for i in range(width)])
    )

    def rows(kernel_DxHxK):
        return kernel_DxHxK.reshape(config.d_model, -1).T

    found = {
        "token_embd.weight": params["token_embedding"],
        "output_norm.weight": params["final_norm"]["scale"],
    }
    if not config.tie_embeddings:
        found["output.weight"] = params["head"]
    for i in range(config.num_layers):
        block, name = (
            jax.tree.map(lambda x, i=i: np.asarray(x[i]), params["trunk"]["blocks"]),
            f"blk.{i}.",
        )
        qkv_DxGxJxK, mlp = block["attention"]["qkv"]["kernel"], block["mlp"]
        found |= {
            f"{name}attn_q.weight": rows(qkv_DxGxJxK[:, :, :-2][..., order]),
            f"{name}attn_k.weight": rows(qkv_DxGxJxK[:, :, -2][..., order]),
            f"{name}attn_v.weight": rows(qkv_DxGxJxK[:, :, -1]),
            f"{name}attn_output.weight": block["attention"]["out"]["kernel"]
            .reshape(-1, config.d_model)
            .T,
            f"{name}attn_norm.weight": block["attention_norm"]["scale"],
            f"{name}ffn_norm.weight": block["mlp_norm"]["scale"],
            **{
                f"{name}ffn_{part}.weight": mlp[part]["kernel"].T for part in ("gate", "up", "down")
            },
        }
        if config.qk_norm:
            found |= {
                f"{name}attn_{part}_norm.weight": block["attention"][f"{part}_norm"]["scale"]
                for part in "qk"
            }
    return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_sizes(variant, tmp_path):
    """Rows of the embedding and the head without a token are left out."""
    model = build("gpt", **BLOCK, **VARIANTS[variant])
    params, c = init(model), model.config
    found, field = read_file(tmp_path / "file", model, params)
    expected = expected_tensors(c, params)
    assert set(found) == set(expected)
    for name, x in expected.items():
        x = x[:257] if name in ("token_embd.weight", "output.weight") else x
        assert found[name].tensor_type.name == "F32"
        np.testing.assert_array_equal(found[name].data, x, err_msg=name)
    name = field("general.architecture")
    assert name == variant.split(",")[0] and field("general.name") == "a model"
    sizes = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 84,
        "attention.head_count": 4,
        "attention.head_count_kv": c.num_kv_heads or 4,
        "attention.key_length": c.head_dim or 8,
        "attention.value_length": c.head_dim or 8,
        "rope.dimension_count": c.head_dim or 8,
        "rope.freq_base": c.rope_base,
    }
    assert {key: field(f"{name}.{key}") for key in sizes} == sizes
    assert field(f"{name}.attention.layer_norm_rms_epsilon") == pytest.approx(c.norm_epsilon)


def test_rotation_of_adjacent_entries(tmp_path):
    """llama.cpp's rotation of the file's queries and keys gives the attention scores of our
    rotation of ours.
    """
    model = build("gpt", **BLOCK)
    params, c = init(model), model.config
    found, _ = read_file(tmp_path / "file", model, params)
    x_TxD = np.random.default_rng(1).standard_normal((9, c.d_model))
    qkv_DxGxJxK = np.float64(params["trunk"]["blocks"]["attention"]["qkv"]["kernel"][0])
    half, positions_Tx1x1 = c.head_width // 2, np.arange(9)[:, None, None]
    turn_Tx1xI = np.exp(1j * positions_Tx1x1 * c.rope_base ** (-np.arange(half) / half))

    def scores(q_TxHxI, k_TxHxI):
        return np.einsum("thi,shi->hts", q_TxHxI * turn_Tx1xI, np.conj(k_TxHxI * turn_Tx1xI)).real

    ours = [
        x[..., :half] + 1j * x[..., half:]
        for x in np.einsum("td,dgjk->jtgk", x_TxD, qkv_DxGxJxK)[:2]
    ]
    theirs = [
        (x_TxD @ np.float64(found[f"blk.0.attn_{part}.weight"].data).T).reshape(
            9, c.num_heads, half, 2
        )
        for part in "qk"
    ]
    np.testing.assert_allclose(
        scores(*(x[..., 0] + 1j * x[..., 1] for x in theirs)), scores(*ours), atol=1e-12
    )


def test_float16(tmp_path):
    model = build("gpt", **BLOCK)
    params = init(model)
    found, field = read_file(tmp_path / "file", model, params, dtype="float16")
    assert field("general.file_type") == 1
    for name, x in expected_tensors(model.config, params).items():
        x = x[:257] if name in ("token_embd.weight", "output.weight") else x
        np.testing.assert_array_equal(
            found[name].data, x if x.ndim == 1 else x.astype(np.float16), err_msg=name
        )


def test_q8_0(tmp_path):
    """32 numbers of a row share a float16 scale s ≈ max|x| / 127; each is at most s/2 away, and 127
    errors of s.

    The down projection has rows of 84 numbers, which blocks of 32 do not divide.
    """
    model = build("gpt", **BLOCK)
    params = init(model)
    found, field = read_file(tmp_path / "file", model, params, dtype="q8_0")
    assert field("general.file_type") == 7
    for name, x in expected_tensors(model.config, params).items():
        x, stored = (x[:257] if name in ("token_embd.weight", "output.weight") else x), found[name]
        if x.ndim == 1 or "ffn_down" in name:
            np.testing.assert_array_equal(
                stored.data, x if x.ndim == 1 else x.astype(np.float16), err_msg=name
            )
            continue
        assert stored.tensor_type.name == "Q8_0" and stored.data.dtype == np.uint8
        blocks_Nx34 = np.ascontiguousarray(stored.data).reshape(-1, 34)
        scales_Nx1 = np.float64(blocks_Nx34[:, :2].view(np.float16))
        x_Nx32 = np.float64(x.reshape(-1, 32))
        exact_Nx1 = np.abs(x_Nx32).max(1, keepdims=True) / 127
        error_Nx1 = np.maximum(
            exact_Nx1 * 2.0**-11, 2.0**-25
        )  # of rounding to float16, also to a subnormal
        assert (np.abs(scales_Nx1 - exact_Nx1) <= 1.001 * error_Nx1).all()
        difference_Nx32 = np.abs(scales_Nx1 * blocks_Nx34[:, 2:].view(np.int8) - x_Nx32)
        assert (
            difference_Nx32 <= exact_Nx1 / 2 + 127.5 * error_Nx1
        ).all() and difference_Nx32.max() > 0


def test_vocabularies(tmp_path):
    model = build("gpt", **{**BLOCK, "vocab_size": 512})
    params = init(model)
    _, field = read_file(tmp_path / "bytes", model, params, Bytes())
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    assert (tokens[ord("a")], tokens[ord(" ")], tokens[256], len(tokens)) == (
        "a",
        "\u0120",
        "<|endoftext|>",
        257,
    )
    assert types == [1] * 256 + [3] and field("tokenizer.ggml.bos_token_id") == 256
    gpt2 = small_gpt2()
    _, field = read_file(tmp_path / "gpt2", model, params, gpt2)
    assert (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
    assert field("tokenizer.ggml.merges")[:2] == ["\u0120 t", "h e"]
    assert (
        field("tokenizer.ggml.tokens")[256:258] == ["\u0120t", "he"]
        and field("tokenizer.ggml.eos_token_id") == 262
    )
    pieces = small_sentencepiece()
    _, field = read_file(tmp_path / "pieces", model, params, pieces)
    types = field("tokenizer.ggml.token_type")
    assert field("tokenizer.ggml.model") == "llama" and len(types) == pieces.vocab_size
    assert (
        types[:2] == [2, 3]
        and types.count(6) == 256
        and field("tokenizer.ggml.tokens")[1] == "<|endoftext|>"
    )
    assert (
        field("tokenizer.ggml.add_space_prefix") is False
        and field("tokenizer.ggml.add_bos_token") is True
    )
    best = int(
        np.argmax(
            [
                score if kind == 1 else -np.inf
                for kind, score in zip(types, field("tokenizer.ggml.scores"))
            ]
        )
    )  # the first merge of the training
    assert pieces.decode([best]) == "th"


@pytest.mark.parametrize(
    "tokenizer, adds_begin",
    [
        (Bytes, False),
        (small_sentencepiece, False),
        (lambda: small_sentencepiece(bos_id=2, bos_piece="<s>"), True),
    ],
)
def test_hugging_face_tokenizers_in_llama_cpps_script(tokenizer, adds_begin, tmp_path):
    """convert_hf_to_gguf.py puts the begin-of-text token before a text as transformers does."""
    gguf = pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    pytest.importorskip("tokenizers")
    for name, content in tokenizer_files.hugging_face_files(tokenizer(), 64).items():
        (tmp_path / name).write_text(content)
    assert gguf.SpecialVocab(tmp_path).add_special_token == {"bos": adds_begin}


# ---------------------------------------------------------------------- Errors


@pytest.mark.parametrize(
    "fields, listed",
    [
        (dict(norm="layer"), "norm='layer' instead of 'rms'"),
        (dict(attention_windows=(8,)), "attention_windows=(8,) instead of ()"),
        (
            dict(position="alibi", use_bias=True),
            "position='alibi' instead of 'rope', use_bias=True instead of False",
        ),
    ],
)
def test_refuses_other_blocks(fields, listed, tmp_path):
    """All fields at once, so that nobody changes one after the other."""
    model = build("gpt", **{**BLOCK, **fields})
    with pytest.raises(UserError) as refusal:
        gguf_export.write(tmp_path / "file", "name", trained(model))
    assert str(refusal.value) == (
        "--to=gguf: this gpt cannot be a GGUF file, models with the block of Llama or Qwen3 can "
        f"(config.model: {listed}); use --to=hf"
    )


def test_refuses_other_architectures(tmp_path):
    model = build("pgpt", num_layers=2)
    with pytest.raises(UserError, match=r"this pgpt cannot .*architecture='pgpt' instead of 'gpt'"):
        gguf_export.write(tmp_path / "file", "name", trained(model))


def test_refuses_other_tokenizers(tmp_path):
    with pytest.raises(
        UserError,
        match="of the kind 'symbols', supported are bytes, gpt2, sentencepiece; use --to=hf",
    ):
        gguf_export.write(
            tmp_path / "file", "name", trained(build("gpt", **BLOCK), None, Symbols(["a"]))
        )


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (
            lambda: spaced_tokenizer(False),
            "SentencePiece model, which has no byte_fallback; use --to=hf",
        ),
        (lambda: small_sentencepiece(model_type="unigram"), "which is not of the type bpe"),
        (lambda: small_sentencepiece(remove_extra_whitespaces=True), "which removes spaces"),
        (
            lambda: small_sentencepiece(normalization_rule_name="nmt_nfkc"),
            "which normalizes characters",
        ),
        (
            lambda: small_sentencepiece(treat_whitespace_as_suffix=True),
            "which has treat_whitespace_as_suffix",
        ),
        (
            lambda: small_sentencepiece(user_defined_symbols=["cat"]),
            "which has user-defined pieces",
        ),
    ],
)
def test_refuses_sentencepiece_models_that_llama_cpp_lacks(tokenizer, message, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    with pytest.raises(UserError, match=message):
        model = build("gpt", **BLOCK | {"vocab_size": 512})
        gguf_export.write(tmp_path / "file", "name", trained(model, None, tokenizer()))
    assert not any(tmp_path.iterdir())


BEYOND_FLOAT16 = (
    "--dtype: output.weight has weights beyond 65,504, the limit of float16; use --dtype=float32"
)


@pytest.mark.parametrize(
    "weight, dtype, message",
    [
        (1e5, "float16", BEYOND_FLOAT16),
        (-np.inf, "float32", "output.weight: has infinite or NaN weights"),
        (np.nan, "q8_0", "output.weight: has infinite or NaN weights"),
    ],
)
def test_refuses_weights_that_the_file_cannot_hold(weight, dtype, message, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    model = build("gpt", **BLOCK)
    params = init(model)
    params = {**params, "head": np.array(params["head"])}
    params["head"][3, 4] = weight
    with pytest.raises(UserError, match=message):
        gguf_export.write(tmp_path / "file", "name", trained(model, params), dtype)
    assert not any(tmp_path.iterdir())


def test_without_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"gguf is not installed; run pip install .*\[gguf\]"):
        gguf_export.write(tmp_path / "file", "name", trained(build("gpt", **BLOCK)))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Returns the workdir of a small llama. Tests must not change it."""
    folder = tmp_path_factory.mktemp("gguf") / "run"
    folder.mkdir()
    model = build("gpt", **BLOCK, rank_ratio=0.5)
    write_imported(folder, ImportedModel(model, init(model), Bytes()), {})
    return folder


def test_command(run_folder, tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    output = tmp_path / "new" / "model.gguf"
    result = call(
        "convert", "--to=gguf", f"--workdir={run_folder}", f"--output={output}", "--dtype=q8_0"
    )
    assert (result.returncode, result.stderr) == (0, "")
    llama = "gpt (mlp gated, norm rms, position rope)"
    assert result.stdout.startswith(f"{output}: {llama} of step 0, ") and result.stdout.endswith(
        " parameters, as llama in q8_0 (2 matrices in float16, because 32 does not divide their "
        "rows); its low-rank matrices are exported as full matrices\n"
    )
    assert [path.name for path in output.parent.iterdir()] == ["model.gguf"]
    assert gguf.GGUFReader(output).fields["general.name"].contents() == "model"
    again = call("convert", "--to=gguf", f"--workdir={run_folder}", f"--output={output}")
    assert (again.returncode, again.stderr) == (
        1,
        f"error: --output={output}: exists; choose another name\n",
    )


@pytest.mark.slow
def test_remote_file(run_folder, bucket, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    files = bucket / "new" / "model.gguf", tmp_path / "model.gguf"
    for file in files:
        result = call("convert", "--to=gguf", f"--workdir={run_folder}", f"--output={file}")
        assert (result.returncode, result.stderr) == (0, "")
    assert files[0].read_bytes() == files[1].read_bytes() != b""
    again = call("convert", "--to=gguf", f"--workdir={run_folder}", f"--output={files[0]}")
    assert (again.returncode, again.stderr) == (
        1,
        f"error: --output={files[0]}: exists; choose another name\n",
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--output={}/model"],
            "--output={}/model: must be the name of a new file that ends in .gguf",
        ),
        ([], "--output: must be the name of a new file that ends in .gguf"),
        (
            ["--output={}/m.gguf", "--tokenizer=skip"],
            "--tokenizer: cannot be combined with --to=gguf; see --help",
        ),
        (["--output={}/m.gguf", "--step=7"], "no checkpoint"),
    ],
)
def test_refuses_other_arguments(arguments, message, run_folder, tmp_path):
    result = call(
        "convert",
        "--to=gguf",
        f"--workdir={run_folder}",
        *(argument.format(tmp_path) for argument in arguments),
    )
    assert result.returncode == 1 and message.format(tmp_path) in result.stderr
    assert not any(tmp_path.iterdir())


def test_exports_to_the_same_file_at_the_same_time(tmp_path):
    """The last one that ends replaces the file. Its mode is that of new files."""
    path = tmp_path / "new" / "m.gguf"
    with atomic_file(path) as slow:
        slow.write_bytes(b"slow")
        with atomic_file(path) as fast:
            fast.write_bytes(b"fast")
        assert path.read_bytes() == b"fast"
    assert path.read_bytes() == b"slow" and list(path.parent.iterdir()) == [path]
    (other := tmp_path / "other").touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_failed_export_leaves_nothing(run_folder, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="needs gguf (extra gguf)")

    def fail(path, *arguments):
        path.write_bytes(b"part of a file")
        raise UserError("a bad weight")

    monkeypatch.setattr(gguf_export, "write", fail)
    result = call(
        "convert", "--to=gguf", f"--workdir={run_folder}", f"--output={tmp_path}/new/m.gguf"
    )
    assert (result.returncode, result.stderr) == (1, "error: a bad weight\n") and not any(
        tmp_path.iterdir()
    )


@pytest.mark.parametrize("end", ["<|end|>", "{{ eos_token }}", ""])
def test_chat_templates_and_their_ends(end, tmp_path):
    """llama.cpp writes chats with this template, and ends an answer at this token, too."""
    tokenizer = small_sentencepiece(control_symbols=["<|end|>"])
    model = build("gpt", **BLOCK)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}"
    template = ChatTemplate(source, tokenizer.special_tokens) if end else None
    _, field = read_file(tmp_path / "file", model, init(model), tokenizer, template=template)
    if not end:
        with pytest.raises(KeyError):
            field("tokenizer.chat_template")
        return
    assert field("tokenizer.chat_template") == source
    if end == "<|end|>":
        ids = tokenizer.special_tokens.ids
        assert field("tokenizer.ggml.eot_token_id") == ids["<|end|>"] != tokenizer.end_of_text
    else:
        with pytest.raises(KeyError):
            field("tokenizer.ggml.eot_token_id")
