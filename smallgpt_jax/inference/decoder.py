"""Decoding with a cache: per new token, the model computes one position, not the whole text."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.inference import layout
from smallgpt_jax.inference.sampling import Sampler, Sampling, sample_tokens
from smallgpt_jax.models.context import Context

# The maximum number of steps per call of `decode_steps`. It is small, because tokens sampled after
# the end of a text are wasted.
MAX_STEPS = 4
_MIN_BUCKET = 16


def bucket(length: int, longest: int) -> int:
    """Returns the padded length of a row of `length` tokens, at most `longest`."""
    # 16, 32, 48, 64, 96, 128, 192, …: one program is compiled per padded length. A step is a quarter
    # of the next power of two, so that at most a third of a long row is padding.
    quarter = 1 << max(0, (length - 1).bit_length() - 2)
    step = max(_MIN_BUCKET, quarter)
    return min(longest, -(-length // step) * step)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static part of a decoding program; array shapes are the other part of its cache key."""

    model: models.LanguageModel
    vocab_size: int  # of the tokenizer; the embedding may have more rows
    end_of_text: int | None = None  # ends a row, and is exempt from the repetition penalty
    cache_length: int = 0  # positions for which a new cache has room
    # A class that is defined anew, as in a notebook, is another program.
    parts: tuple = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "parts", models.named_parts(self.model.config))


class DecodeState(NamedTuple):
    """The arrays that a decoding step updates in place (donated)."""

    cache: Any  # {}: the step creates a cache
    seen_BxV: Any  # bool, the tokens in each row's context; None without a repetition penalty


class NewTokens(NamedTuple):
    ids: Any  # (B, T), padded on the right; in `decode_steps` (B,), one token per row
    start_B: Any  # the position of each row's first new token
    count_B: Any  # the number of new tokens per row, without padding


def next_logits(model: models.LanguageModel, weights, cache, tokens_BxT, context: Context):
    """Returns the logits after the last token, and the changed collections, such as "cache"."""
    return model.apply(
        {**layout.unpack(weights), "cache": cache},
        tokens_BxT,
        context,
        method="next_logits",
        mutable=["cache", "calls"],
    )


# `decode_step` is one function for all architectures, for prompts, turns and single tokens.
_jitted = functools.partial(jax.jit, static_argnames="decoder", donate_argnames="state")


@_jitted
def decode_step(
    decoder: Decoder, weights, state: DecodeState, new: NewTokens, sampler: Sampler, prefix_B=None
):
    """Feeds each row's new tokens to the model and samples the next token per row.

    `weights` are packed (`layout.pack`). `prefix_B` are the lengths of the prefixes of a prefix LM,
    with a new cache. Returns the state, sampled tokens (B,) int32, and the logits before sampling,
    (B, vocab_size) float32. Samples of rows without new tokens are meaningless.
    """
    time = new.ids.shape[1]
    prefix_BxT = None if prefix_B is None else jnp.arange(time)[None] < prefix_B[:, None]
    context = Context(
        cache_length=decoder.cache_length,
        start_B=new.start_B,
        length_B=new.count_B,
        prefix_BxT=prefix_BxT,
    )
    logits_BxV, changed = next_logits(decoder.model, weights, state.cache, new.ids, context)
    logits_BxV = logits_BxV[:, : decoder.vocab_size]
    seen_BxV = state.seen_BxV
    if seen_BxV is not None:
        is_padding_BxT = jnp.arange(time)[None] >= new.count_B[:, None]
        rows_Bx1 = jnp.arange(len(new.ids))[:, None]
        # padding becomes the id after the last one, which mode="drop" ignores
        ids_BxT = jnp.where(is_padding_BxT, decoder.vocab_size, new.ids)
        seen_BxV = seen_BxV.at[rows_Bx1, ids_BxT].set(True, mode="drop")
        if decoder.end_of_text is not None:
            seen_BxV = seen_BxV.at[:, decoder.end_of_text].set(False)
    state = DecodeState(changed["cache"], seen_BxV)
    return state, sample_tokens(logits_BxV, seen_BxV, sampler), logits_BxV


@_jitted
def decode_steps(
    decoder: Decoder, weights, state: DecodeState, new: NewTokens, steps, sampler: Sampler
):
    """Calls `decode_step` `steps` times. Returns the state, the tokens (B, MAX_STEPS) int32, of which
    `steps` columns are valid, and the number of tokens added to the cache per row.
    """

    # A row ends when it has sampled end_of_text, or at once if its count is 0. From then on, its
    # cache gets no more tokens, and its samples are meaningless.
    def step(i, carried):
        state, token_B, sampled_BxN, count_B, added_B = carried
        new_Bx1 = NewTokens(token_B[:, None], new.start_B + added_B, count_B)
        state, token_B, _ = decode_step(decoder, weights, state, new_Bx1, sampler.ahead(i))
        added_B += count_B
        if decoder.end_of_text is not None:
            count_B = jnp.where(token_B == decoder.end_of_text, 0, count_B)
        return state, token_B, sampled_BxN.at[:, i].set(token_B), count_B, added_B

    # A loop on the host would slow a small model by 10% or more.
    sampled_BxN = jnp.zeros((len(new.ids), MAX_STEPS), jnp.int32)
    carried = state, new.ids, sampled_BxN, new.count_B, jnp.zeros_like(new.count_B)
    state, _, sampled_BxN, _, added_B = jax.lax.fori_loop(0, steps, step, carried)
    return state, sampled_BxN, added_B


