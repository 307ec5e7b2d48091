"""Measures how much longer an evaluation on a benchmark takes than its forward passes alone.

    python benchmarks/evaluation.py --data_dir=FOLDER --task=piqa

Evaluates a gpt with 10M parameters (width 256, 12 blocks, random weights, SentencePiece tokenizer)
on a whole task of lm-evaluation-harness. Times the evaluation, and then only the forward passes of
the same batches. Both are timed twice; only the first evaluation includes compilation. Prints the
four times in seconds, and each relative to the mean time of the forward passes.
"""

import json
import os
import tempfile
from pathlib import Path

import jax
from absl import flags
from measuring import random_params, seconds_of

from smallgpt_jax import cli, models
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.evaluation import lm_eval_tasks
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.inference import TrainedModel

_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with the original files of the tasks.", required=True
)
_TASK = flags.DEFINE_string("task", "piqa", "Name of the task in lm-evaluation-harness.")


class RecordingScorer(Scorer):
    """A Scorer that keeps the sequences of the last call of `score`."""

    sequences = ()

    def score(self, sequences):
        self.sequences = sequences
        return super().score(sequences)


def main() -> None:
    texts = Source("python_stdlib").documents(Rules("text", "refuse", "refuse", 10**8))
    tokenizer = TokenizerSource("sentencepiece:2048").make(texts)
    model = models.build(
        architecture="gpt",
        vocab_size=2048,
        context_length=1024,
        num_layers=12,
        num_heads=8,
        d_model=256,
        mlp_ratio=4,
        dropout=0.0,
        use_bias=False,
        tie_embeddings=False,
        dtype="float32",
        scan_layers=False,
    )
    params = random_params(model)
    scorer = RecordingScorer(model, params)

    def language_model():
        from smallgpt_jax.evaluation.lm_eval_model import (
            SmallGPT,
        )  # imported here, so that the import is timed

        trained = TrainedModel(scorer.model, params, {}, tokenizer, 0)
        return SmallGPT(scorer, trained, lambda *_: None)

    def evaluate():
        with tempfile.TemporaryDirectory() as cache:
            lm_eval_tasks.evaluate(
                language_model,
                [_TASK.value],
                Path(_DATA_DIR.value),
                cache=Path(cache) / "cache",
                log_samples=False,
            )

    def forward():
        for batch in scorer.batches(scorer.sequences):
            jax.block_until_ready(scorer.run(batch))

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        times = {
            name: seconds_of(forward if "forward" in name else evaluate)
            for name in ("evaluate, compiling", "forward", "evaluate", "forward again")
        }
    bare = (times["forward"] + times["forward again"]) / 2
    for name, seconds in times.items():
        print(f"{name:20} {seconds:7.1f} s   {seconds / bare:.2f}")
    print(
        json.dumps(
            {
                "parameters": models.num_parameters(model),
                "sequences": len(scorer.sequences),
                "tokens": sum(len(sequence.tokens) - 1 for sequence in scorer.sequences),
                "ratio": times["evaluate"] / bare,
                "ratio_compiling": times["evaluate, compiling"] / bare,
                "seconds": times,
            }
        )
    )


if __name__ == "__main__":
    cli.run(main)
