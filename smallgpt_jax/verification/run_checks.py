"""Checks of single runs of a record: each number that follows from others is computed again."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from smallgpt_jax.analysis.record import Point, Run
from smallgpt_jax.comparison.counts import Counts
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.store import METADATA
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.storage.json_files import find_mismatch
from smallgpt_jax.verification.problems import UNKNOWN, Problem, contradiction, label_of

CountOf = Callable[[Config], Counts]
RELATIVE = 1e-9  # rounding of float64, with room
# How far a loss before training can be from that of a uniform guess, in nats.
MAX_FIRST_GAIN, MAX_FIRST_EXCESS = 1.0, 2.0


def problems_of(run: Run, config: Config | None, count: CountOf) -> list[Problem]:
    """Returns what is wrong in a run. `config` is the run's own; None: it cannot be read."""
    unknown = []
    contradictions = [*_curve(run), *_sessions(run)]
    if config is not None:
        contradictions += [*_shape(run, config), *_losses(run, config)]
        try:
            counts = count(config)
            contradictions += [*_counts(run, counts), *_flops(run, config, counts)]
        except UserError as error:
            unknown.append(Problem(UNKNOWN, "counts", label_of(run), str(error)))
    return unknown + [contradiction(check, run, text) for check, text in contradictions]


Contradictions = Iterator[tuple[str, str]]  # (name of the check, what is wrong)


def _shape(run: Run, config: Config) -> Contradictions:
    """Seed, tokens per step and vocabulary against the config."""
    if run.seed != config.train.seed:
        yield "seed", f"seed {run.seed} is {config.train.seed} in its config"
    padding = run.sessions[-1].padding if run.sessions else 0.0
    expected = config.inputs_per_step * (1 - padding)
    # Only sessions record the padding, without which the tokens do not follow from the config.
    if run.sessions and not _is_close(run.tokens_per_step, expected):
        text = (
            f"{run.tokens_per_step:,g} tokens per step are {expected:,g} by batch size, context "
            "and padding"
        )
        yield "tokens", text
    if padding and config.data.packing == "concat" and not is_synthetic(config.data):
        yield "tokens", "has padding, which joined documents do not have"
    vocabulary = run.text.description.get("vocab_size", 0) if run.text else 0
    if vocabulary > config.model.vocab_size:
        yield "text", f"the tokenizer's {vocabulary} tokens exceed config.model.vocab_size"


def _curve(run: Run) -> Contradictions:
    """Order and totals of the evaluations."""
    steps = [point.step for point in run.curve]
    if any(after <= before for before, after in itertools.pairwise(steps)):
        yield "steps", "its evaluations are not in the order of their steps"
    is_at_end = bool(steps) and steps[-1] == run.steps
    if run.is_finished != is_at_end:
        claim = "is finished" if run.is_finished else "is not finished"
        last = f"step {steps[-1]}" if steps else "none"
        text = f"{claim} by its own word, but its last evaluation is {last} of {run.steps}"
        yield "steps", text
    if steps and (steps[-1] > run.steps or (run.is_finished and run.steps_done != run.steps)):
        text = f"has logged step {run.steps_done} and evaluated step {steps[-1]}, of {run.steps}"
        yield "steps", text
    seconds = [point.seconds for point in run.curve if point.seconds is not None]
    if any(after <= before for before, after in itertools.pairwise(seconds)):
        yield "seconds", "its training time does not grow"
    for point in run.curve:
        # A point's tokens are rounded to a whole number.
        if abs(point.tokens - point.step * run.tokens_per_step) > 0.5 + RELATIVE * point.tokens:
            yield "tokens", f"{point.tokens:,} tokens at step {point.step} do not fit the batch"
            return  # the later ones would only repeat it


