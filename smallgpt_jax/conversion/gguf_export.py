"""Exports models as GGUF files, which llama.cpp and the programs built on it run.

llama.cpp has its own code for each architecture. A gpt with the block of Llama or Qwen3
(conversion/llama.py) is exported; other models are refused. Tokenizers are exported if llama.cpp
has their algorithm. As in `generate`, a text begins with the begin-of-text token, and rows of the
embedding and the head without a token are never sampled: the file does not contain them.
"""

from pathlib import Path

import numpy as np

from smallgpt_jax.conversion import llama, tensors
from smallgpt_jax.conversion.config_json import other_fields
from smallgpt_jax.conversion.tokenizer_files import byte_pairs, sentencepiece_spec
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.special_tokens import END_OF_TEXT
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.inference import TrainedModel
from smallgpt_jax.models import ModelConfig

# Our names of the dtypes → GGUF's names of the dtype of matrices and of the type of the file.
DTYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
_Q8_BLOCK = 32  # numbers of a row that share a scale
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")  # one row per token
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of tokens, in GGUF as in SentencePiece


def write(
    path: Path,
    name: str,
    trained: TrainedModel,
    dtype: str = "float32",
    chat_template: ChatTemplate | None = None,
) -> str:
    """`dtype`, one of DTYPES, is that of matrices; vectors are float32. Returns a description."""
    model, tokenizer = trained.model, trained.tokenizer
    config = model.config
    _, file_type = DTYPES[dtype]
    _require_support(config, tokenizer)
    gguf = import_library("gguf", "gguf")
    writer = gguf.GGUFWriter(path, architecture(config))
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, config)
    _add_tokenizer(writer, tokenizer)
    if chat_template:
        _add_chat_template(writer, chat_template, tokenizer)
    ours = tensors.from_params(model, trained.params)
    num_wider = 0
    for tensor_name, x in _llama_cpp_tensors(gguf, config, ours, tokenizer.vocab_size).items():
        stored = dtype if x.ndim > 1 else "float32"
        if stored == "q8_0" and x.shape[-1] % _Q8_BLOCK:
            stored = "float16"
            num_wider += 1
        _add_tensor(gguf, writer, tensor_name, x, stored)
    # the order of the file, which GGUFWriter requires
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    description = f"{architecture(config)} in {dtype}"
    if num_wider:
        description += (
            f" ({num_wider} matrices in float16, because {_Q8_BLOCK} does not divide their rows)"
        )
    return description


def _add_tokenizer(writer, tokenizer: Tokenizer) -> None:
    _TOKENIZERS[tokenizer.kind](writer, tokenizer)
    writer.add_bos_token_id(tokenizer.begin_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _add_chat_template(writer, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    # llama.cpp puts the begin-of-text token before what the template writes, as `generate` does.
    writer.add_chat_template(template.source)
    if template.end_of_turn not in (None, tokenizer.end_of_text):
        writer.add_eot_token_id(template.end_of_turn)


def architecture(config: ModelConfig) -> str:
    """Returns llama.cpp's name of the model's architecture."""
    return "qwen3" if config.qk_norm else "llama"


def _require_support(config: ModelConfig, tokenizer: Tokenizer) -> None:
    others = other_fields(config, llama.FIXED, llama.FREE)
    if others:
        listed = ", ".join(
            f"{field}={value!r} instead of {needed!r}" for field, (value, needed) in others.items()
        )
        raise UserError(
            f"--to=gguf: this {config.architecture} cannot be a GGUF file, models with the block of "
            f"Llama or Qwen3 can (config.model: {listed}); use --to=hf"
        )
    if tokenizer.kind not in _TOKENIZERS:
        raise UserError(
            f"--to=gguf: the run's tokenizer is of the kind {tokenizer.kind!r}, supported are "
            f"{', '.join(_TOKENIZERS)}; use --to=hf, and llama.cpp's convert_hf_to_gguf.py, which "
            "knows some published tokenizers"
        )


def _add_sizes(writer, config: ModelConfig) -> None:
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)


def _llama_cpp_tensors(gguf, config: ModelConfig, ours: tensors.Tensors, vocab_size: int) -> dict:
    """Returns {llama.cpp's name: tensor}. Linear weights have the shape (outputs, inputs)."""
    model_arch = gguf.MODEL_ARCH[architecture(config).upper()]
    names = gguf.get_tensor_name_map(model_arch, config.num_layers)
    theirs = {}
    for name, x in llama.to_hugging_face(config, ours).items():
        if name in _EMBEDDINGS:
            x = x[:vocab_size]
        if architecture(config) == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # We rotate the entries i and i + K/2 of each head (models/positions.py), and so does
            # llama.cpp's qwen3; its llama rotates 2i and 2i + 1.
            halves = x.reshape(-1, 2, config.head_width // 2, x.shape[-1])
            x = halves.swapaxes(1, 2).reshape(x.shape)
        theirs[names.get_name(name, try_suffixes=(".weight",))] = x
    return theirs


def _add_tensor(gguf, writer, name: str, x: np.ndarray, dtype: str) -> None:
    if not np.isfinite(x).all():
        raise UserError(
            f"{name}: has infinite or NaN weights; export an earlier checkpoint (--step)"
        )
    # q8_0 multiplies integers of up to 127 with a float16
    limit = {"float32": np.inf, "float16": 65504, "q8_0": 127 * 65504}[dtype]
    if np.abs(x).max() > limit:
        raise UserError(
            f"--dtype: {name} has weights beyond {limit:,}, the limit of {dtype}; use "
            "--dtype=float32"
        )
    kind = gguf.GGMLQuantizationType[DTYPES[dtype][0]]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(x), kind), raw_dtype=kind)


def _add_byte_pairs(writer, tokenizer: Tokenizer) -> None:
    ids, merges = byte_pairs(tokenizer)
    # A file must have a merge. This one never applies, because merging begins with characters.
    merges = merges or [f"{END_OF_TEXT} {END_OF_TEXT}"]
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token == END_OF_TEXT else _NORMAL for token in tokens])
    writer.add_token_merges(merges)


def _add_sentencepiece(writer, tokenizer: Tokenizer) -> None:
    # llama.cpp merges pieces by score, encodes other characters as bytes, and normalizes nothing
    # but spaces.
    from sentencepiece.sentencepiece_model_pb2 import TrainerSpec

    spec = sentencepiece_spec(tokenizer)
    trainer, rules = spec.trainer_spec, spec.normalizer_spec
    unsupported = {
        "is not of the type bpe": trainer.model_type != TrainerSpec.BPE,
        "has no byte_fallback": not trainer.byte_fallback,
        "normalizes characters": rules.precompiled_charsmap,
        "removes spaces (remove_extra_whitespaces)": rules.remove_extra_whitespaces,
        "has treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        # llama.cpp would find other pieces first
        "has user-defined pieces": any(piece.type == _USER_DEFINED for piece in spec.pieces),
    }
    for what, applies in unsupported.items():
        if applies:
            raise UserError(
                "--to=gguf: llama.cpp cannot encode as the run's SentencePiece model, which "
                f"{what}; use --to=hf"
            )
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in spec.pieces])
    writer.add_token_types([piece.type for piece in spec.pieces])
    writer.add_token_scores([piece.score for piece in spec.pieces])
    writer.add_unk_token_id(tokenizer.unknown)
    writer.add_add_space_prefix(rules.add_dummy_prefix)


_TOKENIZERS = {
    "bytes": _add_byte_pairs,
    "gpt2": _add_byte_pairs,
    "sentencepiece": _add_sentencepiece,
}
