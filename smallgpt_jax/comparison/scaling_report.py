"""The section of a report about scaling: runs named MODEL@SIZE, their laws, and the check of
held-out predictions.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from smallgpt_jax.comparison import prediction, records, scaling, scaling_figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.names import grouped, model_of, size_of
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.scaling import Fit, HeldOutCheck

SIZE_LABELS = {"parameters": "total", "active_parameters": "active"}
INTERVAL = f"{scaling.INTERVAL:.0%}"


def scaling_blocks(record: Record) -> list:
    if not records.is_scaling(record.runs):
        return []
    groups = grouped(prediction.records_of(record.runs), lambda row: row.name)
    lacking: dict[str, list[str]] = {}  # {what they lack: models}
    for name, rows in groups.items():
        lacking.setdefault(scaling.missing_for_fit(rows), []).append(name)
    fits = {name: scaling.fit(groups[name]) for name in lacking.pop("", [])}
    blocks = [
        Heading("Scaling laws"),
        *(Paragraph(text) for text in [check_text(record)] if text),
        Paragraph(
            "Fits of L = E + A/N^α + B/D^β to the last losses of all finished runs, with the "
            f"training tokens D. Intervals are {INTERVAL}, from {scaling.DRAWS:,} bootstrap "
            "samples of the runs."
        ),
    ]
    blocks += [
        Paragraph(f"No scaling law for lack of {lack}: {', '.join(names)}.")
        for lack, names in lacking.items()
    ]
    if unknown := sorted(
        {model_of(run.name) for run in record.runs if run.is_finished} - groups.keys()
    ):
        blocks.append(
            Paragraph(f"No scaling law, because the FLOPs are unknown: {', '.join(unknown)}.")
        )
    if fits:
        blocks += law_blocks(record, fits)
    return blocks + held_out_blocks(record)


def law_blocks(record: Record, fits: dict[str, Fit]) -> list:
    active = {
        name: scaling.fit(fitted.records, "active_parameters")
        for name, fitted in fits.items()
        if any(row.active_parameters != row.parameters for row in fitted.records)
    }
    return [
        Plot(
            "scaling",
            scaling_figures.loss_against_compute(
                fits, prediction.predictions_of(record.predictions)
            ),
            "Loss against training FLOPs. Open markers: means over the seeds, after the end of a "
            "schedule. Lines: the lowest loss of a model's law at each budget, over the trained "
            "sizes."
            + bool(record.predictions)
            * f" Filled markers: held-out, in front of the predicted {INTERVAL} "
            "intervals, shifted sideways to be told apart.",
        ),
        fit_table([*fits.values(), *active.values()]),
    ]


def fit_table(fits: Sequence[Fit]) -> Table:
    def cell(fitted: Fit, constant: str, form: str) -> str:
        return with_range(getattr(fitted.law, constant), *scaling.intervals(fitted)[constant], form)

    return Table(
        ("model", "N: parameters", "runs", "E", "A", "α", "B", "β", "deviation"),
        tuple(
            (
                fitted.name,
                SIZE_LABELS[fitted.size],
                str(len({row.run for row in fitted.records})),
                *(
                    cell(fitted, constant, form)
                    for constant, form in (
                        ("irreducible", ".3f"),
                        ("size_factor", ".3g"),
                        ("size_exponent", ".3f"),
                        ("token_factor", ".3g"),
                        ("token_exponent", ".3f"),
                    )
                ),
                f"{np.sqrt(np.mean(fitted.noise**2)):.4f}",
            )
            for fitted in fits
        ),
    )


# ------------------------------------------------------------------ held-out runs
def held_out_blocks(record: Record) -> list:
    if not record.held_out:
        return []
    content, size = record.predictions, record.held_out
    runs = [run for run in record.runs if size_of(run.name) == size]
    if content is None:
        return [
            Heading(f"Held out: {size}"),
            Paragraph(
                f"No prediction was made before the runs of size {size} were trained; they check "
                "nothing."
                if runs
                else f"The runs of size {size} are neither predicted nor trained yet."
            ),
        ]
    blocks = [
        Heading(f"Held out: {size}"),
        Paragraph(
            f"On {content['time'][:16].replace('T', ' ')} UTC, before a run of size {size} was "
            "trained, the laws of the other sizes predicted its losses (predictions.json, from "
            f"{len(content['records'])} records with the SHA-256 "
            f"{content['records_sha256'][:12]}…)."
        ),
    ]
    blocks += [
        Paragraph(f"{name}: no prediction; it {lack}.")
        for name, lack in content["not_predicted"].items()
    ]
    checks, held_out = checks_of(record), prediction.records_of(runs)
    predicted = {row.name for row in prediction.predictions_of(content)} | content[
        "not_predicted"
    ].keys()
    blocks += [
        Paragraph(f"{name}: no prediction was made before its run of size {size} was trained.")
        for name in dict.fromkeys(row.name for row in held_out)
        if name not in predicted
    ]
    outcomes = checks["parameters"].outcomes
    blocks.append(
        Plot(
            "scaling-held-out",
            scaling_figures.held_out(prediction.predictions_of(content), outcomes),
            f"Held-out size {size}, longest training. Bars: predicted {INTERVAL} interval and "
            "loss. Dots: trained, mean over the seeds.",
        )
    )
    text = (
        "; ".join(
            f"with N in {SIZE_LABELS[field]} parameters, the mean absolute error is "
            f"{check.error:.4f} nats, and {check.coverage:.0%} of the losses are inside their "
            f"{INTERVAL} intervals"
            for field, check in checks.items()
            if check.outcomes
        )
        or "no predicted run is finished yet"
    )
    blocks += [Paragraph(f"{text[0].upper()}{text[1:]}."), check_table(content, checks)]
    return blocks + (decision_blocks(checks) if checks["parameters"].by_law else [])


def checks_of(record: Record) -> dict[str, HeldOutCheck]:
    """Returns the check of the predictions by each kind of N."""
    content = record.predictions
    held_out = prediction.records_of(
        [run for run in record.runs if size_of(run.name) == record.held_out]
    )
    return {
        field: scaling.check_predictions(
            prediction.predictions_of(content, field), content["at_one_size"], held_out, field
        )
        for field in content["predictions"]
    }


def check_text(record: Record) -> str:
    """Returns a sentence about what the laws are worth, or "" without held-out runs."""
    check = checks_of(record)["parameters"] if record.held_out and record.predictions else None
    if check is None or not check.outcomes:
        return ""
    is_failed = check.coverage < scaling.INTERVAL / 2
    return (
        f"Laws of the smaller sizes missed the losses of size {record.held_out} by "
        f"{check.error:.2f} nats on average; {check.coverage:.0%} of these losses are inside the "
        f"predicted {INTERVAL} intervals"
        + is_failed * ". The laws failed: do not use them beyond the trained sizes"
        + "."
    )


def check_table(content: Mapping, checks: Mapping[str, HeldOutCheck]) -> Table:
    totals, rows = set(prediction.predictions_of(content)), []
    for field, check in checks.items():
        outcomes = {outcome.prediction: outcome for outcome in check.outcomes}
        for row in prediction.predictions_of(content, field):
            if (
                field != "parameters" and row in totals
            ):  # without experts, all parameters are active
                continue
            found = outcomes.get(row)
            trained = (
                (
                    f"{found.loss:.4f}",
                    f"{found.error:+.4f}",
                    "yes" if found.is_covered else "no",
                    f"{found.seeds}",
                )
                if found
                else (MISSING,) * 4
            )
            rows.append(
                (
                    row.name,
                    SIZE_LABELS[field],
                    f"{row.tokens:,.0f}",
                    f"{row.loss:.4f}",
                    f"{row.low:.4f} to {row.high:.4f}",
                    *trained,
                )
            )
    return Table(
        (
            "model",
            "N: parameters",
            "tokens",
            "predicted",
            f"{INTERVAL} interval",
            "trained",
            "error",
            "inside",
            "seeds",
        ),
        tuple(rows),
    )


def decision_blocks(checks: Mapping[str, HeldOutCheck]) -> list:
    methods = {
        f"laws, N: {SIZE_LABELS[field]} parameters": check.by_law for field, check in checks.items()
    }
    methods["baseline: order of the most expensive runs fitted"] = checks["parameters"].at_one_size
    return [
        Paragraph(
            "Which models are better at the held-out size, after the longest training? Right "
            "pairs: share of the pairs of models that are in the right order. Regret: held-out "
            "loss of the first model, minus the lowest."
        ),
        Table(
            ("order by", "order", "right pairs", "regret"),
            tuple(
                (method, ", ".join(found.ranking), f"{found.accuracy:.0%}", f"{found.regret:.4f}")
                for method, found in methods.items()
            ),
        ),
    ]
