"""Compares the validation loss of a run's model with the validation loss of a bigram model.

    python experiments/bigram.py --workdir=runs/pgpt

The bigram model has add-k smoothing and is fitted to the training tokens of the run. Several values
of k are tried, and the one with the lowest validation loss is used. This choice favours the bigram
model. Prints both losses, which are measured on the same validation tokens. The exit status is 0 if
the run's model has the lower loss, and 1 otherwise.
"""

import json
import sys
from pathlib import Path

import numpy as np
from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.data import batches
from smallgpt_jax.data.corpus import open_existing
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import metrics
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.names import METRICS_FILE, STORE_FILE

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")

SMOOTHING = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def bigram_loss(
    train: np.ndarray, current: np.ndarray, following: np.ndarray, vocab_size: int, k: float
) -> float:
    """Returns the mean of −log p(b | a) over pairs of consecutive tokens (a, b) of `current` and
    `following`, in nats.

    p(b | a) = (n(a, b) + k) / (n(a) + k·vocab_size), with the numbers n of the token and of the
    pair in `train`.
    """
    pairs, counts = np.unique(
        train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True
    )
    pair = current.astype(np.int64) * vocab_size + following
    place = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
    pair_counts = np.where(pairs[place] == pair, counts[place], 0)
    current_counts = np.bincount(train[:-1], minlength=vocab_size)[current]
    return -np.mean(np.log((pair_counts + k) / (current_counts + k * vocab_size)))


def compare(folder: Path) -> dict[str, float]:
    """Returns the validation losses of the bigram model with its best k, and of the run's last
    evaluation, at `step`.

    They are in nats per token.
    """
    config = read_config(folder)
    corpus = open_existing(config.data)
    trained_on = json.loads((folder / STORE_FILE).read_text())
    if corpus is None or json.loads(json.dumps(corpus.description)) != trained_on:
        raise UserError(
            f"{folder}: the run's token store has changed or is missing; prepare it again"
        )
    evaluations = [
        line for line in metrics.read_lines(folder / METRICS_FILE) if line["split"] == "eval"
    ]
    if not evaluations:
        raise UserError(f"{folder}: the run has no evaluation yet; train it further")
    train = np.concatenate([store.train.stream for store in corpus.stores])
    validation = corpus.pack(
        "validation",
        config.data.packing,
        config.data.separate_documents,
        config.model.context_length,
    )
    rows = batches.validation_batches(validation, config.train.batch_size, config.train.eval_steps)
    current, following = [], []
    for batch in rows:
        targets_BxT = batch.targets_BxT
        if targets_BxT is None:
            targets_BxT = batch.tokens_BxT1[:, 1:]
        current.append(batch.tokens_BxT1[:, :-1][batch.loss_mask_BxT])
        following.append(targets_BxT[batch.loss_mask_BxT])
    current, following = np.concatenate(current), np.concatenate(following)
    losses = {
        k: bigram_loss(train, current, following, corpus.tokenizer.vocab_size, k) for k in SMOOTHING
    }
    k = min(losses, key=losses.get)
    return {
        "k": k,
        "bigram_loss": float(losses[k]),
        "step": evaluations[-1]["step"],
        "model_loss": evaluations[-1]["loss"],
    }


def main() -> None:
    result = compare(Path(_WORKDIR.value))
    print(
        f"bigram model with add-{result['k']:g} smoothing: validation loss "
        f"{result['bigram_loss']:.4f}"
    )
    print(f"the run's model at step {result['step']}: validation loss {result['model_loss']:.4f}")
    print(json.dumps(result))
    if result["model_loss"] >= result["bigram_loss"]:
        sys.exit(1)


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    cli.run(main)
