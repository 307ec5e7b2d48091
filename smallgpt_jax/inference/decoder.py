"""Decoding with a cache: each new token computes one position.

`decode_step` is one jitted function for every architecture. It feeds each row's new tokens to the model and samples one
more per row; prompts, later turns of a conversation and single tokens differ only in the number of new tokens.
`decode_steps` is a loop over it.
"""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.inference import layout
from smallgpt_jax.inference.sampling import Sampling, sample
from smallgpt_jax.models.context import Context

MAX_STEPS = 4  # tokens per row and call of `decode_steps`; a row that ends among them wastes the rest
MIN_BUCKET = 16  # lengths are rounded up to 16, 32, 48, 64, 96, 128, 192, …: one compiled program each


def bucket(length: int, longest: int) -> int:
    """Returns the length that `length` tokens are padded to, at most `longest`."""
    step = max(MIN_BUCKET, 1 << max(0, (length - 1).bit_length() - 2))
    return min(longest, -(-length // step) * step)


@functools.partial(
    jax.jit,
    static_argnames=("model", "cache_length", "vocab_size", "unpenalized"),
    donate_argnames=("cache", "seen_BxV"))
def decode_step(weights, cache, seen_BxV, tokens_BxT, start_B, count_B, seed, stream_Bx2, sampling: Sampling, *,
                model: models.LanguageModel, cache_length: int, vocab_size: int, unpenalized: int | None):
    """Feeds the first `count_B` of each row's tokens, from position `start_B` on, and samples the next token.

    Returns the updated cache, the updated `seen_BxV` (the tokens in each row's context; None without a repetition
    penalty), the sampled tokens (B,) int32, and the logits (B, vocab_size) float32 before sampling. An empty `cache`
    creates one of `cache_length` positions. Donates `cache` and `seen_BxV`. The token `unpenalized` never counts as
    seen. The sample of a row without new tokens is meaningless. A row's sample depends only on the seed, the row's two
    numbers in `stream_Bx2`, its tokens and the settings.
    """
    context = Context(cache_length=cache_length, start_B=start_B, length_B=count_B)
    logits_BxV, kept = model.apply({**layout.unpack(weights), "cache": cache}, tokens_BxT, context,
                                   method="next_logits", mutable=["cache", "calls"])
    logits_BxV = logits_BxV[:, :vocab_size]  # the embedding may have more rows than the tokenizer has ids
    if seen_BxV is not None:
        is_padding = jnp.arange(tokens_BxT.shape[1])[None] >= count_B[:, None]
        rows = jnp.arange(len(tokens_BxT))[:, None]
        seen_BxV = seen_BxV.at[rows, jnp.where(is_padding, vocab_size, tokens_BxT)].set(True, mode="drop")
        if unpenalized is not None:
            seen_BxV = seen_BxV.at[:, unpenalized].set(False)
    return kept["cache"], seen_BxV, sample_tokens(logits_BxV, seen_BxV, seed, stream_Bx2, sampling), logits_BxV


@functools.partial(
    jax.jit,
    static_argnames=("model", "cache_length", "vocab_size", "unpenalized"),
    donate_argnames=("cache", "seen_BxV"))
def decode_steps(weights, cache, seen_BxV, token_B, start_B, count_B, steps, seed, stream_Bx2,
                 sampling: Sampling, **settings):
    """Runs `decode_step` `steps` times, at most MAX_STEPS: first on `token_B`, then on the token just sampled. The loop
    runs on the device; a return to the host after each step would add a tenth or more to a small model's step time.

    Rows whose `count_B` is 0 are left unchanged. Returns the cache, the mask of tokens seen so far, and the sampled
    tokens, (B, MAX_STEPS) int32, of which the first `steps` are valid.
    """
    def step(i, carried):
        cache, seen_BxV, token_B, drawn_BxN = carried
        cache, seen_BxV, token_B, _ = decode_step(
            weights, cache, seen_BxV, token_B[:, None], start_B + i * count_B, count_B, seed,
            stream_Bx2.at[:, 1].add(jnp.uint32(i)), sampling, **settings)
        return cache, seen_BxV, token_B, drawn_BxN.at[:, i].set(token_B)

    drawn_BxN = jnp.zeros((len(token_B), MAX_STEPS), jnp.int32)
    cache, seen_BxV, _, drawn_BxN = jax.lax.fori_loop(0, steps, step, (cache, seen_BxV, token_B, drawn_BxN))
    return cache, seen_BxV, drawn_BxN


@jax.jit
def sample_tokens(logits_BxV, seen_BxV, seed, stream_Bx2, sampling: Sampling):
    """Returns a sample per row, (B,) int32, each from the random stream that its two numbers name."""
    key = jax.random.key(seed)
    key_B = jax.vmap(lambda stream: jax.random.fold_in(jax.random.fold_in(key, stream[0]), stream[1]))(
        stream_Bx2)
    return sample(logits_BxV, seen_BxV, sampling, key_B)


def cache_shapes(model: models.LanguageModel, weights, rows: int, cache_length: int):
    """Returns the shapes and dtypes of a cache without allocating it."""
    ones_B = jnp.ones(rows, jnp.int32)
    context = Context(cache_length=cache_length, start_B=ones_B, length_B=ones_B)
    _, kept = jax.eval_shape(
        lambda weights: model.apply(layout.unpack(weights), ones_B[:, None], context, method="next_logits",
                                    mutable=["cache", "calls"]), weights)
    return kept["cache"]


class DecodeSession:
    """Rows of tokens that a model continues, and their cache.

    `ids` has the tokens of each row; append to them, then call `sample`. When a row outgrows the model's context, all
    but its newest half context is dropped and the rest is prefilled again.

    The cache has B·S·2·Σ(width of each block) elements of the model's dtype (B rows, S cached positions), and for cgpt
    B·(conv_kernel − 1)·Σ(input width of each convolution) more.
    """

    def __init__(self, model: models.LanguageModel, weights, vocab_size: int, ids: Sequence[Sequence[int]],
                 seed: int = 0, unpenalized: int | None = None, samples: Sequence[int] | None = None):
        """`weights` as `layout.pack` returns them; `ids` with at least one token per row. The repetition penalty does
        not apply to `unpenalized`. `samples` gives rows with the same text different random streams."""
        self.model, self.weights, self.vocab_size = model, weights, vocab_size
        self.ids = [list(row) for row in ids]
        self._seed, self._unpenalized = np.uint32(seed), unpenalized
        # A row's random stream depends on its initial text, not on its place in the batch.
        self._stream = np.array([zlib.crc32(np.array(row[1:], np.int32).tobytes()) for row in ids], np.uint32)
        if samples is not None:
            self._stream += np.array(samples, np.uint32)
        self._dropped = np.zeros(len(ids), np.int32)
        self._cache, self._cache_length, self._seen = {}, 0, None
        self._cached = np.zeros(len(ids), np.int32)  # tokens of each row that are in the cache

    def repeat(self, times: int, sampling: Sampling) -> None:
        """Repeats each row `times` times, with samples 0, 1, …; each prompt is prefilled only once."""
        if times == 1:
            return
        if max(map(len, self.ids)) > 1:
            last = [row.pop() for row in self.ids]
            self.sample(sampling)
            for row, token in zip(self.ids, last):
                row.append(token)
        rows = len(self.ids)
        self.ids = [list(row) for row in self.ids for _ in range(times)]
        self._stream = np.repeat(self._stream, times) + np.tile(np.arange(times, dtype=np.uint32), rows)
        self._cached, self._dropped = np.repeat(self._cached, times), np.repeat(self._dropped, times)
        self._cache, self._seen = jax.tree.map(
            functools.partial(_repeat_rows, rows=rows, times=times), (self._cache, self._seen))

    def reserve(self, new_tokens: int) -> None:
        """Grows the cache for `new_tokens` more tokens per row, so that sampling them does not have to."""
        context = self.model.config.context_length
        needed = bucket(max(map(len, self.ids)) + new_tokens, context)
        if needed > self._cache_length:
            if self._cache:
                longer = cache_shapes(self.model, self.weights, len(self.ids), needed)
                self._cache = jax.tree.map(_pad_to, self._cache, longer)
            self._cache_length = needed

    def sample(self, sampling: Sampling) -> jax.Array:
        """Feeds each row's new tokens to the model and returns the next tokens, (B,) int32, not yet computed.

        If no row has new tokens, samples again from the last logits. If only some have, the others are finished: their
        samples are meaningless and they cannot be continued.
        """
        return self.sample_with_logits(sampling)[0]

    def sample_with_logits(self, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        """Returns what `sample` does, and the logits before sampling, (B, V) float32."""
        context = self.model.config.context_length
        if max(map(len, self.ids)) > context:
            self._drop_oldest()
        new, counts, streams = self._new_tokens()
        seen_BxV, longest = self._seen_tokens(sampling), max(map(len, new))
        if longest == 0:
            return sample_tokens(self._logits, seen_BxV, self._seed, streams, sampling), self._logits
        self.reserve(0)
        tokens_BxT = np.zeros((len(new), 1 if longest == 1 else bucket(longest, context)), np.int32)
        for padded, row in zip(tokens_BxT, new):
            padded[:len(row)] = row
        self._cache, self._seen, drawn_B, self._logits = decode_step(
            self.weights, self._cache, seen_BxV, tokens_BxT, self._cached, counts, self._seed, streams,
            sampling, **self._static_arguments())
        self._cached = self._cached + counts
        return drawn_B, self._logits

    def sample_steps(self, sampling: Sampling, max_steps: int) -> np.ndarray:
        """Feeds each row's new tokens to the model and returns the next tokens, (B, N) int32, N ≤ `max_steps`.

        Each token is sampled as if the row continued with those before it: append all N, or the row is finished (see
        `sample`). N is 1 after a prompt, and up to MAX_STEPS after a single new token.
        """
        new, counts, streams = self._new_tokens()
        longest = max((len(row) for row, count in zip(self.ids, counts) if count), default=0)
        steps = min(max_steps, MAX_STEPS, self.model.config.context_length + 1 - longest)
        if not self._cache or max(counts) != 1 or steps < 1:
            return np.asarray(self.sample(sampling))[:, None]
        self.reserve(steps - 1)
        token_B = np.array([row[0] if row else 0 for row in new], np.int32)
        self._cache, self._seen, drawn_BxN = decode_steps(
            self.weights, self._cache, self._seen_tokens(sampling), token_B, self._cached, counts, steps,
            self._seed, streams, sampling, **self._static_arguments())
        self._cached, self._logits = self._cached + steps * counts, None
        return np.asarray(drawn_BxN)[:, :steps]

    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    @property
    def dropped(self) -> int:
        """The number of tokens dropped from the context, over all rows."""
        return int(self._dropped.sum())

    def _new_tokens(self):
        """Returns each row's tokens that are not in the cache, their number, (B,), and the rows' `stream_Bx2`."""
        new = [row[start:] for row, start in zip(self.ids, self._cached)]
        counts = np.array([len(row) for row in new], np.int32)
        positions = self._dropped + self._cached + counts
        return new, counts, np.stack([self._stream, positions.astype(np.uint32)], axis=1)

    def _static_arguments(self) -> dict:
        return {"model": self.model, "cache_length": self._cache_length, "vocab_size": self.vocab_size,
                "unpenalized": self._unpenalized}

    def _drop_oldest(self) -> None:
        context = self.model.config.context_length
        kept = max(1, context // 2)
        for i, row in enumerate(self.ids):
            if len(row) > context:
                self._dropped[i] += len(row) - kept
                del row[:-kept]
        self._cache, self._seen = {}, None
        self._cached = np.zeros_like(self._cached)

    def _seen_tokens(self, sampling: Sampling):
        """Returns which tokens are in each row's cache, (B, V) bool, or None without a repetition penalty."""
        if sampling.repetition_penalty is None:
            return None
        if self._seen is None:
            seen_BxV = np.zeros((len(self.ids), self.vocab_size), bool)
            for seen, row, cached in zip(seen_BxV, self.ids, self._cached):
                seen[row[:cached]] = True
            if self._unpenalized is not None:
                seen_BxV[:, self._unpenalized] = False
            return jnp.asarray(seen_BxV)
        return self._seen


def _repeat_rows(x, rows: int, times: int):
    """Repeats each of the `rows` parts of the first axis `times` times; a cache has several entries per row there."""
    return jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), times, axis=0).reshape(-1, *x.shape[1:])


def _pad_to(x, target):
    """Pads `x` with zeros at the end of its axes to the shape of `target`."""
    return jnp.pad(x, [(0, longer - size) for size, longer in zip(x.shape, target.shape)])
