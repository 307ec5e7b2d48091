"""Writes the report of a comparison: report.html, report.md, its figures and results.json."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.findings import Findings
from smallgpt_jax.analysis.record import RESULTS_FILE, Record
from smallgpt_jax.formatting import finite, list_names
from smallgpt_jax.report import figures, tables
from smallgpt_jax.report.cautions import cautions
from smallgpt_jax.report.rendering import render
from smallgpt_jax.run import plotting
from smallgpt_jax.storage.atomic import write_atomically

MAX_NAMES = 8  # in the title


class Report(NamedTuple):
    record: Record
    findings: Findings

    def __str__(self) -> str:
        return summary(self.record, self.findings)


def write(
    folder: Path, record: Record, findings: Findings, logged: figures.LoggedCurves | None = None
) -> None:
    """Writes the report into an existing folder. `logged` are losses of `figures.read_logged`."""
    drawn = figures.draw(findings, record.runs, logged or {})
    # Markdown shows these files; report.html contains its figures.
    for name, one in drawn.items():
        write_atomically(folder / f"{name}.png", plotting.png(one.figure))
    results = {**records.content(record), "ranking": ranking_facts(findings)}
    write_atomically(folder / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
    content = _content(record, findings, drawn)
    write_atomically(folder / "report.md", render("report", "markdown", **content))
    write_atomically(folder / "report.html", render("page", "html", **content))


def markdown(record: Record, findings: Findings) -> str:
    """Returns report.md without its figures."""
    return render("report", "markdown", **_content(record, findings, {}))


def summary(record: Record, findings: Findings) -> str:
    """Returns the setup and the answers for a terminal."""
    return render("summary", "text", **_content(record, findings, {}))


def _content(
    record: Record, findings: Findings, drawn: Mapping[str, figures.Drawn]
) -> dict[str, Any]:
    ranked = record.longest_runs(findings.ranked_size)
    # The reference is a model; tables of runs need its name at the ranked size.
    bases = [run.name for run in ranked if run.model == findings.reference]
    return {
        "title": title(record),
        "record": record,
        "findings": findings,
        "tables": tables,
        "figures": drawn,
        "cautions": cautions(findings, record),
        "ranked_runs": ranked,
        "ranked_reference": bases[0] if bases else findings.reference,
    }


def title(record: Record) -> str:
    """Returns the record's title with the names of its models, if there are several."""
    names = dict.fromkeys(run.model for run in record.runs)
    return f"{record.title}: {list_names(names, MAX_NAMES)}" if len(names) > 1 else record.title


def ranking_facts(findings: Findings) -> dict[str, Any]:
    """Returns the ranking for other programs, as JSON has it: None for a diverged loss."""
    contest = findings.ranking
    if contest is None:
        return {"means": {}, "chosen": None, "pairs": []}
    return finite(
        {
            "means": {one.name: one.loss for one in contest.standings},
            "chosen": contest.chosen,
            "possible": [one.name for one in contest.possible],
            "pairs": [dataclasses.asdict(pair) for pair in contest.pairs],
        }
    )
