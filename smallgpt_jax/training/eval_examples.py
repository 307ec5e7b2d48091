"""The multiple-choice examples of config.train.eval_examples, measured at each evaluation.

The measures are those of `evaluate --examples --metrics=accuracy` on the same weights. Here, rows
are spread over the mesh of the run, in the layout of its weights.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.data.questions import (
    Question,
    find_labels,
    label_bits,
    label_sequences,
    read_questions,
)
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.objectives.examples import Examples
from smallgpt_jax.objectives.objective import forward
from smallgpt_jax.ops.cross_entropy import LossOptions, row_cross_entropy
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import ACCURACY, ANSWER_BITS, ANSWER_MARGIN
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.training_text import format_of
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.step import gather_weights

_FIELD = "config.train.eval_examples"
_LENGTH_STEP = 16  # rows have a multiple of this many positions, up to the context length


@dataclasses.dataclass(frozen=True)
class EvalExamples:
    questions: Sequence[Question]
    labels: Sequence[str]  # the possible answers to each question
    tokens_RxT1: np.ndarray  # a row per question and label
    is_label_RxT: np.ndarray  # whether the token after a position is one of the label
    program: Program

    def measure(self, state: TrainState, is_stopped: Callable[[], bool]) -> dict[str, float] | None:
        """Returns means over the questions, or None if stopped."""
        train, mesh = self.program.config.train, self.program.mesh
        rows = train.batch_size // train.microbatches  # as many as evaluation computes at once
        local = sharding.local_rows(mesh, rows)
        log_likelihoods = []
        for first in range(0, len(self.tokens_RxT1), rows):
            if is_stopped():
                return None
            # The last batch is filled with further copies of the rows.
            numbers_B = np.arange(first, first + rows)[local] % len(self.tokens_RxT1)
            batch = Batch(self.tokens_RxT1[numbers_B], loss_mask_BxT=self.is_label_RxT[numbers_B])
            batch = jax.tree.map(lambda x: sharding.global_batch(mesh, local, rows, x), batch)
            with sharding.use_mesh(mesh):
                nats_B = self._compiled_losses(state.evaluated, state.model_state, batch)
            log_likelihoods += (-np.asarray(nats_B, np.float64)).tolist()
        scores_QxL = np.reshape(
            log_likelihoods[: len(self.tokens_RxT1)], (len(self.questions), len(self.labels))
        )
        return self._means(scores_QxL)

    @functools.cached_property
    def _compiled_losses(self) -> Callable:
        """(`TrainState.evaluated`, model_state, batch) → −log-likelihood of each row's label."""
        replicated = sharding.replicated(self.program.mesh)  # every process reads all rows
        return jax.jit(functools.partial(_row_losses, self.program), out_shardings=replicated)

    def _means(self, scores_QxL: np.ndarray) -> dict[str, float]:
        chosen = [self.labels[best] for best in scores_QxL.argmax(axis=1)]
        is_right = [label == question.answer for label, question in zip(chosen, self.questions)]
        # Each answer is a label, so none lacks its bits.
        bits = [one for one in label_bits(scores_QxL, self.questions, self.labels) if one]
        return {
            ACCURACY: float(np.mean(is_right)),
            ANSWER_BITS: float(np.mean([one.right for one in bits])),
            ANSWER_MARGIN: float(np.mean([one.margin for one in bits])),
        }


def _row_losses(program: Program, trained, model_state, batch: Batch):
    objective, model = program.objective, program.model
    prefix_BxT = None
    if model.config.attention_mask == "prefix":
        # The prefix ends at the first position whose next token is the label's.
        is_label_BxT = batch.loss_mask_BxT
        prefix_BxT = jnp.cumsum(is_label_BxT, axis=1) <= is_label_BxT
    examples = Examples(batch, prefix_BxT)
    params = objective.weights(gather_weights(program, trained))
    outputs = forward(model, params, model_state, examples)
    return row_cross_entropy(
        outputs.x_BxTxW,
        outputs.head_VxW,
        examples.targets_BxT,
        examples.weights(1),
        objective.loss_chunks,
        LossOptions(softcap=outputs.logit_softcap),
    )


def open_examples(
    config: Config, program: Program, corpus: Corpus | ProbeCorpus
) -> EvalExamples | None:
    """Returns the examples of config.train.eval_examples; None if it names no file. Raises
    UserError for an invalid file (collective).
    """
    train, tokenizer = config.train, corpus.tokenizer
    if not train.eval_examples:
        return None
    form, template = format_of(corpus.description)
    context_length = config.model.context_length
    if form == "text":
        form = "completion"
    try:
        questions = read_questions(train.eval_examples, tokenizer, form, template, context_length)
    except UserError as error:
        raise UserError(str(error).replace("--examples", _FIELD)) from None
    labels = find_labels(questions, _FIELD, "use examples whose answers are 2 to 20 labels")
    sequences = label_sequences(questions, labels, tokenizer, context_length)
    # Each process reads the file, perhaps from a disk of its own.
    distributed.require_equal(_FIELD, json.dumps(sequences))
    # The chunks of the loss must divide the length.
    step = _LENGTH_STEP * train.loss_chunks
    longest = max(len(tokens) - 1 for tokens, _ in sequences)
    length = min(-(-longest // step) * step, context_length)
    tokens_RxT1 = np.zeros((len(sequences), length + 1), np.int32)
    is_label_RxT = np.zeros((len(sequences), length), bool)
    for row, (tokens, count) in enumerate(sequences):
        tokens_RxT1[row, : len(tokens)] = tokens
        # position i predicts token i + 1
        is_label_RxT[row, len(tokens) - 1 - count : len(tokens) - 1] = True
    return EvalExamples(questions, labels, tokens_RxT1, is_label_RxT, program)
