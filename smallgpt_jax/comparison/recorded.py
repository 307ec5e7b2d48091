"""Runs that a comparison takes over from records, which were made elsewhere, instead of training
them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax.comparison import records
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.comparison.runs import Comparison, shortened
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.training_text import identity_of, text_changes

RATES = ("optimizer.learning_rate", "optimizer.final_learning_rate")


def take_over(comparison: Comparison, paths: Sequence[Path], text: Corpus) -> Comparison:
    """Returns the comparison with the finished runs of the records that belong to it.

    Raises UserError if one of them has another text, config or validation rows than the comparison.
    """
    found = records.merge([(path, records.read(path)) for path in paths], "")
    for name in dict.fromkeys(run.name for run in found.runs if run.name not in comparison.models):
        print(f"--results: {name} is not in this comparison; left out", flush=True)
    runs = [
        run
        for run in found.runs
        if run.name in comparison.models
        and run.horizon in comparison.horizons
        and (run.is_finished or run.diverged)
    ]
    for run in runs:
        require_same(run, comparison, text)
    return dataclasses.replace(
        comparison,
        recorded=dataclasses.replace(
            found,
            runs=tuple(dataclasses.replace(run, averaged=comparison.averaged) for run in runs),
        ),
    )


def require_same(run: Run, comparison: Comparison, text: Corpus) -> None:
    where, advice = (
        f"--results: {run.name}, seed {run.seed}",
        "leave out its record, or give the run another name",
    )
    if changes := text_changes(run.text, identity_of(text)):
        raise UserError(
            f"{where}: was trained on another text than this comparison ({changes}); use the same "
            "text, or leave out its record"
        )
    config = shortened(comparison.models[run.name], run.horizon)
    own, planned = map(records.fixed_fields, (run.config, config.flat()))
    if comparison.multiples:  # then the grid determines the learning rates
        own, planned = (
            {field: value for field, value in fields.items() if field not in RATES}
            for fields in (own, planned)
        )
    if differences := records.different(own, planned):
        raise UserError(
            f"{where}: has another config than this comparison ({differences}); {advice}"
        )
    targets = num_validation_targets(
        text,
        config.data,
        context_length=config.model.context_length,
        batch_size=config.train.batch_size,
        eval_steps=config.train.eval_steps,
    )
    if run.last and run.last.targets != targets:
        raise UserError(
            f"{where}: its loss is a mean over {run.last.targets:,} tokens, those of this "
            f"comparison over {targets:,}; set "
            f"config.train.eval_steps={run.config['train.eval_steps']}"
        )
