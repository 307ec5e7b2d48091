"""The model to choose for a budget, or the reason why it cannot be told.

A training budget (FLOPs, seconds) asks which model has the lowest loss after training with at most
that budget. Any other budget (parameters, bytes, latency, memory) is a limit that trained models
meet or not.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence

from smallgpt_jax.analysis.candidates import (
    BUDGETS,
    EQUAL,
    Candidate,
    Entry,
    Evidence,
    are_comparable,
    evidence_of,
    longest,
)
from smallgpt_jax.analysis.contest import compete
from smallgpt_jax.analysis.findings import POSSIBLE, Choice, Contest, FrontPoint
from smallgpt_jax.analysis.lines import NEAR, SAME_BUDGET, STEEPEST, Lines, lines_of, nearest_common
from smallgpt_jax.analysis.record import Record, Run, grouped
from smallgpt_jax.errors import UserError

_DEFAULT_BUDGETS = ("flops", "parameters", "decode_ms", "memory")  # that a report asks about
_MAX_LIMITS = 5  # per budget


def choose(record: Record, budget: str, limit: float, batch: int = 1) -> Choice:
    """Returns the answer to a budget, a key of `BUDGETS`. `batch` is the batch size of decoding.

    Raises UserError without a finished run, for losses that cannot be compared, and for a limit
    below the cost of one training step.
    """
    evidence = evidence_of(record)
    runs = [run for one in evidence.candidates for run in one.runs]
    if not any(run.is_finished for run in runs):
        raise UserError("--results: has no finished run; finish the comparison")
    if not are_comparable(runs):
        raise UserError(
            "--results: the losses are means over different validation rows or of different "
            "objectives; choose from the runs of one"
        )
    asked = Asked(evidence, budget, batch)
    asked.require_a_step(limit)
    return asked.choice(limit)


def default_choices(evidence: Evidence) -> tuple[Choice, ...]:
    """Returns the choices that a report shows; () for fewer than two models."""
    runs = [run for one in evidence.candidates for run in one.runs]
    models = {one.model for one in evidence.candidates if math.isfinite(one.loss)}
    if len(models) < 2 or not are_comparable(runs):
        return ()
    choices = []
    for budget in _DEFAULT_BUDGETS:
        asked = Asked(evidence, budget)
        choices += [asked.choice(limit) for limit in asked.limits()]
    return tuple(choices)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A kind of budget, asked of the evidence of a record."""

    evidence: Evidence
    budget: str
    batch: int = 1

    def cost(self, run: Run) -> float | None:
        return BUDGETS[self.budget].cost(run, self.batch)

    @property
    def is_training(self) -> bool:
        return BUDGETS[self.budget].is_training

    @property
    def candidates(self) -> list[Candidate]:
        """Shorter candidates cost as much as the longest, except in training."""
        candidates = list(self.evidence.candidates)
        return candidates if self.is_training else longest(candidates)

    def cost_of(self, candidate: Candidate) -> float | None:
        """Returns the median over the runs that have measured it."""
        costs = [self.cost(run) for run in candidate.runs]
        measured = [cost for cost in costs if cost]
        return statistics.median(measured) if measured else None

    def require_a_step(self, limit: float) -> None:
        costs = []
        for run in self.evidence.record.runs if self.is_training else ():
            if run.last and run.last.step and self.cost(run):
                costs.append(self.cost(run) / run.last.step)
        if costs and limit < min(costs):
            raise UserError(
                f"--{self.budget}={limit:g}: below one training step, which takes "
                f"{min(costs):.3g} or more; use a larger budget"
            )

    @functools.cached_property
    def costs(self) -> dict[str, list[float]]:
        """{model: costs of its candidates with a finite loss}, without models that have none."""
        costs: dict[str, list[float]] = {}
        for one in self.candidates:
            cost = self.cost_of(one)
            if math.isfinite(one.loss) and cost:
                costs.setdefault(one.model, []).append(cost)
        return costs

    # -------------------------------------------------------------- answers
    def choice(self, limit: float) -> Choice:
        """Returns the answer to a limit. Below all costs, or far above them, nothing is chosen, and
        the contest is that at the nearest cost.
        """
        answer = Choice(
            self.budget,
            limit,
            self.batch,
            refusal="no cost",
            front=self.front(),
            devices=self.devices(),
        )
        if not self.costs:
            return answer
        least = min(map(min, self.costs.values()))
        largest = sorted(map(max, self.costs.values()))  # of each model
        refusal, compared_at, factor = None, limit, None
        if limit * SAME_BUDGET < least:
            refusal, compared_at, factor = "nothing within", least, limit / least
        elif limit > NEAR * largest[-1]:
            # Of training, the largest budget that two models have.
            has_two = self.is_training and len(largest) > 1
            nearest = largest[-2] if has_two else largest[-1]
            refusal, compared_at, factor = "beyond", nearest, limit / largest[-1]
        contest = self.contest(compared_at)
        return dataclasses.replace(
            answer,
            chosen=None if refusal else contest.chosen,
            refusal=refusal or contest.refusal,
            contest=contest,
            compared_at=compared_at,
            factor=factor,
        )

    def contest(self, limit: float) -> Contest:
        """Returns the contest of the models within the limit, each at its best candidate there."""
        if self.is_training:
            entries = _training_entries(lines_of(self.candidates, self.cost), limit)
        else:
            entries = self._entries_within(limit)
        entries += self._without_cost_or_loss({entry.model for entry in entries})
        contest = compete(self._without_equals(entries), self.evidence)
        may_be_best = [one for one in contest.standings if one.probability >= POSSIBLE]
        risky = tuple(one.model for one in may_be_best if one.cost is None)
        if not risky:
            return contest
        return dataclasses.replace(contest, chosen=None, refusal="not measured", blockers=risky)

    def _entries_within(self, limit: float) -> list[Entry]:
        affordable = []
        for one in self.candidates:
            cost = self.cost_of(one)
            if cost and cost <= SAME_BUDGET * limit and math.isfinite(one.loss):
                affordable.append(Entry(one, one.losses, cost))
        groups = grouped(affordable, lambda entry: entry.model)
        return [_cheapest_of_lowest(group) for group in groups.values()]

    def _without_cost_or_loss(self, entered: set[str]) -> list[Entry]:
        """Returns entries of further models that only diverged, or whose cost is unknown."""
        diverged, unmeasured = [], []
        for model, group in grouped(self.candidates, lambda one: one.model).items():
            if model in entered:
                continue
            without_cost = [one for one in group if self.cost_of(one) is None]
            if all(math.isinf(one.loss) for one in group):
                diverged.append(Entry(group[0], group[0].losses, self.cost_of(group[0])))
            elif without_cost:
                best = min(without_cost, key=lambda one: one.loss)
                unmeasured.append(Entry(best, best.losses, None))
        return diverged + unmeasured

    def _without_equals(self, entries: Sequence[Entry]) -> list[Entry]:
        """Returns one entry per function: as several, it would have more chances to be the best."""

        def function(entry: Entry) -> str:
            return min((entry.model, *self.evidence.equal_to(entry.model)))

        kept = []
        for group in grouped(entries, function).values():
            best = _cheapest_of_lowest(group)
            others = tuple(entry.model for entry in group if entry is not best)
            kept.append(dataclasses.replace(best, equal_to=others))
        return kept

    def front(self) -> tuple[FrontPoint, ...]:
        """Returns the candidates, cheapest first, with a lower loss than all that cost no more."""
        priced = [(self.cost_of(one), one.loss, one) for one in self.candidates]
        priced = [row for row in priced if row[0] and math.isfinite(row[1])]
        front: list[FrontPoint] = []
        for cost, loss, one in sorted(priced, key=lambda row: row[:2]):
            if not front or loss < front[-1].loss:
                run = one.first
                sizes = (run.parameters, run.active_parameters, run.tokens)
                front.append(FrontPoint(one.model, run.label, cost, loss, *sizes))
        return tuple(front)

    def devices(self) -> tuple[str, ...]:
        """Returns the devices of the measurements of time, if there are several: their times cannot
        be compared.
        """
        names: dict[str, None] = {}
        for run in self.evidence.record.runs:
            if self.budget == "decode_ms" and run.inference:
                names[run.inference.device] = None
            if self.budget == "seconds":
                names |= {session.device: None for session in run.sessions}
        return tuple(names) if len(names) > 1 else ()

    # -------------------------------------------------------------- limits of a report
    def limits(self) -> list[float]:
        """Returns the limits to ask about, in ascending order.

        Of training: the costs at which several models were trained; of many, the powers of ten
        between the least and the largest cost of all models, this largest cost, and the next power.
        Others: the costs on the front.
        """
        if not self.is_training:
            return _largest_of_near([point.cost for point in self.front()])[-_MAX_LIMITS:]
        limits = []
        for limit in _largest_of_near(list(itertools.chain(*self.costs.values()))):
            near = [costs for costs in self.costs.values() if _has_near(costs, limit)]
            if len(near) > 1:
                limits.append(limit)
        if len(limits) > _MAX_LIMITS:
            limits = _powers_of_ten(self.costs) or limits
        return limits[-_MAX_LIMITS:]


