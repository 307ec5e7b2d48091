"""Computes log-likelihoods of token sequences, on all devices."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from smallgpt_jax import models
from smallgpt_jax.devices import sharding
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.kernel_check import check_recurrence_kernels
from smallgpt_jax.ops.cross_entropy import cap

_STATIC_LENGTHS = 6
_LENGTH_STEP = 16  # static lengths are multiples of this, except the context length
_CHUNK = 256  # each device computes the logits of this many positions at a time


class TokenSequence(NamedTuple):
    """The last `scored` tokens are scored, each given all tokens before it."""

    tokens: Sequence[int] | np.ndarray
    scored: int


class Score(NamedTuple):
    log_likelihood: float  # sum over the scored tokens, in nats
    is_greedy: bool  # whether every scored token is the most likely one


class ScoringBatch(NamedTuple):
    """B sequences, padded to T + 1 tokens, where T is a static length."""

    indices: list[int]  # for each row, the index of its sequence in the argument of `Scorer.score`
    tokens_BxT1: np.ndarray
    scored_BxT: np.ndarray  # bool: whether the token after this position is scored


class Scorer:
    """Scores sequences of up to context_length + 1 tokens, data-parallel over all devices.

    `batch_tokens` limits the number of token positions per device in a batch, padding included.
    """

    def __init__(
        self,
        model: models.LanguageModel,
        params,
        batch_tokens: int = 8192,
        devices=None,
        model_state=None,
    ):
        self.model, self._batch_tokens = model, batch_tokens
        self.mesh = sharding.make_mesh(sharding.MeshConfig(), devices)
        check_recurrence_kernels(model, self.mesh)
        self._variables = jax.device_put(
            {"params": params, "state": model_state or {}}, sharding.replicated(self.mesh)
        )

    def score(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[int, Score]]:
        """Yields (index, score) for each sequence, batch by batch, longest sequences first."""
        pending = None  # the previous batch, whose results are read after the next is dispatched
        for batch in self.batches(sequences):
            results = self.run(batch)
            if pending:
                yield from _scores(*pending)
            pending = (batch, results)
        if pending:
            yield from _scores(*pending)

    def batches(self, sequences: Sequence[TokenSequence]) -> Iterator[ScoringBatch]:
        """Yields the sequences in padded batches, the longest first; the last one has empty rows."""
        assert all(0 < sequence.scored < len(sequence.tokens) for sequence in sequences)
        needed = [len(sequence.tokens) - 1 for sequence in sequences]
        lengths = static_lengths(needed, self.model.config.context_length)
        # the longest first: what does not fit in memory fails at once
        order = sorted(range(len(sequences)), key=lambda i: -needed[i])
        first = 0
        while first < len(order):
            length = next(length for length in lengths if length >= needed[order[first]])
            # all batches of a length have the same rows, hence one compiled program
            rows = max(1, self._batch_tokens // length) * self.mesh.size
            indices = order[first : first + rows]
            tokens_BxT1 = np.zeros((rows, length + 1), np.int32)
            scored_BxT = np.zeros((rows, length), bool)
            for row, index in enumerate(indices):
                tokens, num_scored = sequences[index]
                tokens_BxT1[row, : len(tokens)] = tokens
                # position i predicts token i + 1
                last = len(tokens) - 1
                scored_BxT[row, last - num_scored : last] = True
            yield ScoringBatch(indices, tokens_BxT1, scored_BxT)
            first += len(indices)

    def run(self, batch: ScoringBatch):
        tokens_BxT1, scored_BxT = jax.device_put(
            (batch.tokens_BxT1, batch.scored_BxT), sharding.batch_sharding(self.mesh)
        )
        parts = models.named_parts(self.model.config)
        return _run(self._variables, tokens_BxT1, scored_BxT, self.model, parts, self.mesh)


# Each device scores its rows alone, so that its loop is as long as its own rows need.
@functools.partial(jax.jit, static_argnames=("model", "parts", "mesh"))
def _run(variables, tokens_BxT1, scored_BxT, model: models.LanguageModel, parts: tuple, mesh):
    """`parts`: see `models.parameters.trace_variables`."""
    rows = PartitionSpec(("data", "fsdp"))
    return jax.shard_map(
        functools.partial(_log_probabilities, model=model),
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=(rows, rows),
        check_vma=False,
    )(variables, tokens_BxT1, scored_BxT)


def _log_probabilities(variables, tokens_BxT1, scored_BxT, *, model: models.LanguageModel):
    """Returns two (B, T) arrays: the log-probability of each next token, and whether it is the most
    likely token; 0 and True where it is not scored.
    """
    batch, time = scored_BxT.shape
    prefix_BxT = None
    if model.config.attention_mask == "prefix":
        # scored 0 0 1 1 has the sums 0 0 1 2: the prefix ends at the first scored position, whose
        # own token is the last one of the context
        prefix_BxT = jnp.cumsum(scored_BxT, axis=1) <= scored_BxT
    context = Context(prefix_BxT=prefix_BxT)

    def hidden_and_head(model):
        return model.hidden(tokens_BxT1[:, :-1], context), model.head_weight()

    x_BxTxW, head_VxW = model.apply(variables, method=hidden_and_head)
    x_RxW = x_BxTxW.reshape(batch * time, -1)
    targets_R = tokens_BxT1[:, 1:].reshape(-1)
    # the scored positions first, then batch · time, which is out of range, up to whole chunks
    size = -(-batch * time // _CHUNK) * _CHUNK
    (scored_S,) = jnp.nonzero(scored_BxT.reshape(-1), size=size, fill_value=batch * time)

    # `lax.map` would also compute the chunks after the last scored position
    def add_chunk(carry):
        first, log_p_S, is_best_S = carry
        positions_C = jax.lax.dynamic_slice(scored_S, (first,), (_CHUNK,))
        x_CxW = x_RxW.at[positions_C].get(mode="clip")
        targets_C = targets_R.at[positions_C].get(mode="clip")
        # of scored positions alone: the head is a large part of a small model
        logits_CxV = jnp.dot(x_CxW, head_VxW.T, preferred_element_type=jnp.float32)
        logits_CxV = cap(logits_CxV, model.config.logit_softcap)
        target_C = jnp.take_along_axis(logits_CxV, targets_C[:, None], axis=1)[:, 0]
        log_p_C = target_C - jax.nn.logsumexp(logits_CxV, axis=1)
        log_p_S = jax.lax.dynamic_update_slice(log_p_S, log_p_C, (first,))
        is_best_C = jnp.argmax(logits_CxV, axis=1) == targets_C
        is_best_S = jax.lax.dynamic_update_slice(is_best_S, is_best_C, (first,))
        return first + _CHUNK, log_p_S, is_best_S

    count = jnp.sum(scored_BxT)
    _, log_p_S, is_best_S = jax.lax.while_loop(
        lambda carry: carry[0] < count,
        add_chunk,
        (jnp.int32(0), jnp.zeros(size, jnp.float32), jnp.zeros(size, bool)),
    )
    log_p_R = jnp.zeros(batch * time).at[scored_S].set(log_p_S, mode="drop")
    is_best_R = jnp.ones(batch * time, bool).at[scored_S].set(is_best_S, mode="drop")
    return log_p_R.reshape(batch, time), is_best_R.reshape(batch, time)


def _scores(batch: ScoringBatch, results) -> Iterator[tuple[int, Score]]:
    log_p_BxT, is_best_BxT = (np.asarray(x) for x in results)
    # float64 on the host: a long text sums many small numbers
    sums_B = log_p_BxT.sum(axis=1, where=batch.scored_BxT, dtype=np.float64)
    for index, total, is_greedy in zip(batch.indices, sums_B, is_best_BxT.all(axis=1)):
        yield index, Score(float(total), bool(is_greedy))


def static_lengths(needed: Sequence[int], longest: int) -> list[int]:
    """Returns at most _STATIC_LENGTHS ascending lengths ≤ `longest`, with the least padding."""

    def rounded(length: int) -> int:
        return min(longest, -(-max(1, length) // _LENGTH_STEP) * _LENGTH_STEP)

    candidates, counts = np.unique([rounded(length) for length in needed], return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)]).tolist()
    # best[i] is the best solution for the sequences that belong to the first i candidates: the
    # number of positions, padding included, and the static lengths. Each round of the loop allows
    # one more static length.
    best: list[tuple[float, list[int]]] = [(0, [])] + [(math.inf, [])] * len(candidates)
    for _ in range(_STATIC_LENGTHS):
        with_one_more = []
        for end, solution in enumerate(best):
            for start in range(end):
                # all sequences from candidate `start` on are padded to the longest of them
                positions, lengths = best[start]
                length = int(candidates[end - 1])
                positions += (before[end] - before[start]) * length
                if positions < solution[0]:
                    solution = positions, [*lengths, length]
            with_one_more.append(solution)
        best = with_one_more
    return best[-1][1]


def split_into_sequences(
    tokens: Sequence[int], first: int, context_length: int
) -> list[TokenSequence]:
    """Splits a text into the fewest sequences that score each token of tokens[first:] once."""
    sequences = []
    for start in range(first, len(tokens), context_length):
        end = min(start + context_length, len(tokens))
        # the last token is only predicted, so that context_length tokens before it are seen
        seen = max(0, end - 1 - context_length)
        sequences.append(TokenSequence(tokens[seen:end], end - start))
    return sequences


def split_with_stride(
    tokens: Sequence[int] | np.ndarray, context_length: int, stride: int
) -> Iterator[TokenSequence]:
    """Yields windows of context_length + 1 tokens that begin `stride` tokens apart, and score each
    token of tokens[1:] once, given at least context_length - stride + 1 tokens after the first
    window.
    """
    assert 0 < stride <= context_length
    scored_end = 1
    start = 0
    while scored_end < len(tokens):
        end = min(start + context_length + 1, len(tokens))
        yield TokenSequence(tokens[start:end], end - scored_end)
        scored_end = end
        start += stride
