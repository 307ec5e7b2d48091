"""Merges the records of several comparisons."""

import itertools
from collections.abc import Container, Sequence
from pathlib import Path

from smallgpt_jax.analysis.record import Grid, Record, Run
from smallgpt_jax.comparison.comparability import require_comparable, require_mergeable
from smallgpt_jax.data.corpus import DESCRIPTION
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.json_files import find_mismatch


def merge(records: Sequence[tuple[Path, Record]], command: str) -> Record:
    """Returns one record of the runs of several. A run that is in several records counts once.

    Raises UserError if runs of different records cannot be compared: other texts, evaluation rows
    or averages, or different runs with the same name.
    """
    for path, record in records:
        _require_texts(path, record.runs)
    for (one_path, one), (other_path, other) in itertools.combinations(records, 2):
        require_mergeable(f"{one_path} and {other_path}", one.runs, other.runs)
    merged: dict[tuple[str, int, float], Run] = {}
    for _, record in records:
        for run in record.runs:
            merged.setdefault((run.name, run.seed, run.horizon), run)
    # As `compare` trains them: seed by seed.
    runs = sorted(merged.values(), key=lambda run: run.seed)
    require_comparable(runs)
    names = list(dict.fromkeys(run.name for run in runs))
    each = [record for _, record in records]
    title = each[0].title if len(each) == 1 else f"{len(names)} models, from {len(each)} records"
    predictions = [record.predictions for record in each if record.predictions]
    return Record(
        title=title,
        budget=" ".join(dict.fromkeys(record.budget for record in each)),
        command=command,
        reference=each[0].reference,
        runs=tuple(runs),
        learning_rates=_merged_grids(each, names, merged.keys()),
        held_out=next(filter(None, (record.held_out for record in each)), ""),
        # A prediction counts from when it was first made.
        predictions=min(predictions, key=lambda one: one.time, default=None),
        seeds_as_needed=any(record.seeds_as_needed for record in each),
    )


def _require_texts(path: Path, runs: Sequence[Run]) -> None:
    """Raises UserError for a text that cannot be compared with others."""
    for number, run in enumerate(runs):
        field = f"runs[{number}].text.description"
        mismatch = run.text and find_mismatch(run.text.description, DESCRIPTION, field)
        if mismatch:
            raise UserError(f"{path}: {mismatch}; repeat the command that made it")


def _merged_grids(
    records: Sequence[Record], names: Sequence[str], runs: Container[tuple[str, int, float]]
) -> dict[str, Grid]:
    """Returns {name: grid}, in the order of `names`. `runs` are (name, seed, horizon)."""
    grids: dict[str, Grid] = {}
    for record in records:
        for name, grid in record.learning_rates.items():
            # The report warns of a grid whose seed also is a result's. Of several grids of a name,
            # such a one is kept, or else the first.
            if name not in grids or (name, grid.seed, 1.0) in runs:
                grids[name] = grid
    return {name: grids[name] for name in (*names, *grids) if name in grids}
