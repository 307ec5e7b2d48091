"""The section of a report that says which model to choose for which budget."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from smallgpt_jax.comparison import choice, equal_budgets, scaling_figures
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Plot, Table, with_range
from smallgpt_jax.comparison.candidates import (
    NEAR,
    Candidate,
    by_model,
    pareto_front,
    read_candidates,
)
from smallgpt_jax.comparison.choice import Answer
from smallgpt_jax.comparison.contest import CERTAIN, STAKE
from smallgpt_jax.comparison.costs import BUDGETS
from smallgpt_jax.comparison.equal_budgets import Curve, Estimate, Segment
from smallgpt_jax.comparison.names import model_of
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.formatting import millions

# {budget: (label, format of a limit)}
BUDGET_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "flops": ("training FLOPs", "{:.3g}".format),
    "parameters": ("parameters", lambda count: millions(round(count))),
    "decode_ms": ("decoding step, batch 1, full cache", "{:.3g} ms".format),
    "memory": ("weights and full cache, batch 1", lambda size: f"{size / 1e6:.3g} MB"),
}
MAX_LIMITS = 5  # per budget
CANNOT_TELL = "cannot tell"


def choice_blocks(record: Record) -> list:
    """Returns the answers of `choose` to the budgets of the comparison; [] for fewer than two
    finished models.
    """
    content = {"command": record.command, "runs": [dataclasses.asdict(run) for run in record.runs]}
    candidates, _ = read_candidates(content["runs"], BUDGETS["flops"])
    if len({candidate.model for candidate in candidates}) < 2:
        return []
    by_budget = [
        choice.answers(content, name, limits(content["runs"], name)) for name in BUDGET_FORMATS
    ]
    found = [answer for answers in by_budget for answer in answers]
    intro = [Heading("Which model?")]
    if len({answer.reason for answer in found}) == 1 and found[0].chosen is None:
        return [*intro, Paragraph(f"Cannot tell, because {found[0].reason}.")]
    intro += [Paragraph(outcome(answers)) for answers in by_budget if answers]
    text = (
        "P: probability of the lowest loss within the budget. A model is chosen from "
        f"{CERTAIN:.1%} on; otherwise all that may be the best are named. Loss: of the first one "
        f"(80% interval). At stake: with a probability of {STAKE:.0%}, the first one is at most "
        "this far above the lowest loss. Seeds: number that would tell the first two apart. "
        "python -m smallgpt_jax.choose answers for other budgets."
    )
    notes = [
        f"{capitalized(BUDGET_FORMATS[last.budget][0])}: {' '.join(last.notes)}"
        for *_, last in filter(None, by_budget)
        if last.notes
    ]
    reference = model_of(record.reference)
    curves = {
        name: curve
        for name, group in by_model(candidates).items()
        if (curve := equal_budgets.curve_of(group))
    }
    plots = (
        [
            Plot(
                "equal-flops",
                scaling_figures.difference_from(curves, reference),
                f"Loss minus that of {reference} at equal training FLOPs; below zero, a model is "
                "better. Means over the seeds, with 80% intervals of the means. Between the "
                "budgets of runs, losses are interpolated.",
            )
        ]
        if reference in curves and len(curves) > 1
        else []
    )
    compared = [
        answer
        for answer in by_budget[0]
        if answer.contenders and answer.compared_at == answer.limit
    ]
    return [
        *intro,
        *plots,
        answers_table(found),
        Paragraph(text),
        *map(Paragraph, notes),
        *(equal_flops_blocks(compared, curves, reference) if len(compared) > 1 else []),
    ]


def outcome(found: Sequence[Answer]) -> str:
    """Returns one sentence about the models to take for the limits of one budget."""
    label, form = BUDGET_FORMATS[found[0].budget]
    parts = []
    for models, group in itertools.groupby(found, key=named_models):
        group = list(group)
        costs = [form(answer.limit) for answer in group]
        reason = ", because " + group[-1].reason.partition(". ")[0] if models == CANNOT_TELL else ""
        parts.append(f"{models} at {' to '.join(dict.fromkeys((costs[0], costs[-1])))}{reason}")
    return f"{capitalized(label)}: {'; '.join(parts)}."


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def named_models(answer: Answer) -> str:
    if answer.chosen:
        return answer.chosen
    if answer.possible and answer.compared_at == answer.limit:
        return f"{choice.enumeration(answer.possible, 'or')} (cannot be told apart)"
    return CANNOT_TELL


def limits(runs: Sequence[dict], name: str) -> list[float]:
    """Returns the budgets to ask about, in ascending order.

    Training budgets: those at which at least two models were trained, or if these are many, powers
    of ten, the largest budget of all models, and the next power of ten. Others: the costs on the
    Pareto front; of those about equal, the highest.
    """
    candidates, _ = read_candidates(runs, BUDGETS[name])
    if not BUDGETS[name].is_training:
        found = [group[-1].cost for group in groups_of_near_costs(pareto_front(candidates))]
    else:
        groups = groups_of_near_costs([one for one in candidates if one.cost is not None])
        found = [group[-1].cost for group in groups if len({one.model for one in group}) > 1]
        if len(found) > MAX_LIMITS:
            found = powers_of_ten(candidates) or found
    return found[-MAX_LIMITS:]


def powers_of_ten(candidates: Sequence[Candidate]) -> list[float]:
    """Returns those between the least and the largest budget of all models, this largest budget,
    and the next power.
    """
    costs = [[one.cost for one in group] for group in by_model(candidates).values()]
    low, high = max(map(min, costs)), min(map(max, costs))
    exponents = np.arange(np.ceil(np.log10(low)), np.floor(np.log10(high)) + 1)
    return (
        [*(10.0**exponents).tolist(), high, float(10.0 ** np.ceil(np.log10(high)))]
        if low < high
        else []
    )


def groups_of_near_costs(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Both the groups and their candidates are in ascending order of cost."""
    found, left = [], sorted(candidates, key=lambda one: one.cost)
    while left:
        found.append([one for one in left if one.cost * NEAR >= left[-1].cost])
        left = left[: -len(found[-1])]
    return found[::-1]