def _has_near(costs: Sequence[float], limit: float) -> bool:
    return any(limit / NEAR <= cost <= limit for cost in costs)


def _largest_of_near(costs: Sequence[float]) -> list[float]:
    """Groups costs within a factor of NEAR; returns the largest of each group, in ascending order."""
    kept: list[float] = []
    for cost in sorted(costs, reverse=True):
        if not kept or cost * NEAR < kept[-1]:
            kept.append(cost)
    return kept[::-1]


def _powers_of_ten(costs: dict[str, list[float]]) -> list[float]:
    """Returns the powers of ten within which all models were trained, their largest common cost, and
    the next power; [] if they have no costs in common.
    """
    low, high = max(map(min, costs.values())), min(map(max, costs.values()))
    if low >= high:
        return []
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    powers = [10.0**exponent for exponent in range(first, last + 1)]
    return [*powers, high, 10.0 ** math.ceil(math.log10(high))]


def _cheapest_of_lowest(entries: Sequence[Entry]) -> Entry:
    """Returns the entry with the lowest loss, of about equal losses the cheapest."""
    lowest = min(entry.loss for entry in entries)
    about_equal = [entry for entry in entries if not entry.loss > lowest + EQUAL]  # all, if inf
    return min(about_equal, key=lambda entry: (entry.cost or math.inf, entry.loss))


