"""Measures the costs of inference with a finished run: prefill, decoding steps, and the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from smallgpt_jax import inference
from smallgpt_jax.analysis.budgets import DECODING_BATCHES
from smallgpt_jax.analysis.record import Inference
from smallgpt_jax.devices.chips import device_name
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, timing
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.atomic import write_atomically

INFERENCE_FILE = "inference.json"  # in a workdir's evaluations/
SESSIONS = 3  # timed sessions of decoding
PREFILLS = 7  # timed prefills
STEPS = 32  # maximum number of decoding steps per session


def measure_inference(folder: Path, log=print) -> None:
    """Writes evaluations/inference.json of a run, unless it exists."""
    path = folder / EVALUATION_FOLDER / INFERENCE_FILE
    if typed_json.read_or_none(Inference, path):
        return
    try:
        text_model = inference.load(folder)
    except UserError as error:  # a custom architecture without decoding can still be compared
        log(f"{folder.name}: inference is not measured: {error}")
        return
    measured = inference_cost(text_model, lambda message: log(f"{folder.name}: {message}"))
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(measured, indent=2) + "\n")


def inference_cost(text_model: inference.TextModel, log=print) -> dict[str, Any]:
    """Returns the content of inference.json, without what does not fit in memory."""
    context = text_model.model.config.context_length

    def cache_bytes(length: int) -> int:
        return decoder.num_cache_bytes(text_model.model, length)

    prefill_ms = _quartiles(lambda: time_prefills(text_model))
    log(f"prefill of {context:,} tokens: {_describe(prefill_ms)}")
    # empty and full, because attention reads the whole cache in each step
    decoding = []
    for batch in DECODING_BATCHES:
        for cache in ("empty", "full"):
            step_ms = _quartiles(
                lambda batch=batch, cache=cache: time_steps(text_model, batch, cache)
            )
            log(f"decoding step, batch {batch}, {cache} cache: {_describe(step_ms)}")
            if step_ms:
                decoding.append({"batch": batch, "cache": cache, "step_ms": step_ms})
    return {
        "device": device_name(jax.devices()[0]),
        "dtype": text_model.model.config.dtype,
        "context_length": context,
        "cache_bytes": cache_bytes(context),
        # a difference, because recurrent states and convolutions do not grow with the text
        "cache_bytes_per_token": cache_bytes(2) - cache_bytes(1),
        "prefill_ms": prefill_ms,
        "decoding": decoding,
    }


def _quartiles(timings: Callable[[], list[float]]) -> dict[str, float] | None:
    """Returns the quartiles of what `timings` measures; None if it does not fit in memory."""
    try:
        milliseconds = timings()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    # not the mean: other processes on the machine cause outliers
    low, median, high = map(float, np.percentile(milliseconds, (25, 50, 75)))
    return {"median": median, "low": low, "high": high, "count": len(milliseconds)}


def _describe(milliseconds: dict[str, float] | None) -> str:
    return f"{milliseconds['median']:.4g} ms" if milliseconds else "does not fit in memory"


def time_prefills(text_model: inference.TextModel) -> list[float]:
    """Returns the milliseconds of prefills of one text as long as the context."""
    prompt = random_tokens(text_model, text_model.model.config.context_length)
    milliseconds = []
    for _ in range(PREFILLS + 1):
        _, seconds = timing.time_prefill(_start_session(text_model, prompt))
        milliseconds.append(1000 * seconds)
    return milliseconds[1:]  # the first call compiles


def time_steps(text_model: inference.TextModel, batch: int, cache: str) -> list[float]:
    """Returns milliseconds per decoding step of `batch` texts, one value per call of the decoder.

    The steps are those after the first token, or the last ones before the context is full. All
    texts have the same prompt, which is prefilled once. The time does not depend on the tokens, not
    even in a mixture of experts, whose products have static sizes.
    """
    context = text_model.model.config.context_length
    steps = min(STEPS, context // 2)  # leaves room for a prompt in a tiny context
    prompt = random_tokens(text_model, context - steps if cache == "full" else 1)
    milliseconds = []
    for session_number in range(SESSIONS + 1):
        session = _start_session(text_model, prompt)
        session.repeat(batch, timing.GREEDY)
        session.reserve(steps)
        sampled_Bx1, _ = timing.time_prefill(session)
        calls = timing.time_decoding(session, sampled_Bx1, steps)
        if session_number > 0:  # the first session compiles
            milliseconds += [1000 * seconds / count for count, seconds in calls]
    return milliseconds


def _start_session(text_model: inference.TextModel, prompt: list[int]) -> decoder.DecodeSession:
    # without end_of_text, which would end rows: all steps are those of a full batch
    vocab_size = text_model.tokenizer.vocab_size
    compiled_for = decoder.Decoder(text_model.model, vocab_size)
    return decoder.DecodeSession(compiled_for, text_model.weights, [prompt])


def random_tokens(text_model: inference.TextModel, count: int) -> list[int]:
    return np.random.default_rng(0).integers(text_model.tokenizer.vocab_size, size=count).tolist()
