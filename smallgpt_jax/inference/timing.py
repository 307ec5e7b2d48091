"""Timings of a decoding session, for `compare` and benchmarks/inference.py."""

import time

import numpy as np

from smallgpt_jax.inference.decoder import DecodeSession
from smallgpt_jax.inference.sampling import Sampling

GREEDY = Sampling(temperature=None)


def time_prefill(session: DecodeSession) -> tuple[np.ndarray, float]:
    """Returns the token after each prompt, (B, 1) int32, and the seconds that this takes."""
    started = time.perf_counter()
    # returns NumPy arrays, so that the time includes the computation, not only its dispatch
    sampled_Bx1 = session.sample_steps(GREEDY, 1)
    return sampled_Bx1, time.perf_counter() - started


def time_decoding(
    session: DecodeSession, sampled_Bx1: np.ndarray, steps: int
) -> list[tuple[int, float]]:
    """Samples `steps` tokens per row, and returns (steps, seconds) of each call that this takes."""
    # the session must have no end_of_text, so that no row ends
    calls, sampled_BxN = [], sampled_Bx1
    while steps:
        started = time.perf_counter()
        for row, tokens in zip(session.ids, sampled_BxN.tolist()):
            row += tokens
        sampled_BxN = session.sample_steps(GREEDY, steps)
        calls.append((sampled_BxN.shape[1], time.perf_counter() - started))
        steps -= sampled_BxN.shape[1]
    return calls