# ------------------------------------------------------------------ training budgets
def _training_entries(lines: dict[str, Lines], budget: float) -> list[Entry]:
    """Returns the models at a training budget; [] if none was trained with so little."""
    bounds = {model: _bound(of_model, budget) for model, of_model in lines.items()}
    trained = {model: entry for model, entry in bounds.items() if entry}
    if not trained:
        return []
    first = min(trained.values(), key=lambda entry: entry.loss)
    entries = [first]
    # Those that were trained only with less or only with more stay, with what they may reach.
    for model, rival in lines.items():
        if model != first.model:
            entry = _with_potential(trained.get(model), rival, first, lines[first.model], budget)
            entries += [entry] if entry else []
    return entries


def _bound(lines: Lines, budget: float) -> Entry | None:
    """Returns a model at the lowest loss that it has reached with at most a budget."""
    entry = min(lines.at(budget).values(), key=lambda one: one.loss, default=None)
    point = lines.within(budget)
    if entry and (point is None or entry.loss <= point.candidate.loss):
        return entry
    if point is None:
        return None
    # With a loss at the budget itself, more training was tried, and was worse.
    is_tried = entry is not None or point.cost * SAME_BUDGET >= budget
    known = "trained" if is_tried else "cheaper"
    return Entry(point.candidate, point.candidate.losses, point.cost, known)


def _with_potential(
    entry: Entry | None, rival: Lines, first: Entry, base: Lines, budget: float
) -> Entry | None:
    """Returns a model with `untried`: how much lower its loss may be at `budget`, with what was not
    tried; None if nothing is known.

    `entry` is what it has reached within the budget, None for a model that was trained only with
    more. `rival` are its lines, `base` those of `first`, the best model.
    """
    # Where both have a line in common, nearest to the cost of the first one, the model differs from
    # it by d. So at `budget`, it may have the first one's loss + d.
    common = nearest_common(rival, base, first.cost)
    potentials = [math.inf if entry is None else entry.loss]
    if common:
        nearest, base_entry = common
        potentials.append(first.loss + nearest.loss - base_entry.loss)
        if entry is None:
            # with the parameters and tokens of its runs, not those of a budget beyond
            entry = dataclasses.replace(nearest, known="dearer", parameters=0.0, tokens=0.0)
    if entry is None:
        # The loss of a point just above the budget is already a lower bound: nothing to subtract.
        point = rival.above(budget)
        return point and Entry(point.candidate, point.candidate.losses, point.cost, "dearer")
    if entry.known == "cheaper":  # with all of the budget, its loss may go on falling as before
        steepness = rival.steepness(entry.candidate)
        steepness = STEEPEST if steepness is None else max(0.0, steepness)
        potentials.append(entry.loss * (entry.cost / budget) ** steepness)
    return dataclasses.replace(entry, untried=entry.loss - min(potentials))
