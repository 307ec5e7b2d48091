"""The section of a report that says which model to choose for which budget."""

from collections.abc import Callable, Sequence

import numpy as np

from smallgpt_jax.comparison import choice, records, scaling
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Table
from smallgpt_jax.comparison.candidates import NEAR, Candidate, pareto_front, read_candidates
from smallgpt_jax.comparison.choice import Answer
from smallgpt_jax.comparison.costs import BUDGETS
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


def choice_blocks(record: Record) -> list:
    """Returns the answers of `choose` to the budgets of the comparison; [] for fewer than two finished models."""
    content = records.content(record)
    candidates, _ = read_candidates(content["runs"], BUDGETS["parameters"])
    if len({candidate.model for candidate in candidates}) < 2:
        return []
    by_budget = [choice.answers(content, name, limits(content["runs"], name)) for name in BUDGET_FORMATS]
    found = [answer for answers in by_budget for answer in answers]
    intro = [Heading("Which model?")]
    if len({answer.reason for answer in found}) == 1 and found[0].chosen is None:
        return [*intro, Paragraph(f"Cannot tell, because {found[0].reason}.")]
    text = ("A model is chosen if the probability that it has the lowest loss within the budget, P(best), is at least "
            f"{scaling.CERTAIN:.1%}. In parentheses: 80% interval. python -m smallgpt_jax.choose answers for other "
            "budgets.")
    notes = [f"{format_budget(last)}: {' '.join(last.notes)}" for *_, last in filter(None, by_budget) if last.notes]
    blocks = [*intro, Paragraph(text), answers_table(found), *map(Paragraph, notes)]
    trained = [answer for answer in by_budget[0] if answer.contenders]
    return blocks + ([Paragraph("Losses at equal training FLOPs."), equal_flops_table(trained)] if len(trained) > 1
                     else [])


def limits(runs: Sequence[dict], name: str) -> list[float]:
    """Returns the budgets to ask about, in ascending order.

    Training budgets: those at which at least two models were trained, or if these are many, powers of ten and the
    largest budget of all models. Others: the costs on the Pareto front; of those about equal, the highest.
    """
    candidates, _ = read_candidates(runs, BUDGETS[name])
    if not BUDGETS[name].is_training:
        found = [group[-1].cost for group in groups_of_near_costs(pareto_front(candidates))]
    else:
        found = trained_budgets(candidates)
        if len(found) > MAX_LIMITS:
            found = powers_of_ten(*common_range(candidates)) or found
    return found[-MAX_LIMITS:]


def common_range(candidates: Sequence[Candidate]) -> tuple[float, float]:
    """Returns the least and the largest cost that all models with known costs reach."""
    costs: dict[str, list[float]] = {}
    for one in candidates:
        if one.cost is not None:
            costs.setdefault(one.model, []).append(one.cost)
    return max(map(min, costs.values())), min(map(max, costs.values()))


def powers_of_ten(low: float, high: float) -> list[float]:
    exponents = np.arange(np.ceil(np.log10(low)), np.floor(np.log10(high)) + 1)
    return [*(10.0**exponents).tolist(), high] if low < high else []


def trained_budgets(candidates: Sequence[Candidate]) -> list[float]:
    """Returns the largest cost of each group of models that were trained with about the same budget."""
    groups = groups_of_near_costs([one for one in candidates if one.cost is not None])
    return [group[-1].cost for group in groups if len({one.model for one in group}) > 1]


def groups_of_near_costs(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Both the groups and their candidates are in ascending order of cost."""
    found, left = [], sorted(candidates, key=lambda one: one.cost)
    while left:
        found.append([one for one in left if one.cost * NEAR >= left[-1].cost])
        left = left[:-len(found[-1])]
    return found[::-1]


def format_budget(answer: Answer) -> str:
    label, form = BUDGET_FORMATS[answer.budget]
    return f"{label[0].upper()}{label[1:]}, at most {form(answer.limit)}"


def answers_table(found: Sequence[Answer]) -> Table:
    rows = []
    for answer in found:
        label, form = BUDGET_FORMATS[answer.budget]
        (best, *_), probability = choice.best_rows(answer.contenders) if answer.contenders else ([None], None)
        is_evident = answer.chosen and len(answer.contenders) > 1
        interval = f" ({choice.format_interval(best)})" if best and best.low is not None else ""
        rows.append((label, form(answer.limit), answer.chosen or "cannot tell",
                     f"{best.loss:.4f}{interval}" if answer.chosen else MISSING,
                     f"{probability:.2f}" if best else MISSING, MISSING if is_evident else answer.reason))
    return Table(("budget", "at most", "choose", "loss", "P(best)", "because"), tuple(rows))


def equal_flops_table(found: Sequence[Answer]) -> Table:
    """Returns a row per model, in the order of the losses at the largest budget, and a column per budget."""
    losses = [{row.name: f"{row.loss:.3f}" + f" ({row.low:.3f} to {row.high:.3f})" * (row.low is not None)
               for row in answer.contenders} for answer in found]
    names = dict.fromkeys(name for cells in reversed(losses) for name in cells)
    return Table(("model", *(BUDGET_FORMATS["flops"][1](answer.limit) for answer in found)),
                 tuple((name, *(cells.get(name, MISSING) for cells in losses)) for name in names))
