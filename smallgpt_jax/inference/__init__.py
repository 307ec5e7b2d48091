"""Text from a trained model: load a workdir, generate."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax import checkpoint, models, workdir
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model with its weights and its tokenizer."""

    model: models.LanguageModel
    params: Any
    tokenizer: tokenizers.Tokenizer


def load(folder: str | Path, step: int | None = None) -> TextModel:
    """The model of a workdir, as of `step` (the newest checkpoint), on the default device.

    Raises UserError if the workdir holds no run, or no checkpoint of it.
    """
    folder = Path(folder).expanduser()
    config = workdir.read_config(folder)
    model = models.build(**config.model)
    if not (folder / workdir.CHECKPOINT_FOLDER).is_dir():
        raise UserError(f"{folder}: this run has no checkpoint yet")
    checkpoints = checkpoint.open_checkpoints(folder / workdir.CHECKPOINT_FOLDER)
    steps = sorted(checkpoints.all_steps())
    if not steps or step not in (None, *steps):
        raise UserError(f"{folder}: no checkpoint{f' of step {step}' if step else ''}; there are: "
                        f"{', '.join(map(str, steps)) or 'none yet'}")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
                            nn.unbox(models.abstract_params(model)))
    params = checkpoint.restore_params(checkpoints, steps[-1] if step is None else step, abstract)
    checkpoints.close()
    return TextModel(model, params, tokenizers.load(folder / workdir.TOKENIZER_FOLDER))


def generate(
    text_model: TextModel, prompt: str, max_new_tokens: int, temperature: float = 1.0,
    top_k: int | None = None, seed: int = 0,
) -> Iterator[str]:
    """Continues `prompt`, yielding text piece by piece; ends at end-of-text.

    Each token is drawn from softmax(logits / temperature) over the `top_k` likeliest (None: all);
    temperature 0 takes the likeliest. The model sees the last context_length tokens. Cost: a whole
    forward pass a token. Raises UserError for settings out of range.
    """
    if temperature < 0:
        raise UserError(f"temperature={temperature}: must not be negative")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: must be at least 1")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
    tokenizer = text_model.tokenizer
    ids = [tokenizer.end_of_text, *tokenizer.encode([prompt])[0]]
    generated, shown = [], ""
    for token in _next_tokens(text_model, ids, max_new_tokens, temperature, top_k, seed):
        if token == tokenizer.end_of_text:
            break
        generated.append(token)
        text = tokenizer.decode(generated)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may take several tokens
            yield text[len(shown):]
            shown = text
    yield tokenizer.decode(generated)[len(shown):]


def _next_tokens(text_model: TextModel, ids: list[int], count: int, temperature, top_k, seed):
    context = text_model.model.config.context_length
    key = jax.random.key(seed)
    for position in range(count):
        visible = ids[-context:]
        tokens_1xT = np.zeros((1, context), np.int32)  # NumPy's: JAX would compile for every length
        tokens_1xT[0, :len(visible)] = visible
        token = _next_token(
            text_model.model, text_model.tokenizer.vocab_size, top_k, text_model.params, tokens_1xT,
            len(visible), temperature, jax.random.fold_in(key, position))
        ids = [*ids, int(token)]
        yield ids[-1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _next_token(model, vocab_size, top_k, params, tokens_1xT, length, temperature, key):
    """The token after the first `length` of `tokens_1xT`, a scalar."""
    logits_V = model.apply({"params": params}, tokens_1xT)[0, length - 1, :vocab_size]
    if top_k is not None:
        least = jax.lax.top_k(logits_V, min(top_k, vocab_size))[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature == 0, jnp.argmax(logits_V), drawn)
