"""llama.cpp runs exported GGUF files: the same token ids, greedy texts and probabilities as
here.
"""

import json
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init
from gguf_helpers import BLOCK, small_gpt2, small_sentencepiece

from smallgpt_jax.conversion import gguf_export
from smallgpt_jax.data.tokenizer_folder import TRIAL_TEXTS
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.inference import TrainedModel, layout
from smallgpt_jax.inference.decoder import Decoder, DecodeSession
from smallgpt_jax.inference.timing import GREEDY

pytest.importorskip("gguf", reason="needs gguf (extra llama-cpp)")
llama_cpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp (extra llama-cpp)")

MODELS = {  # tokenizer, fields
    "llama, SentencePiece": (
        small_sentencepiece,
        dict(num_kv_heads=2, head_dim=12, norm_epsilon=1e-3),
    ),
    "llama, SentencePiece with a space before each text": (
        lambda: small_sentencepiece(add_dummy_prefix=True, bos_id=2, bos_piece="<s>"),
        {},
    ),
    "qwen3, GPT-2": (small_gpt2, dict(qk_norm=True, num_kv_heads=1, head_dim=16, rope_base=500.0)),
    "qwen3, bytes": (Bytes, dict(qk_norm=True, tie_embeddings=True)),
}
PROMPTS = "the cat", " on 12 mats", "a dog,\n  here"
NEW_TOKENS = 200


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Returns a model, its parameters, its tokenizer, and a function that sends a request to
    llama.cpp.
    """
    make_tokenizer, fields = MODELS[request.param]
    model, tokenizer = build("gpt", **{**BLOCK, "context_length": 256, **fields}), make_tokenizer()
    params = lively(model, tokenizer)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    gguf_export.write(path, "small", TrainedModel(model, params, {}, tokenizer, 0))
    settings = llama_cpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel = 256, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    # By default, the cache is in float16, and the flash attention for CPUs rounds to it.
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama_cpp.Server(settings)

    def request(name: str, **fields) -> dict:
        message = urllib.request.Request(
            f"{server.listening_address}/{name}",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(message, timeout=60) as answer:
            return json.load(answer)

    return model, params, tokenizer, request


def lively(model, tokenizer):
    """Returns large random weights, with which greedy texts do not repeat and do not end."""
    params = jax.tree.map(
        lambda x: x * (5 if x.ndim > 2 else 1), init(model)
    )  # matrices in blocks, without norms
    table = "token_embedding" if model.config.tie_embeddings else "head"
    return {**params, table: 5 * params[table].at[tokenizer.end_of_text].set(0.0)}


def test_token_ids(pair):
    """llama.cpp puts the begin-of-text token first, and encodes the names of special tokens as text
    if asked.
    """
    _, _, tokenizer, request = pair
    for text in TRIAL_TEXTS:
        ids = request("tokenize", content=text, add_special=True, parse_special=False)["tokens"]
        assert ids == [tokenizer.begin_of_text, *tokenizer.encode([text])[0].tolist()], text


def test_greedy_texts(pair):
    model, params, tokenizer, request = pair
    for prompt in PROMPTS:
        ids = [tokenizer.begin_of_text, *tokenizer.encode([prompt])[0].tolist()]
        decoder = Decoder(model, tokenizer.vocab_size)
        session = DecodeSession(decoder, layout.pack(model, params), [ids])
        session.reserve(NEW_TOKENS)
        while left := len(ids) + NEW_TOKENS - len(session.ids[0]):
            session.ids[0] += session.sample_steps(GREEDY, left)[0].tolist()
        ours = session.ids[0][len(ids) :]
        answer = request(
            "completion", prompt=prompt, n_predict=NEW_TOKENS, temperature=0, return_tokens=True
        )
        assert answer["tokens"] == ours
        assert len(set(ours)) > 10


def test_perplexity(pair):
    """The perplexity of a text differs by less than 0.001%. With llama.cpp's defaults, it would be
    up to 0.03%.
    """
    model, params, tokenizer, request = pair
    text = "the cat sat on the mat\nand that is that, on 12 other paths"
    ids = [tokenizer.begin_of_text, *tokenizer.encode([text])[0].tolist()]
    logits_TxV = np.float64(
        forward(model, params, jnp.asarray([ids]))[0, :, : tokenizer.vocab_size]
    )
    log_p_TxV = logits_TxV - np.log(np.exp(logits_TxV).sum(1, keepdims=True))
    ours = -np.mean([log_p_TxV[i, token] for i, token in enumerate(ids[1:])])
    theirs, letter = [], tokenizer.encode(["a"])[0].tolist()[-1]
    for i in range(1, len(ids)):
        # The bias does not change the probabilities. Without it, a part of a character may be
        # sampled, which the server holds back.
        answer = request(
            "completion",
            prompt=ids[:i],
            n_predict=1,
            n_probs=tokenizer.vocab_size,
            temperature=0,
            logit_bias=[[letter, 1000]],
        )
        found = {
            entry["id"]: entry["logprob"]
            for entry in answer["completion_probabilities"][0]["top_logprobs"]
        }
        theirs.append(-found[ids[i]])
    assert np.exp(np.mean(theirs)) == pytest.approx(np.exp(ours), rel=1e-5)
