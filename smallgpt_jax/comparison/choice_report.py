"""The section of a report that says which model to choose for which budget."""

from collections.abc import Callable, Sequence

import numpy as np

from smallgpt_jax.comparison import choice, records, scaling
from smallgpt_jax.comparison.blocks import MISSING, Heading, Paragraph, Table
from smallgpt_jax.comparison.choice import Answer, Candidate
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
    candidates, _ = choice.read_candidates(content["runs"], BUDGETS["parameters"])
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
    return [*intro, Paragraph(text), answers_table(found), *map(Paragraph, notes)]


def limits(runs: Sequence[dict], name: str) -> list[float]:
    """Returns the budgets to ask about, in ascending order.

    Training budgets: powers of ten in the range of the scaling laws, or those at which at least two models were
    trained. Others: the costs on the Pareto front; of those about equal, the highest.
    """
    candidates, _ = choice.read_candidates(runs, BUDGETS[name])
    if not BUDGETS[name].is_training:
        found = [group[-1].cost for group in groups_of_near_costs(choice.pareto_front(candidates))]
    else:
        fits, _ = choice.fit_laws(candidates, name)
        found = powers_of_ten(*scaling.trained_range(fits, name)) if fits else trained_budgets(candidates)
    return found[-MAX_LIMITS:]


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
        found.append([one for one in left if one.cost * choice.NEAR >= left[-1].cost])
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
