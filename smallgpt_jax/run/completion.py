"""Whether a run is complete: its last step is saved and evaluated."""

from pathlib import Path

from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_lines_from
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE


def is_finished(workdir: Path, config: Config, corpus: Corpus) -> bool:
    """Returns whether the last step is saved and evaluated; see `is_evaluated`."""
    steps = config.train.steps
    is_saved = steps in saved_steps(workdir / CHECKPOINT_FOLDER)
    return is_saved and is_evaluated(workdir, config, corpus, steps)


def is_evaluated(workdir: Path, config: Config, corpus: Corpus, step: int) -> bool:
    """Returns whether the newest evaluation of `step` was on the validation rows of `config`."""
    _, lines = read_lines_from(workdir / METRICS_FILE, step)
    # The number of targets tells the rows: it changes with config.train.eval_steps.
    targets = [
        line["targets"] for line in lines if line["split"] == "eval" and line["step"] == step
    ]
    return bool(targets) and targets[-1] == num_validation_targets(
        corpus, config.data, config.model, config.train
    )
