"""Measures how well the top vectors of models tell the topic of a text: accuracy of a linear probe.

    python experiments/topic_probe.py --workdirs=runs/objectives/runs/ftp-seed1337,runs/objectives/runs/causal-seed1337

The texts are windows of context_length tokens from packages of Python's standard library
(topics.py), and their package is the topic. The vectors are the inputs of the output head: single
ones, of every eighth position in the second half of a window, and their mean over all positions.
The probe is a multinomial logistic regression on standardized vectors. It is fitted to some files,
and its accuracy is that on windows of other files.

For comparison, the same probe reads the counts of the tokens of the whole window. Writes a file in
the form of lm-evaluation-harness's results to WORKDIR/evaluations/, so that smallgpt_jax.compare
reports it. Prints a table.
"""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import topics
from absl import app, flags
from linear_probe import predict

from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.inference import TrainedModel, load_trained
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import local_path

WORKDIRS = flags.DEFINE_list("workdirs", None, "Run directories.", required=True)

CHARACTERS, COUNTS = (
    600,
    {"train": 200, "test": 60},
)  # of a text; texts per topic, cut to the context length
BATCH = 20
EVERY = 8  # positions


def windows(tokenizer: Tokenizer, length: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns {split: (tokens (N, length), topics (N,))}. Texts with fewer tokens are left out."""
    found = {}
    for split, pieces in topics.pieces(CHARACTERS, COUNTS).items():
        rows = [
            np.append([tokenizer.begin_of_text], tokens)[:length]
            for tokens in tokenizer.encode([text for _, text in pieces])
        ]
        labels = [topics.TOPICS.index(topic) for topic, _ in pieces]
        whole = [number for number, row in enumerate(rows) if len(row) == length]
        found[split] = np.stack([rows[number] for number in whole]), np.array(labels)[whole]
    return found


def top_vectors(trained: TrainedModel) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns a function of N windows that returns {kind: (N, vectors per window, width)}."""
    places = np.arange(
        trained.model.config.context_length // 2, trained.model.config.context_length, EVERY
    )

    @jax.jit
    def vectors(tokens_BxT):
        x_BxTxW = trained.model.apply(
            {"params": trained.params, "state": trained.model_state}, tokens_BxT, method="hidden"
        )
        return {
            "single vectors": x_BxTxW[:, places],
            "mean vector": x_BxTxW.mean(axis=1, keepdims=True),
        }

    def of_all(tokens_NxT):
        parts = [
            vectors(np.take(tokens_NxT, range(first, first + BATCH), axis=0, mode="clip"))
            for first in range(0, len(tokens_NxT), BATCH)
        ]
        return {
            name: np.concatenate([np.asarray(part[name], np.float64) for part in parts])[
                : len(tokens_NxT)
            ]
            for name in parts[0]
        }

    return of_all


def token_counts(vocab_size: int) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    return lambda tokens_NxT: {
        "token counts": np.stack(
            [np.bincount(row, minlength=vocab_size) for row in tokens_NxT]
        ).astype(np.float64)[:, None]
    }


def accuracies(features: Callable[[np.ndarray], dict[str, np.ndarray]], splits) -> dict[str, float]:
    (train_NxT, train_labels), (test_MxT, test_labels) = splits["train"], splits["test"]
    train, test, found = features(train_NxT), features(test_MxT), {}
    for name, x_NxPxD in train.items():
        count, width = x_NxPxD.shape[1:]
        predicted = predict(
            x_NxPxD.reshape(-1, width),
            np.repeat(train_labels, count),
            test[name].reshape(-1, width),
        )
        found[name] = float(np.mean(predicted == np.repeat(test_labels, count)))
    return found


def write_results(workdir: Path, step: int, found: dict[str, float], count: int) -> None:
    folder = workdir / EVALUATION_FOLDER
    folder.mkdir(exist_ok=True)
    results = {
        f"topic, {name}": {"acc,none": accuracy, "sample_len": count}
        for name, accuracy in found.items()
    }
    write_atomically(
        folder / f"step{step}-topic_probe.json", json.dumps({"results": results}, indent=2) + "\n"
    )


def main(_) -> None:
    table, counted = {}, {}
    for name in WORKDIRS.value:
        workdir = local_path("--workdirs", name)
        trained = load_trained(workdir)
        splits = windows(trained.tokenizer, trained.model.config.context_length)
        if not counted:  # runs of one comparison have one tokenizer
            counted = accuracies(token_counts(trained.tokenizer.vocab_size), splits)
        table[workdir.name] = accuracies(top_vectors(trained), splits)
        write_results(workdir, trained.step, table[workdir.name], len(splits["test"][1]))
        print(
            workdir.name,
            " ".join(f"{accuracy:.4f} {kind}" for kind, accuracy in table[workdir.name].items()),
            flush=True,
        )
    print(
        json.dumps(
            {
                "texts": {split: len(labels) for split, (_, labels) in splits.items()},
                **counted,
                **table,
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