def _losses(run: Run, config: Config) -> Contradictions:
    """Each loss is a possible mean, and the same number as its bits per byte."""
    if not run.curve:
        return
    # Losses of other objectives need not be a float32 sum divided by `targets`.
    is_mean = config.train.objective in ("causal", "prefix")
    bytes_per_token = _bytes_per_token(run)
    for point in run.curve:
        if point.loss is None:
            continue  # was not finite
        if point.loss < 0 or (is_mean and not _is_float32_mean(point)):
            text = f"{point.loss!r} at step {point.step} is no mean of {point.targets} losses"
            yield "loss", text
        if bytes_per_token and point.bits_per_byte is not None:
            bits = point.loss / math.log(2) / bytes_per_token
            if not _is_close(bits, point.bits_per_byte):
                text = (
                    f"a loss of {point.loss:.6f} at step {point.step} is {bits:.6f} bits per byte, "
                    f"not {point.bits_per_byte:.6f}"
                )
                yield "bits per byte", text
    yield from _first_loss(run.curve[0], config.model.vocab_size)
    most = config.train.eval_steps * config.inputs_per_step  # 0: evaluates all validation rows
    if most and run.curve[-1].targets > most:
        text = (
            f"its last loss is a mean over {run.curve[-1].targets:,} targets, but the config "
            f"evaluates at most {most:,}"
        )
        yield "evaluation rows", text


def _first_loss(first: Point, vocabulary: int) -> Contradictions:
    """Before training, a model is about as good as a uniform guess over the vocabulary."""
    if first.step > 0 or first.loss is None:
        return  # no loss before training is recorded
    guess = math.log(vocabulary)
    if not guess - MAX_FIRST_GAIN <= first.loss <= guess + MAX_FIRST_EXCESS:
        yield "first loss", f"{first.loss:.3f} before training; that of a guess is {guess:.3f}"


def _is_float32_mean(point: Point) -> bool:
    # A mean over n targets times n is the float32 sum from which it was computed.
    with np.errstate(over="ignore"):  # of a loss that is too large, which is no such mean
        total = float(np.float32(point.loss * point.targets))
    return total / point.targets == point.loss


def _bytes_per_token(run: Run) -> float | None:
    """Returns None for texts whose bytes the record does not have, such as mixtures and probes."""
    if run.text is None or find_mismatch(run.text.description, METADATA):
        return None
    split = run.text.description["splits"]["validation"]
    return split["text_bytes"] / split["tokens"] if split["tokens"] else None


def _sessions(run: Run) -> Contradictions:
    times = [session.time for session in run.sessions]
    if times != sorted(times):
        yield "sessions", "its sessions are not in the order of their times"
    if any(session.first_step > run.steps for session in run.sessions):
        yield "sessions", "one of its sessions starts after its last step"


def _counts(run: Run, counts: Counts) -> Contradictions:
    """Recorded parameters and FLOPs per token against those counted from the config."""
    if sum(run.components.values()) != run.parameters:
        yield "parameters", f"the components of its {run.parameters:,} parameters have another sum"
    if run.parameters != counts.parameters or run.components != counts.components:
        yield "parameters", f"{run.parameters:,} parameters; its config has {counts.parameters:,}"
    recorded, counted = run.active_parameters, counts.active_parameters
    if recorded != counted:
        yield "parameters", f"{recorded:,} active parameters; its config has {counted:,}"
    recorded, counted = run.flops_per_token, counts.flops_per_token
    if not _is_same(recorded, counted):
        yield "FLOPs", f"{recorded} FLOPs per token; its config has {counted}"


def _flops(run: Run, config: Config, counts: Counts) -> Contradictions:
    """The FLOPs of each evaluation are those of the steps before it."""
    per_step = counts.flops_per_step(config)
    if per_step is None:
        return  # they cannot be counted
    for point in run.curve:
        if point.flops is not None and not _is_close(point.flops, point.step * per_step):
            counted = f"{point.step * per_step:.6g}"
            yield "FLOPs", f"{point.flops:.6g} FLOPs at step {point.step}; its config has {counted}"
            return  # the later ones would only repeat it


def _is_same(one: float | None, other: float | None) -> bool:
    """None, an unknown number, equals only None."""
    if one is None or other is None:
        return one is other
    return _is_close(one, other)


_is_close = functools.partial(math.isclose, rel_tol=RELATIVE)