# For B rows, the cache has 2·B·Σ(S·G·K) elements of the model's dtype, summed over the blocks: S
# cached positions (at most the attention window), G key–value heads of width K. The cache of a cgpt
# has another B·(conv_kernel − 1)·ΣD elements, summed over the convolutions' input widths D.
def cache_shapes(model: models.LanguageModel, weights, rows: int, cache_length: int):
    return _new_cache.eval_shape(weights, model=model, rows=rows, cache_length=cache_length)


def num_cache_bytes(model: models.LanguageModel, length: int) -> int:
    """Returns the bytes of the cache of one text of `length` tokens, computed from the shapes."""
    return layout.num_bytes(cache_shapes(model, layout.packed_shapes(model), 1, length))


# It is never run, but jitted, because JAX then keeps the shapes.
@functools.partial(jax.jit, static_argnames=("model", "rows", "cache_length"))
def _new_cache(weights, *, model: models.LanguageModel, rows: int, cache_length: int):
    ones_B = jnp.ones(rows, jnp.int32)
    context = Context(cache_length=cache_length, start_B=ones_B, length_B=ones_B)
    _, changed = next_logits(model, weights, {}, ones_B[:, None], context)
    return changed["cache"]


class DecodeSession:
    """Rows of tokens that a model continues, and their cache.

    Append new tokens to the lists in `ids`, then call `sample`. When a row becomes longer than the
    model's context, only its newest context_length / 2 tokens are kept, and the cache is computed
    again. A prefix language model's prefix is what the rows contain at the first call of `sample`.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights,
        ids: Sequence[Sequence[int]],
        seed: int = 0,
        samples: Sequence[int] | None = None,
    ):
        """`weights` are packed (`layout.pack`). Rows with the same text but different numbers in
        `samples` have different random streams.
        """
        self.model, self.weights = decoder.model, weights
        self.ids = [list(row) for row in ids]
        self._decoder = decoder
        self._context_length = decoder.model.config.context_length
        self._seed = np.uint32(seed)
        # A row's random stream depends on its initial text, not on its place in the batch. All
        # texts have the same first token.
        texts = [np.array(row[1:], np.int32) for row in ids]
        self._stream_B = np.array([zlib.crc32(text.tobytes()) for text in texts], np.uint32)
        if samples is not None:
            self._stream_B += np.array(samples, np.uint32)
        self._cache, self._cached_B = {}, np.zeros(len(ids), np.int32)  # number of tokens in it
        self._seen = None  # which tokens each row has, once the first step has counted them
        self._logits = None  # of the next tokens, after a step
        self._dropped_B = np.zeros(len(ids), np.int32)  # tokens that outgrew the context
        self._prefix_B: np.ndarray | None = None  # initial lengths, with a prefix language model

    def repeat(self, times: int, sampling: Sampling) -> None:
        """Replaces each row by copies with other random streams, to prefill prompts only once."""
        if times == 1:
            return
        self.sample(sampling)  # fills the cache, and keeps the logits of the first new tokens
        rows = len(self.ids)
        self.ids = [list(row) for row in self.ids for _ in range(times)]
        copies = np.tile(np.arange(times, dtype=np.uint32), rows)
        self._stream_B = np.repeat(self._stream_B, times) + copies
        self._cached_B = np.repeat(self._cached_B, times)
        self._dropped_B = np.repeat(self._dropped_B, times)
        if self._prefix_B is not None:
            self._prefix_B = np.repeat(self._prefix_B, times)

        def repeated(x):
            # a row is one or more consecutive entries of the first axis, such as its heads
            x_BxExF = x.reshape(rows, -1, *x.shape[1:])
            return jnp.repeat(x_BxExF, times, axis=0).reshape(-1, *x.shape[1:])

        arrays = self._cache, self._seen, self._logits
        self._cache, self._seen, self._logits = jax.tree.map(repeated, arrays)

    def reserve(self, new_tokens: int) -> None:
        """Makes room for `new_tokens` more per row, so that the cache does not grow later."""
        longest = max(map(len, self.ids))
        length = bucket(longest + new_tokens, self._context_length)
        if length <= self._decoder.cache_length:
            return
        # a static size: the next step compiles for the longer cache
        self._decoder = dataclasses.replace(self._decoder, cache_length=length)
        if self._cache:
            longer = cache_shapes(self.model, self.weights, len(self.ids), length)
            self._cache = jax.tree.map(_pad, self._cache, longer)

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
        if max(map(len, self.ids)) > self._context_length:
            self._drop_oldest()
        if self._logits is None and not any(self._new_ids()):
            self._empty_cache()  # so that all tokens are new, and give the logits again
        new_ids = self._new_ids()
        count_B = np.array([len(row) for row in new_ids], np.int32)
        sampler = self._sampler(count_B, sampling)
        seen_BxV = self._seen_tokens(sampling)
        most_new = int(count_B.max())
        if most_new == 0:
            return sample_tokens(self._logits, seen_BxV, sampler), self._logits
        self.reserve(0)  # the rows may have outgrown the cache
        time = 1 if most_new == 1 else bucket(most_new, self._context_length)
        ids_BxT = np.zeros((len(new_ids), time), np.int32)
        for padded, row in zip(ids_BxT, new_ids):
            padded[: len(row)] = row
        (self._cache, self._seen), sampled_B, self._logits = decode_step(
            self._decoder,
            self.weights,
            DecodeState(self._cache, seen_BxV),
            NewTokens(ids_BxT, self._cached_B, count_B),
            sampler,
            self._prefix_lengths(),
        )
        # not in place: the dispatched step may still read the old array
        self._cached_B = self._cached_B + count_B
        return sampled_B, self._logits

    def sample_steps(self, sampling: Sampling, max_steps: int) -> np.ndarray:
        """Returns N ≤ min(max_steps, MAX_STEPS) sampled tokens per row, (B, N) int32; 1 after a prompt.

        To continue a row, append its N tokens to its list in `ids`; those from end-of-text on may
        be left out. A row that leaves out other tokens is finished (see `sample`), unless `resume`
        is called.
        """
        new_ids = self._new_ids()
        count_B = np.array([len(row) for row in new_ids], np.int32)
        # rows without new tokens are finished, so they do not grow
        longest = max((len(row) for row, count in zip(self.ids, count_B) if count), default=0)
        # the last step may fill the context, and samples the token after it
        steps = min(max_steps, MAX_STEPS, self._context_length + 1 - longest)
        # prompts, turns, a full context and rows without any new token take one step of `sample`
        is_single_token = bool(self._cache) and max(count_B) == 1
        if not is_single_token or steps < 1:
            return np.asarray(self.sample(sampling))[:, None]
        self.reserve(steps - 1)
        ids_B = np.array([row[0] if row else 0 for row in new_ids], np.int32)
        (self._cache, self._seen), sampled_BxN, added_B = decode_steps(
            self._decoder,
            self.weights,
            DecodeState(self._cache, self._seen_tokens(sampling)),
            NewTokens(ids_B, self._cached_B, count_B),
            steps,
            self._sampler(count_B, sampling),
        )
        self._cached_B = self._cached_B + np.asarray(added_B)
        self._logits = None
        return np.asarray(sampled_BxN)[:, :steps]

    def resume(self) -> None:
        """Empties a cache with tokens that are not in `ids`, so that all rows can be continued."""
        if any(len(row) < cached for row, cached in zip(self.ids, self._cached_B)):
            self._empty_cache()

    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    @property
    def dropped(self) -> int:
        return int(self._dropped_B.sum())

    def _new_ids(self) -> list[list[int]]:
        return [row[cached:] for row, cached in zip(self.ids, self._cached_B)]

    def _sampler(self, count_B: np.ndarray, sampling: Sampling) -> Sampler:
        # positions in the whole text: a stream does not repeat after tokens have been dropped
        positions_B = self._dropped_B + self._cached_B + count_B
        stream_Bx2 = np.stack([self._stream_B, positions_B.astype(np.uint32)], axis=1)
        return Sampler(self._seed, stream_Bx2, sampling)

    def _prefix_lengths(self) -> np.ndarray | None:
        """Returns the prefixes' lengths without dropped tokens, for a prefix model without a cache."""
        if self.model.config.attention_mask != "prefix" or self._cache:
            return None
        if self._prefix_B is None:
            self._prefix_B = np.array([len(row) for row in self.ids], np.int32)
        return np.maximum(self._prefix_B - self._dropped_B, 0)

    def _drop_oldest(self) -> None:
        """Halves the rows that have outgrown the context."""
        # half, so that the cache is computed again only every context_length / 2 tokens
        kept = max(1, self._context_length // 2)
        for i, row in enumerate(self.ids):
            if len(row) > self._context_length:
                self._dropped_B[i] += len(row) - kept
                del row[:-kept]
        self._empty_cache()

    def _empty_cache(self) -> None:
        self._cache, self._seen = {}, None
        self._cached_B = np.zeros_like(self._cached_B)

    def _seen_tokens(self, sampling: Sampling):
        """Returns the cached tokens of each row, (B, V) bool, or None without a penalty."""
        if sampling.repetition_penalty is None:
            return None
        if self._seen is not None:
            return self._seen
        # first use, or the cache was emptied; the next step adds its new tokens
        seen_BxV = np.zeros((len(self.ids), self._decoder.vocab_size), bool)
        for seen_V, row, cached in zip(seen_BxV, self.ids, self._cached_B):
            seen_V[row[:cached]] = True
        if self._decoder.end_of_text is not None:
            seen_BxV[:, self._decoder.end_of_text] = False
        return jnp.asarray(seen_BxV)


def _pad(x, longer: jax.ShapeDtypeStruct):
    added = [(0, new - old) for old, new in zip(x.shape, longer.shape)]
    return jnp.pad(x, added)
