"""Cached decoding: what a model has read is kept, so that a new token costs one position's work.

`advance` is all there is to it, one jitted function for every architecture: it reads the rows' next
tokens and draws one more for each. A prompt, a later turn of a conversation and a single token
differ only in how many tokens that is. `advance_ahead` is a loop over it.
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

AHEAD = 4  # tokens that one call draws at most: with more, a row that ends among them wastes more
SHORTEST = 16  # lengths are rounded up to this, 32, 48, 64, 96, 128, 192, … and compiled once each


def bucket(length: int, longest: int) -> int:
    """The number of positions that `length` tokens are filled up to."""
    step = max(SHORTEST, 1 << max(0, (length - 1).bit_length() - 2))
    return min(longest, -(-length // step) * step)


@functools.partial(
    jax.jit,
    static_argnames=("model", "cache_length", "vocab_size", "unpenalised"),
    donate_argnames=("cache", "seen_BxV"))
def advance(weights, cache, seen_BxV, tokens_BxT, start_B, count_B, seed, stream_Bx2, sampling: Sampling, *,
            model: models.LanguageModel, cache_length: int, vocab_size: int, unpenalised: int | None):
    """Reads the first `count_B` of each row's tokens, which begin at position `start_B`, and draws
    the next.

    Returns the cache with these tokens, what has been seen now (None without a repetition penalty),
    the drawn tokens (B,) int32, and the logits (B, vocab_size) float32 before sampling. An empty
    `cache` begins one of `cache_length` positions. Takes over the memory of `cache` and `seen_BxV`.
    The token `unpenalised` never counts as seen. What is drawn for a row of no tokens means nothing.
    A row's draw depends on nothing but the seed, its two numbers in `stream_Bx2`, its text and the
    settings.
    """
    context = Context(cache_length=cache_length, start_B=start_B, length_B=count_B)
    logits_BxV, kept = model.apply({**layout.unpack(weights), "cache": cache}, tokens_BxT, context,
                                   method="next_logits", mutable=["cache", "calls"])
    logits_BxV = logits_BxV[:, :vocab_size]  # the embedding may have more rows than the tokenizer ids
    if seen_BxV is not None:
        is_filler = jnp.arange(tokens_BxT.shape[1])[None] >= count_B[:, None]
        rows = jnp.arange(len(tokens_BxT))[:, None]
        seen_BxV = seen_BxV.at[rows, jnp.where(is_filler, vocab_size, tokens_BxT)].set(True, mode="drop")
        if unpenalised is not None:
            seen_BxV = seen_BxV.at[:, unpenalised].set(False)
    return kept["cache"], seen_BxV, choose(logits_BxV, seen_BxV, seed, stream_Bx2, sampling), logits_BxV


@functools.partial(
    jax.jit,
    static_argnames=("model", "cache_length", "vocab_size", "unpenalised"),
    donate_argnames=("cache", "seen_BxV"))
def advance_ahead(weights, cache, seen_BxV, token_B, start_B, count_B, steps, seed, stream_Bx2,
                  sampling: Sampling, **settings):
    """`advance` with one token of each row, then with the one drawn, and so on: `steps` times, at
    most AHEAD, without asking the host, which costs a small model a tenth of a step or more.

    Rows whose `count_B` is 0 stay where they are. Returns the cache, what has been seen, and the drawn
    tokens, (B, AHEAD) int32, of which the first `steps` mean something.
    """
    def step(i, carried):
        cache, seen_BxV, token_B, drawn_BxN = carried
        cache, seen_BxV, token_B, _ = advance(
            weights, cache, seen_BxV, token_B[:, None], start_B + i * count_B, count_B, seed,
            stream_Bx2.at[:, 1].add(jnp.uint32(i)), sampling, **settings)
        return cache, seen_BxV, token_B, drawn_BxN.at[:, i].set(token_B)

    drawn_BxN = jnp.zeros((len(token_B), AHEAD), jnp.int32)
    cache, seen_BxV, _, drawn_BxN = jax.lax.fori_loop(0, steps, step, (cache, seen_BxV, token_B, drawn_BxN))
    return cache, seen_BxV, drawn_BxN


@jax.jit
def choose(logits_BxV, seen_BxV, seed, stream_Bx2, sampling: Sampling):
    """Draws a token for each row, (B,) int32, from random streams of their own."""
    key = jax.random.key(seed)
    key_B = jax.vmap(lambda stream: jax.random.fold_in(jax.random.fold_in(key, stream[0]), stream[1]))(
        stream_Bx2)
    return sample(logits_BxV, seen_BxV, sampling, key_B)


def cache_shapes(model: models.LanguageModel, weights, rows: int, cache_length: int):
    """Returns the shapes of a cache, nothing allocated."""
    numbers_B = jnp.ones(rows, jnp.int32)
    context = Context(cache_length=cache_length, start_B=numbers_B, length_B=numbers_B)
    _, kept = jax.eval_shape(
        lambda weights: model.apply(layout.unpack(weights), numbers_B[:, None], context, method="next_logits",
                                    mutable=["cache", "calls"]), weights)
    return kept["cache"]


class Texts:
    """Rows of tokens that a model reads and continues, and the cache of what it has read.

    `ids` are the tokens of each row; append to them, then `draw`. When a row is longer than the
    model's context, its older tokens but the last half of a context are forgotten, and the rest is
    read again.

    The cache holds B·S·2·Σ(width of each block) numbers of the model's type, B rows, S the cache's
    length, and for cgpt B·(conv_kernel − 1)·Σ(width of each convolution's input) more.
    """

    def __init__(self, model: models.LanguageModel, weights, vocab_size: int, ids: Sequence[Sequence[int]],
                 seed: int = 0, unpenalised: int | None = None, samples: Sequence[int] | None = None):
        """`weights` are as `layout.pack` returns them, `ids` have at least one token a row; the repetition penalty
        leaves out `unpenalised`. `samples` tell rows of the same text apart."""
        self.model, self.weights, self.vocab_size = model, weights, vocab_size
        self.ids = [list(row) for row in ids]
        self._seed, self._unpenalised = np.uint32(seed), unpenalised
        # What tells the rows' random streams apart: their text at the beginning, and their sample.
        self._stream = np.array([zlib.crc32(np.array(row[1:], np.int32).tobytes()) for row in ids], np.uint32)
        if samples is not None:
            self._stream += np.array(samples, np.uint32)
        self._forgotten = np.zeros(len(ids), np.int32)
        self._cache, self._cache_length, self._seen = {}, 0, None
        self._read = np.zeros(len(ids), np.int32)  # tokens of each row that are in the cache

    def repeat(self, times: int, sampling: Sampling) -> None:
        """Makes each row `times` rows, told apart as samples 0, 1, …; its text is read only once."""
        if times == 1:
            return
        if max(map(len, self.ids)) > 1:
            last = [row.pop() for row in self.ids]
            self.draw(sampling)
            for row, token in zip(self.ids, last):
                row.append(token)
        rows = len(self.ids)
        self.ids = [list(row) for row in self.ids for _ in range(times)]
        self._stream = np.repeat(self._stream, times) + np.tile(np.arange(times, dtype=np.uint32), rows)
        self._read, self._forgotten = np.repeat(self._read, times), np.repeat(self._forgotten, times)
        self._cache, self._seen = jax.tree.map(
            functools.partial(_repeat_rows, rows=rows, times=times), (self._cache, self._seen))

    def reserve(self, new_tokens: int) -> None:
        """Makes room for so many more tokens in each row, so that no `draw` has to."""
        context = self.model.config.context_length
        needed = bucket(max(map(len, self.ids)) + new_tokens, context)
        if needed > self._cache_length:
            if self._cache:
                longer = cache_shapes(self.model, self.weights, len(self.ids), needed)
                self._cache = jax.tree.map(_padded, self._cache, longer)
            self._cache_length = needed

    def draw(self, sampling: Sampling) -> jax.Array:
        """Reads what is new in each row and returns the next tokens, (B,) int32.

        Returns at once, with an array that is still being computed. If no row has anything new, it
        draws again from the last logits; if only some have, the others are finished: what is drawn
        for them means nothing, and they cannot be continued.
        """
        return self.draw_with_logits(sampling)[0]

    def draw_with_logits(self, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        """`draw`, and the logits (B, V) float32 that each token was drawn from, before sampling."""
        context = self.model.config.context_length
        if max(map(len, self.ids)) > context:
            self._forget()
        new, counts, streams = self._new()
        seen_BxV, longest = self._seen_before(sampling), max(map(len, new))
        if longest == 0:
            return choose(self._logits, seen_BxV, self._seed, streams, sampling), self._logits
        self.reserve(0)
        tokens_BxT = np.zeros((len(new), 1 if longest == 1 else bucket(longest, context)), np.int32)
        for filled, row in zip(tokens_BxT, new):
            filled[:len(row)] = row
        self._cache, self._seen, drawn_B, self._logits = advance(
            self.weights, self._cache, seen_BxV, tokens_BxT, self._read, counts, self._seed, streams,
            sampling, **self._settings())
        self._read = self._read + counts
        return drawn_B, self._logits

    def draw_ahead(self, sampling: Sampling, most: int) -> np.ndarray:
        """Reads what is new in each row and returns the next tokens, (B, N) int32, N at most `most`.

        The later ones have been drawn as if the row went on with the earlier ones: append all of them,
        or the row is finished (as for `draw`). N is 1 after a prompt and AHEAD, if nothing is in the
        way, after a token.
        """
        new, counts, streams = self._new()
        longest = max((len(row) for row, count in zip(self.ids, counts) if count), default=0)
        steps = min(most, AHEAD, self.model.config.context_length + 1 - longest)
        if not self._cache or max(counts) != 1 or steps < 1:
            return np.asarray(self.draw(sampling))[:, None]
        self.reserve(steps - 1)
        token_B = np.array([row[0] if row else 0 for row in new], np.int32)
        self._cache, self._seen, drawn_BxN = advance_ahead(
            self.weights, self._cache, self._seen_before(sampling), token_B, self._read, counts, steps,
            self._seed, streams, sampling, **self._settings())
        self._read, self._logits = self._read + steps * counts, None
        return np.asarray(drawn_BxN)[:, :steps]

    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    @property
    def forgotten(self) -> int:
        """How many tokens have left the context, in all rows together."""
        return int(self._forgotten.sum())

    def _new(self):
        """The tokens of each row that have not been read, how many they are, (B,), and what `choose`
        makes the rows' random streams of, (B, 2)."""
        new = [row[start:] for row, start in zip(self.ids, self._read)]
        counts = np.array([len(row) for row in new], np.int32)
        positions = self._forgotten + self._read + counts
        return new, counts, np.stack([self._stream, positions.astype(np.uint32)], axis=1)

    def _settings(self) -> dict:
        return {"model": self.model, "cache_length": self._cache_length, "vocab_size": self.vocab_size,
                "unpenalised": self._unpenalised}

    def _forget(self) -> None:
        context = self.model.config.context_length
        kept = max(1, context // 2)
        for i, row in enumerate(self.ids):
            if len(row) > context:
                self._forgotten[i] += len(row) - kept
                del row[:-kept]
        self._cache, self._seen = {}, None
        self._read = np.zeros_like(self._read)

    def _seen_before(self, sampling: Sampling):
        if sampling.repetition_penalty is None:
            return None
        if self._seen is None:
            seen_BxV = np.zeros((len(self.ids), self.vocab_size), bool)
            for seen, row, read in zip(seen_BxV, self.ids, self._read):
                seen[row[:read]] = True
            if self._unpenalised is not None:
                seen_BxV[:, self._unpenalised] = False
            return jnp.asarray(seen_BxV)
        return self._seen


def _repeat_rows(x, rows: int, times: int):
    """Each of the `rows` parts of the first axis, `times` times."""
    return jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), times, axis=0).reshape(-1, *x.shape[1:])


def _padded(x, wanted):
    """`x` with zeros at the end of its axes, up to the shape of `wanted`."""
    return jnp.pad(x, [(0, longer - size) for size, longer in zip(x.shape, wanted.shape)])
