"""Evaluation on a file of examples, each with a prompt and the right answer."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax import inference
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import report
from smallgpt_jax.evaluation.model_options import ModelOptions, join_name_parts
from smallgpt_jax.evaluation.progress import ScoringProgress
from smallgpt_jax.evaluation.questions import (
    GENERATED,
    METRICS,
    Question,
    choose_labels,
    exact_match,
    find_labels,
    generate_answers,
    mean_and_error,
    read_questions,
)
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

    def score(
        self, workdir: Path, model: ModelOptions, limit: float | None, log_samples: bool
    ) -> tuple[str, dict, str]:
        """Returns the name of the files to write, the results, and a table of them."""
        for metric in self.metrics:
            if metric not in METRICS:
                raise UserError(f"--metrics={metric}: must be one of {', '.join(METRICS)}")
        trained = model.load(workdir)
        form, template = training_format(workdir)
        questions = read_questions(
            str(self.path),
            trained.tokenizer,
            "completion" if form == "text" else form,
            template,
            trained.model.config.context_length,
            limit,
        )
        answers = self.answer(questions, trained, model)
        values, results = {}, {}
        for metric in METRICS:
            if metric in self.metrics:
                values[metric] = _measure(metric, questions, answers)
                mean, error = mean_and_error(values[metric])
                results[metric] = {"mean": mean, "standard_error": error}
        record = {
            "step": trained.step,
            "examples": str(self.path),
            "count": len(questions),
            "results": results,
            # `compare` reports results of the whole model on all examples.
            "is_whole": model.is_whole and limit is None,
        }
        if log_samples:
            record["samples"] = []
            for i, question in enumerate(questions):
                sample = {"where": question.where, "answer": question.answer}
                sample |= {name: column[i] for name, column in (answers | values).items()}
                record["samples"].append(sample)
        name = join_name_parts(
            "examples",
            model.file_name(trained.step),
            Path(self.path).stem[:100],
            *self.metrics,
            None if limit is None else f"limit{limit:g}",
            self.fingerprint(),
        )
        return name, record, report.examples_table(results, len(questions))

    def answer(
        self, questions: Sequence[Question], trained: inference.TrainedModel, model: ModelOptions
    ) -> dict[str, list[str]]:
        """Returns the model's answers as the metrics need them: the most likely "label", and the
        generated "text".
        """
        answers, progress = {}, ScoringProgress()
        if "accuracy" in self.metrics:
            answers["label"] = choose_labels(
                model.scorer(trained),
                trained.tokenizer,
                questions,
                self.labels or find_labels(questions),
                progress,
            )
        if GENERATED.keys() & set(self.metrics):
            text_model = inference.build_text_model(
                trained.model, trained.params, trained.tokenizer, trained.model_state
            )
            answers["text"] = generate_answers(text_model, questions, self.max_new_tokens, progress)
        return answers

    def fingerprint(self) -> str:
        """Returns a name for the settings that a file name does not contain."""
        settings = [str(self.path), list(self.labels) or None, self.max_new_tokens]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def _measure(
    metric: str, questions: Sequence[Question], answers: dict[str, list[str]]
) -> list[float]:
    if metric == "accuracy":
        function, column = exact_match, answers["label"]
    else:
        function, column = GENERATED[metric], answers["text"]
    return [function(question.answer, answer) for question, answer in zip(questions, column)]
