"""Whether a run is complete: its last step is saved and evaluated."""

from pathlib import Path

from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.run.checkpoint import saved_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE


def is_finished(workdir: Path, config: Config, corpus: Corpus) -> bool:
    """Evaluations on other validation rows do not count; see `evaluated_steps`."""
    steps = config.train.steps
    return steps in saved_steps(workdir / CHECKPOINT_FOLDER) and steps in evaluated_steps(
        workdir, config, corpus
    )


def evaluated_steps(workdir: Path, config: Config, corpus: Corpus) -> set[int]:
    """Counts only evaluations on the validation rows of `config`, recognized by their number of
    targets.
    """
    lines = {
        line["step"]: line for line in read_lines(workdir / METRICS_FILE) if line["split"] == "eval"
    }
    if not lines:
        return set()
    targets = num_validation_targets(
        corpus,
        config.data,
        context_length=config.model.context_length,
        batch_size=config.train.batch_size,
        eval_steps=config.train.eval_steps,
    )
    return {step for step, line in lines.items() if line["targets"] == targets}
