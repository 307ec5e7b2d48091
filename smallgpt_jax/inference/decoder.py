"""Decoding with a cache: for each new token, the model computes one position instead of the whole
text.

`decode_step` is one jitted function for all architectures, for prompts, turns of a conversation and
single tokens.
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

# The maximum number of steps per call of `decode_steps`. It is small, because tokens sampled after
# the end of a text are wasted.
MAX_STEPS = 4
# lengths are padded to 16, 32, 48, 64, 96, 128, 192, …; one program is compiled per padded length
MIN_BUCKET = 16


def bucket(length: int, longest: int) -> int:
    """Returns the padded length of a row of `length` tokens, at most `longest`."""
    step = max(MIN_BUCKET, 1 << max(0, (length - 1).bit_length() - 2))
    return min(longest, -(-length // step) * step)


def next_logits(model: models.LanguageModel, weights, cache, tokens_BxT, context: Context):
    """Returns the logits after the last token, and the collections that the model has changed, such
    as "cache".
    """
    return model.apply(
        {**layout.unpack(weights), "cache": cache},
        tokens_BxT,
        context,
        method="next_logits",
        mutable=["cache", "calls"],
    )


jitted = functools.partial(
    jax.jit,
    static_argnames=("model", "cache_length", "vocab_size", "end_of_text"),
    donate_argnames=("cache", "seen_BxV"),
)


@jitted
def decode_step(
    weights,
    cache,
    seen_BxV,
    tokens_BxT,
    start_B,
    count_B,
    seed,
    stream_Bx2,
    sampling: Sampling,
    prefix_B=None,
    *,
    model: models.LanguageModel,
    cache_length: int,
    vocab_size: int,
    end_of_text: int | None,
):
    """Feeds each row's new tokens to the model and samples the next token per row.

    Args:
        cache: donated; {} creates a cache of `cache_length` positions. seen_BxV: donated bool array
        of the tokens in each row's context; None without a repetition penalty. tokens_BxT: the new
        tokens, padded on the right. start_B: the position of each row's first new token. count_B:
        the number of new tokens per row; rows without new tokens get meaningless samples.
        stream_Bx2: two numbers per row that select the row's random stream. prefix_B: with a new
        cache, the number of tokens per row that see each other (prefix LM), or None. end_of_text: a
        token to which the repetition penalty does not apply, or None.

    Returns the cache, `seen_BxV`, sampled tokens (B,) int32, and the logits before sampling, (B,
    vocab_size) float32. A row's sample depends only on its own tokens, `seed`, `stream_Bx2` and
    `sampling`, not on the other rows.
    """
    prefix_BxT = (
        None if prefix_B is None else jnp.arange(tokens_BxT.shape[1])[None] < prefix_B[:, None]
    )
    context = Context(
        cache_length=cache_length, start_B=start_B, length_B=count_B, prefix_BxT=prefix_BxT
    )
    logits_BxV, kept = next_logits(model, weights, cache, tokens_BxT, context)
    logits_BxV = logits_BxV[
        :, :vocab_size
    ]  # the embedding may have more rows than the tokenizer has ids
    if seen_BxV is not None:
        is_padding = jnp.arange(tokens_BxT.shape[1])[None] >= count_B[:, None]
        rows = jnp.arange(len(tokens_BxT))[:, None]
        seen_BxV = seen_BxV.at[rows, jnp.where(is_padding, vocab_size, tokens_BxT)].set(
            True, mode="drop"
        )
        if end_of_text is not None:
            seen_BxV = seen_BxV.at[:, end_of_text].set(False)
    return (
        kept["cache"],
        seen_BxV,
        sample_tokens(logits_BxV, seen_BxV, seed, stream_Bx2, sampling),
        logits_BxV,
    )


@jitted
def decode_steps(
    weights,
    cache,
    seen_BxV,
    token_B,
    start_B,
    count_B,
    steps,
    seed,
    stream_Bx2,
    sampling: Sampling,
    *,
    end_of_text: int | None,
    **settings,
):
    """Calls `decode_step` `steps` ≤ MAX_STEPS times. A loop on the host would slow a small model by
    10% or more.

    A row ends when it has sampled `end_of_text`, or at once if its `count_B` is 0. From then on,
    its cache gets no more tokens, and its samples are meaningless. Returns the cache, `seen_BxV`,
    the sampled tokens (B, MAX_STEPS) int32, of which `steps` columns are valid, and the number of
    tokens added to the cache per row.
    """

    def step(i, carried):
        cache, seen_BxV, token_B, sampled_BxN, count_B, added_B = carried
        cache, seen_BxV, token_B, _ = decode_step(
            weights,
            cache,
            seen_BxV,
            token_B[:, None],
            start_B + added_B,
            count_B,
            seed,
            stream_Bx2.at[:, 1].add(jnp.uint32(i)),
            sampling,
            end_of_text=end_of_text,
            **settings,
        )
        added_B += count_B
        if end_of_text is not None:
            count_B = jnp.where(token_B == end_of_text, 0, count_B)
        return cache, seen_BxV, token_B, sampled_BxN.at[:, i].set(token_B), count_B, added_B

    sampled_BxN = jnp.zeros((len(token_B), MAX_STEPS), jnp.int32)
    cache, seen_BxV, _, sampled_BxN, _, added_B = jax.lax.fori_loop(
        0, steps, step, (cache, seen_BxV, token_B, sampled_BxN, count_B, jnp.zeros_like(count_B))
    )
    return cache, seen_BxV, sampled_BxN, added_B


@jax.jit
def sample_tokens(logits_BxV, seen_BxV, seed, stream_Bx2, sampling: Sampling):
    key = jax.random.key(seed)
    key_B = jax.vmap(
        lambda stream: jax.random.fold_in(jax.random.fold_in(key, stream[0]), stream[1])
    )(stream_Bx2)
    return sample(logits_BxV, seen_BxV, sampling, key_B)


def cache_shapes(model: models.LanguageModel, weights, rows: int, cache_length: int):
    return new_cache.eval_shape(weights, model=model, rows=rows, cache_length=cache_length)


@functools.partial(jax.jit, static_argnames=("model", "rows", "cache_length"))
def new_cache(weights, *, model: models.LanguageModel, rows: int, cache_length: int):
    """Jitted because JAX then keeps the shapes. It is never run."""
    ones_B = jnp.ones(rows, jnp.int32)
    context = Context(cache_length=cache_length, start_B=ones_B, length_B=ones_B)
    return next_logits(model, weights, {}, ones_B[:, None], context)[1]["cache"]


class DecodeSession:
    """Rows of tokens that a model continues, and their cache.

    Append new tokens to the lists in `ids`, then call `sample`. When a row becomes longer than the
    model's context, only its newest context_length / 2 tokens are kept, and the cache is computed
    again. The prefix of a prefix language model is what the rows contain at the first call of
    `sample`.

    For B rows, the cache has 2·B·Σ(S·G·K) elements of the model's dtype, summed over the blocks: S
    cached positions (at most the attention window), G key–value heads of width K. The cache of a
    cgpt has another B·(conv_kernel − 1)·ΣD elements, summed over the convolutions' input widths D.
    """

    def __init__(
        self,
        model: models.LanguageModel,
        weights,
        vocab_size: int,
        ids: Sequence[Sequence[int]],
        seed: int = 0,
        end_of_text: int | None = None,
        samples: Sequence[int] | None = None,
    ):
        """`weights` are packed (`layout.pack`). `end_of_text` is exempt from the repetition
        penalty.

        Rows with the same text but different numbers in `samples` have different random streams.
        """
        self.model, self.weights, self.vocab_size = model, weights, vocab_size
        self.ids = [list(row) for row in ids]
        self._seed, self._end_of_text = np.uint32(seed), end_of_text
        # A row's random stream depends on its initial text, not on its place in the batch.
        self._stream = np.array(
            [zlib.crc32(np.array(row[1:], np.int32).tobytes()) for row in ids], np.uint32
        )
        if samples is not None:
            self._stream += np.array(samples, np.uint32)
        self._dropped = np.zeros(len(ids), np.int32)
        self._cache, self._cache_length, self._seen, self._logits = {}, 0, None, None
        self._cached = np.zeros(len(ids), np.int32)  # the number of tokens in the cache, per row
        self._prefix: np.ndarray | None = (
            None  # with a prefix language model, the initial length of each row's prefix
        )

    def repeat(self, times: int, sampling: Sampling) -> None:
        """Replaces each row by copies with different random streams, so that prompts are prefilled
        only once.
        """
        if times == 1:
            return
        self.sample(sampling)
        rows = len(self.ids)
        self.ids = [list(row) for row in self.ids for _ in range(times)]
        self._stream = np.repeat(self._stream, times) + np.tile(
            np.arange(times, dtype=np.uint32), rows
        )
        self._cached, self._dropped = (
            np.repeat(self._cached, times),
            np.repeat(self._dropped, times),
        )
        self._prefix = None if self._prefix is None else np.repeat(self._prefix, times)

        def repeated(x):  # a row consists of one or more consecutive entries of the first axis of x
            return jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), times, axis=0).reshape(
                -1, *x.shape[1:]
            )

        self._cache, self._seen, self._logits = jax.tree.map(
            repeated, (self._cache, self._seen, self._logits)
        )

    def reserve(self, new_tokens: int) -> None:
        """Grows the cache for `new_tokens` more tokens per row, so that it does not grow during
        sampling.
        """
        context = self.model.config.context_length
        needed = bucket(max(map(len, self.ids)) + new_tokens, context)
        if needed > self._cache_length:
            if self._cache:
                self._cache = jax.tree.map(
                    lambda x, longer: jnp.pad(
                        x, [(0, new - old) for old, new in zip(x.shape, longer.shape)]
                    ),
                    self._cache,
                    cache_shapes(self.model, self.weights, len(self.ids), needed),
                )
            self._cache_length = needed

    def sample(self, sampling: Sampling) -> jax.Array:
        """Returns one sampled token per row, (B,) int32, before the computation is finished.

        If only some rows have new tokens, the other rows are finished: they cannot be continued,
        and their samples are meaningless. If no row has new tokens, the samples are drawn from the
        logits of the previous call. If that was a call of `sample_steps`, which keeps no logits,
        the cache is computed again.
        """
        return self.sample_with_logits(sampling)[0]

    def sample_with_logits(self, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        """Also returns the logits before sampling, (B, vocab_size) float32."""
        context = self.model.config.context_length
        if max(map(len, self.ids)) > context:
            self._drop_oldest()
        if self._logits is None and all(
            len(row) <= cached for row, cached in zip(self.ids, self._cached)
        ):
            self._empty_cache()
        new, counts, streams = self._new_tokens()
        seen_BxV, longest = self._seen_tokens(sampling), max(map(len, new))
        if longest == 0:
            return sample_tokens(
                self._logits, seen_BxV, self._seed, streams, sampling
            ), self._logits
        self.reserve(0)
        tokens_BxT = np.zeros((len(new), 1 if longest == 1 else bucket(longest, context)), np.int32)
        for padded, row in zip(tokens_BxT, new):
            padded[: len(row)] = row
        self._cache, self._seen, sampled_B, self._logits = decode_step(
            self.weights,
            self._cache,
            seen_BxV,
            tokens_BxT,
            self._cached,
            counts,
            self._seed,
            streams,
            sampling,
            self._prefix_lengths(),
            **self._static_arguments(),
        )
        self._cached = self._cached + counts
        return sampled_B, self._logits

    def sample_steps(self, sampling: Sampling, max_steps: int) -> np.ndarray:
        """Returns N sampled tokens per row, (B, N) int32, with N ≤ min(max_steps, MAX_STEPS), and N
        = 1 after a prompt.

        To continue a row, append all N tokens to the row's list. Tokens from end-of-text on may be
        left out. If other tokens are left out, call `resume`. Without this call, the row is
        finished (see `sample`).
        """
        new, counts, streams = self._new_tokens()
        longest = max((len(row) for row, count in zip(self.ids, counts) if count), default=0)
        steps = min(max_steps, MAX_STEPS, self.model.config.context_length + 1 - longest)
        if not self._cache or max(counts) != 1 or steps < 1:
            return np.asarray(self.sample(sampling))[:, None]
        self.reserve(steps - 1)
        token_B = np.array([row[0] if row else 0 for row in new], np.int32)
        self._cache, self._seen, sampled_BxN, added_B = decode_steps(
            self.weights,
            self._cache,
            self._seen_tokens(sampling),
            token_B,
            self._cached,
            counts,
            steps,
            self._seed,
            streams,
            sampling,
            **self._static_arguments(),
        )
        self._cached, self._logits = self._cached + np.asarray(added_B), None
        return np.asarray(sampled_BxN)[:, :steps]

    def resume(self) -> None:
        """Empties the cache if it contains tokens that are not in `ids`. All rows can then be
        continued.
        """
        if any(len(row) < cached for row, cached in zip(self.ids, self._cached)):
            self._empty_cache()

    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    @property
    def dropped(self) -> int:
        return int(self._dropped.sum())

    def _new_tokens(self):
        new = [row[start:] for row, start in zip(self.ids, self._cached)]
        counts = np.array([len(row) for row in new], np.int32)
        positions = self._dropped + self._cached + counts
        return new, counts, np.stack([self._stream, positions.astype(np.uint32)], axis=1)

    def _prefix_lengths(self) -> np.ndarray | None:
        """Returns the number of prefix tokens per row, without dropped ones, for a prefix model
        without a cache.
        """
        if self.model.config.attention_mask != "prefix" or self._cache:
            return None
        if self._prefix is None:
            self._prefix = np.array([len(row) for row in self.ids], np.int32)
        return np.maximum(self._prefix - self._dropped, 0)

    def _static_arguments(self) -> dict:
        return {
            "model": self.model,
            "cache_length": self._cache_length,
            "vocab_size": self.vocab_size,
            "end_of_text": self._end_of_text,
        }

    def _drop_oldest(self) -> None:
        """Halves the rows that have outgrown the context."""
        context = self.model.config.context_length
        kept = max(1, context // 2)
        for i, row in enumerate(self.ids):
            if len(row) > context:
                self._dropped[i] += len(row) - kept
                del row[:-kept]
        self._empty_cache()

    def _empty_cache(self) -> None:
        self._cache, self._seen = {}, None
        self._cached = np.zeros_like(self._cached)

    def _seen_tokens(self, sampling: Sampling):
        if sampling.repetition_penalty is None:
            return None
        if self._seen is not None:
            return self._seen
        seen_BxV = np.zeros((len(self.ids), self.vocab_size), bool)
        for seen, row, cached in zip(seen_BxV, self.ids, self._cached):
            seen[row[:cached]] = True
        if self._end_of_text is not None:
            seen_BxV[:, self._end_of_text] = False
        return jnp.asarray(seen_BxV)
