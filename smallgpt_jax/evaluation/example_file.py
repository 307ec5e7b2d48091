"""Evaluation on a file of examples, each with a prompt and the right answer."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from smallgpt_jax import inference
from smallgpt_jax.data.questions import Question, find_labels, label_bits, read_questions
from smallgpt_jax.errors import UserError, require_list
from smallgpt_jax.evaluation import report
from smallgpt_jax.evaluation.model_options import (
    ModelOptions,
    join_name_parts,
    name_hash,
    short_stem,
)
from smallgpt_jax.evaluation.progress import ScoringProgress
from smallgpt_jax.evaluation.questions import (
    GENERATED,
    METRICS,
    exact_match,
    generate_answers,
    mean_and_error,
    score_labels,
)
from smallgpt_jax.run.metrics import ANSWER_BITS, ANSWER_MARGIN
from smallgpt_jax.run.training_text import training_format


@dataclasses.dataclass(frozen=True)
class ExampleFile:
    # JSON lines in the format of the run's text (config.data.format), or with prompt and completion
    path: str | Path
    _: dataclasses.KW_ONLY
    metrics: Sequence[str] = ("exact_match",)  # names in METRICS
    # of the metric "accuracy": the possible answers; (): the different answers in the file
    labels: Sequence[str] = ()
    max_new_tokens: int = 64  # of a generated answer

    def __post_init__(self):
        require_list("metrics", self.metrics)
        require_list("labels", self.labels)

    def score(
        self, workdir: Path, model: ModelOptions, limit: float | None, log_samples: bool
    ) -> tuple[str, dict, str]:
        """Returns the name of the files to write, the results, and a table of them."""
        for metric in self.metrics:
            if metric not in METRICS:
                raise UserError(f"--metrics={metric}: must be one of {', '.join(METRICS)}")
        if self.labels and "accuracy" not in self.metrics:
            raise UserError("--label: is for --metrics=accuracy; add it, or omit the labels")
        if self.labels and len(set(self.labels)) < 2:
            raise UserError("--label: needs at least two different labels")
        trained = model.load(workdir)
        # the prompts are written as in training, so that the model knows where an answer begins
        form, template = training_format(workdir)
        questions = read_questions(
            str(self.path),
            trained.tokenizer,
            "completion" if form == "text" else form,
            template,
            trained.model.config.context_length,
            limit,
        )
        answers, values = self.answer(questions, trained, model)
        results = {metric: mean_and_error(column) for metric, column in values.items()}
        record = {
            "step": trained.step,
            "examples": str(self.path),
            "count": len(questions),
            "results": results,
            # `compare` reports results of the whole model on all examples.
            "is_whole": model.is_whole and limit is None,
        }
        if log_samples:
            columns: dict[str, list] = {
                "where": [question.where for question in questions],
                "answer": [question.answer for question in questions],
                **answers,
                **values,
            }
            rows = zip(*columns.values(), strict=True)
            record["samples"] = [dict(zip(columns, row)) for row in rows]
        name = join_name_parts(
            "examples",
            model.file_name(trained.step),
            short_stem(self.path),  # the fingerprint tells files apart
            *self.metrics,
            None if limit is None else f"limit{limit:g}",
            self.fingerprint(),
        )
        return name, record, report.examples_table(results, len(questions))

    def answer(
        self, questions: Sequence[Question], trained: inference.TrainedModel, model: ModelOptions
    ) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
        """Returns the model's answers as the metrics need them, the most likely "label" and the
        generated "text", and the values of all metrics.
        """
        answers, values, progress = {}, {}, ScoringProgress()
        if "accuracy" in self.metrics:
            labels = self.labels or find_labels(questions)
            scores_QxL = score_labels(
                model.scorer(trained), trained.tokenizer, questions, labels, progress
            )
            answers["label"] = [labels[best] for best in scores_QxL.argmax(axis=1)]
            values["accuracy"] = _measure(exact_match, questions, answers["label"])
            bits = label_bits(scores_QxL.tolist(), questions, labels)
            known = [of_question for of_question in bits if of_question is not None]
            if len(known) == len(questions):  # each answer is one of the labels
                values[ANSWER_BITS] = [of_question.right for of_question in known]
                values[ANSWER_MARGIN] = [of_question.margin for of_question in known]
        if GENERATED.keys() & set(self.metrics):
            answers["text"] = generate_answers(
                trained.text_model(), questions, self.max_new_tokens, progress
            )
            for metric, function in GENERATED.items():
                if metric in self.metrics:
                    values[metric] = _measure(function, questions, answers["text"])
        return answers, values

    def fingerprint(self) -> str:
        """Returns a name for the settings that a file name does not contain."""
        settings = [str(self.path), list(self.labels) or None, self.max_new_tokens]
        return name_hash(json.dumps(settings))


def _measure(
    function: Callable[[str, str], float], questions: Sequence[Question], answers: Sequence[str]
) -> list[float]:
    return [function(question.answer, answer) for question, answer in zip(questions, answers)]