def answers_table(found: Sequence[Answer]) -> Table:
    rows = []
    for answer in found:
        label, form = BUDGET_FORMATS[answer.budget]
        models, is_direct = named_models(answer), answer.compared_at == answer.limit
        rows.append(
            (
                label,
                form(answer.limit),
                models.removesuffix(" (cannot be told apart)"),
                *(contest_cells(answer) if is_direct and answer.contenders else [MISSING] * 4),
                MISSING if is_direct and len(answer.contenders) > 1 else answer.reason,
            )
        )
    return Table(
        ("budget", "at most", "model", "P", "loss", "at stake", "seeds", "remark"), tuple(rows)
    )


def contest_cells(answer: Answer) -> tuple[str, ...]:
    by_name = {row.name: row for row in answer.contenders}
    first, *others = [by_name[name] for name in answer.possible]
    probabilities = [answer.probability, *(row.probability for row in others)]
    return (
        ", ".join(f"{probability:.2f}" for probability in probabilities),
        loss_cell(first, 4),
        f"{answer.at_stake:.2g}" if others else MISSING,
        str(answer.seeds_needed or MISSING) if others else MISSING,
    )


def loss_cell(row: choice.Row, digits: int) -> str:
    interval = choice.format_interval(row, digits)
    return f"{row.loss:.{digits}f}" + (f" ({interval})" if interval else "")


def equal_flops_blocks(
    found: Sequence[Answer], curves: Mapping[str, Curve], reference: str
) -> list:
    """Returns the losses at the limits of answers, and comparisons with the reference."""
    blocks = [
        Paragraph("Losses at equal training FLOPs (80% intervals):"),
        equal_flops_table(found),
    ]
    if reference not in curves:
        return blocks
    others = [curve for name, curve in curves.items() if name != reference]
    multipliers = tuple(
        (
            curve.name,
            *(
                multiplier_cell(
                    equal_budgets.compute_multiplier(curve, curves[reference], answer.limit)
                )
                for answer in found
            ),
        )
        for curve in others
    )
    orders = tuple(
        (curve.name, order_text(equal_budgets.order(curve, curves[reference]))) for curve in others
    )
    return [
        *blocks,
        Paragraph(
            f"Compute multipliers: the FLOPs of {reference}, in the head of the table, divided by "
            "the FLOPs with which a model reaches the same loss. Above 1, the model needs less. "
            f"{MISSING}: it does not reach this loss within the trained budgets."
        ),
        Table(
            ("model", *(BUDGET_FORMATS["flops"][1](answer.limit) for answer in found)), multipliers
        ),
        Paragraph(
            f"The order of each model and {reference}. A model is better if the 95% interval of "
            "the paired difference excludes zero; its spread is drawn towards that at other "
            "budgets."
        ),
        Table(("model", f"better model of it and {reference}, by FLOPs"), orders),
    ]


def multiplier_cell(found: Estimate | None) -> str:
    return MISSING if found is None else with_range(found.mean, found.low, found.high, ".2f")


def order_text(segments: Sequence[Segment]) -> str:
    if not segments:
        return "not trained on common budgets"
    return "; ".join(
        f"{segment.low:.2g} to {segment.high:.2g}: {segment.better or 'cannot be told'}"
        for segment in segments
    )


def equal_flops_table(found: Sequence[Answer]) -> Table:
    """Returns a row per model, in the order of the losses at the largest budget, and a column per
    budget.
    """
    losses = [{row.name: loss_cell(row, 3) for row in answer.contenders} for answer in found]
    names = dict.fromkeys(name for cells in reversed(losses) for name in cells)
    return Table(
        ("model", *(BUDGET_FORMATS["flops"][1](answer.limit) for answer in found)),
        tuple((name, *(cells.get(name, MISSING) for cells in losses)) for name in names),
    )
