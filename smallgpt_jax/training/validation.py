"""Validation: the loss, the answers of probes, and the loss of repeats."""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.objectives.examples import Examples, row_keys
from smallgpt_jax.objectives.objective import Objective, Outputs, forward
from smallgpt_jax.ops.cross_entropy import most_probable
from smallgpt_jax.ops.repeats import is_repeat
from smallgpt_jax.run.metrics import ACCURACY, EXACT_MATCH, LOSS_OF_REPEATS
from smallgpt_jax.training.step import gather_weights, split_microbatches


class Answers(NamedTuple):
    """Numbers of a probe's answers in validation."""

    right: jax.Array  # targets that the model predicts
    exact: jax.Array  # rows without a wrong target
    rows: jax.Array  # rows with any target


class Repeats(NamedTuple):
    """Sums over the targets that copying predicts, in validation."""

    loss: jax.Array  # cross-entropy, in nats
    counted: jax.Array  # number of these targets


class EvaluationSums(NamedTuple):
    """Sums over validation rows, whose mean is taken over all batches."""

    loss: jax.Array  # cross-entropy of the targets in the loss, in nats
    counted: jax.Array  # number of these targets
    targets: jax.Array  # the same with those that the objective did not draw; identifies the rows
    answers: Answers | None
    repeats: Repeats | None = None


def eval_step(program, evaluated, model_state, batch) -> EvaluationSums:
    """Returns the sums over a batch. `program`: see step.py; `evaluated`: of `TrainState`."""
    config, objective = program.config, program.objective
    has_answers, has_repeats = is_synthetic(config.data), config.train.eval_repeats
    params = objective.weights(gather_weights(program, evaluated))

    def add_microbatch(sums: EvaluationSums, examples: Examples):
        outputs = forward(program.model, params, model_state, examples)
        answers = None
        if has_answers:
            predictions_BxT = most_probable(
                outputs.x_BxTxW, outputs.head_VxW, objective.loss_chunks
            )
            answers = count_right(predictions_BxT, examples.targets_BxT, examples.loss_mask_BxT)
        repeats = _repeats_of(outputs, examples, objective) if has_repeats else None
        of_microbatch = EvaluationSums(
            objective.cross_entropy(outputs, examples, examples.weights(1)),
            examples.num_targets,
            examples.all_targets,
            answers,
            repeats,
        )
        return jax.tree.map(jnp.add, sums, of_microbatch), None

    # One key for all evaluations, which so draw the same prefixes or masks of a row.
    examples = objective.examples(batch, row_keys(jax.random.key(0), batch))
    microbatches = split_microbatches(examples, config.train.microbatches)
    no_answers = Answers(*[jnp.int32(0)] * 3) if has_answers else None
    no_repeats = Repeats(jnp.float32(0), jnp.int32(0)) if has_repeats else None
    zeros = EvaluationSums(jnp.float32(0), jnp.int32(0), jnp.int32(0), no_answers, no_repeats)
    sums, _ = jax.lax.scan(add_microbatch, zeros, microbatches)
    return sums


def _repeats_of(outputs: Outputs, examples: Examples, objective: Objective) -> Repeats:
    batch = examples.batch
    mask_BxT = is_repeat(batch.tokens_BxT1, batch.segment_ids_BxT) & (examples.weights(1) > 0)
    loss = objective.cross_entropy(outputs, examples, mask_BxT.astype(jnp.float32))
    return Repeats(loss, jnp.sum(mask_BxT))


def count_right(predictions_BxT, targets_BxT, mask_BxT) -> Answers:
    is_right_BxT = predictions_BxT == targets_BxT
    has_answers_B = jnp.any(mask_BxT, axis=1)
    is_exact_B = jnp.all(is_right_BxT | ~mask_BxT, axis=1) & has_answers_B
    return Answers(jnp.sum(is_right_BxT & mask_BxT), jnp.sum(is_exact_B), jnp.sum(has_answers_B))


class Evaluation(NamedTuple):
    loss: float  # mean over the targets in the loss, in nats
    targets: int  # number of targets in the batches' masks; see `EvaluationSums`
    measures: dict[str, float]  # of a probe's answers, or of repeats; {} if none are asked for


def evaluate(eval_step: Callable, batches: Iterable, is_stopped=lambda: False) -> Evaluation | None:
    """Returns the means over all batches; None if stopped. `eval_step` returns the `EvaluationSums`
    of a batch.
    """
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    # Read after the last batch, so that no device waits for the host.
    of_batches = (jax.tree.map(_to_python, of_batch) for of_batch in jax.device_get(sums))
    total = functools.reduce(functools.partial(jax.tree.map, operator.add), of_batches)
    measures = {}
    if total.answers:
        measures[EXACT_MATCH] = total.answers.exact / total.answers.rows
        measures[ACCURACY] = total.answers.right / total.counted
    if total.repeats and total.repeats.counted:
        measures[LOSS_OF_REPEATS] = float(total.repeats.loss) / total.repeats.counted
    loss = float(total.loss) / total.counted if total.counted else math.nan
    return Evaluation(loss, total.targets, measures)


def evaluate_all(
    eval_step: Callable, pipeline: DataPipeline, is_stopped: Callable
) -> Evaluation | None:
    """Returns `evaluate` of the validation split, with the answers at the further lengths of a
    probe; None if stopped.
    """
    batches = map(pipeline.to_devices, pipeline.validation_batches)
    evaluation = evaluate(eval_step, batches, is_stopped)
    for length, test_batches in pipeline.test_batches.items():
        if evaluation is None:
            return None
        at_length = evaluate(eval_step, map(pipeline.to_devices, test_batches), is_stopped)
        if at_length is None:
            return None
        for name, value in at_length.measures.items():
            evaluation.measures[f"{name}_at_{length}"] = value
    return evaluation


def _to_python(number):
    # Counts become Python's integers, because all batches together may have 2³¹ targets or more.
    # Losses stay float32, in which those of earlier runs were summed.
    return int(number) if np.issubdtype(number.dtype, np.integer) else number
