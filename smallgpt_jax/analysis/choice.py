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

from smallgpt_jax.analysis.budgets import BUDGETS, TRAINING_BUDGETS
from smallgpt_jax.analysis.candidates import (
    EQUAL,
    Candidate,
    Contender,
    Evidence,
    are_comparable,
    evidence_of,
    longest_trained,
)
from smallgpt_jax.analysis.contest import compete
from smallgpt_jax.analysis.findings import POSSIBLE, Choice, Contest, FrontPoint, Refusal
from smallgpt_jax.analysis.record import Record, Run, grouped
from smallgpt_jax.analysis.scaling_curves import (
    NEAR,
    SAME_BUDGET,
    STEEPEST,
    ScalingCurves,
    pair_at_nearest_budget,
    scaling_curves_of,
)
from smallgpt_jax.errors import UserError

_DEFAULT_BUDGETS = ("flops", "parameters", "decode_ms", "memory")  # that a report asks about
_MAX_LIMITS = 5  # per budget


def choose(
    record: Record, budget: str, limit: float, batch: int = 1, models: Sequence[str] = ()
) -> Choice:
    """Returns the answer to at most `limit` of a budget, a key of `BUDGETS`. `batch` is the batch size
    of decoding. Chooses among `models`; (): among all. Raises UserError for a record that cannot
    answer it.
    """
    evidence = evidence_of(record).among(models)
    runs = [run for one in evidence.candidates for run in one.runs]
    if not any(run.is_finished for run in runs):
        raise UserError("--results: has no finished run; finish the comparison")
    if not are_comparable(evidence.candidates):
        raise UserError(
            "--results: the losses are means over different validation rows or of different "
            "objectives; choose from the runs of one"
        )
    chooser = Chooser(evidence, budget, batch)
    chooser.require_a_step(limit)
    return chooser.choice(limit)


def default_choices(evidence: Evidence) -> tuple[Choice, ...]:
    """Returns the choices that a report shows; () without two models that can be compared."""
    models = {one.model for one in evidence.candidates if math.isfinite(one.loss)}
    if len(models) < 2 or not are_comparable(evidence.candidates):
        return ()
    choices = []
    for budget in _DEFAULT_BUDGETS:
        chooser = Chooser(evidence, budget)
        choices += [chooser.choice(limit) for limit in chooser.default_limits()]
    return tuple(choices)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses a model of a record within limits of one kind of budget. Limits and costs are in the
    unit of this budget.
    """

    evidence: Evidence
    budget: str  # key of `BUDGETS`
    batch: int = 1  # of decoding

    def cost(self, run: Run) -> float | None:
        return BUDGETS[self.budget](run, self.batch)

    @property
    def is_training(self) -> bool:
        return self.budget in TRAINING_BUDGETS

    @property
    def candidates(self) -> Sequence[Candidate]:
        # Of other budgets, longer training costs the same, and only improves the loss.
        candidates = self.evidence.candidates
        return candidates if self.is_training else longest_trained(candidates)

    def cost_of(self, candidate: Candidate) -> float | None:
        """Returns the median over the runs that have measured it; None if none has."""
        costs = [self.cost(run) for run in candidate.runs]
        measured = [cost for cost in costs if cost]
        return statistics.median(measured) if measured else None

    def require_a_step(self, limit: float) -> None:
        """Raises UserError for a training budget below one step: most likely, its unit is mistaken."""
        if not self.is_training:
            return
        costs = []
        for run in self.evidence.record.runs:
            if run.last and run.last.step and self.cost(run):
                costs.append(self.cost(run) / run.last.step)
        if limit < min(costs, default=0.0):
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
        """Returns the answer to a limit."""
        answer = Choice(self.budget, limit, self.batch, front=self.front(), devices=self.devices())
        if not self.costs:
            return dataclasses.replace(answer, refusal="no cost")
        # Below all costs, or more than NEAR times above them, nothing is chosen, and the models are
        # compared at the nearest cost instead.
        least = min(map(min, self.costs.values()))
        if limit * SAME_BUDGET < least:
            return self._refused(answer, "nothing within", nearest=least, factor=limit / least)
        largest = sorted(map(max, self.costs.values()))  # cost of each model
        if limit > NEAR * largest[-1]:
            # Of training, the largest budget that two models have: one alone is no comparison.
            has_two = self.is_training and len(largest) > 1
            nearest = largest[-2] if has_two else largest[-1]
            return self._refused(answer, "beyond", nearest, factor=limit / largest[-1])
        contest = self.contest(limit)
        return dataclasses.replace(
            answer,
            chosen=contest.chosen,
            refusal=contest.refusal,
            contest=contest,
            compared_at=limit,
        )

    def _refused(self, answer: Choice, refusal: Refusal, nearest: float, factor: float) -> Choice:
        """Returns the answer without a model; the models are compared at the nearest cost."""
        return dataclasses.replace(
            answer,
            refusal=refusal,
            contest=self.contest(nearest),
            compared_at=nearest,
            factor=factor,
        )

    def contest(self, limit: float) -> Contest:
        """Returns the comparison of the models within the limit, each at its best candidate there."""
        if self.is_training:
            contenders = _training_contenders(
                scaling_curves_of(self.candidates, self.cost_of), limit
            )
        else:
            contenders = self._contenders_within(limit)
        contenders += self._without_cost_or_loss({one.model for one in contenders})
        contenders = self._without_equals(contenders)
        contest = compete(contenders, self.evidence)
        if contest.refusal == "more training":
            trained = _trained_near(limit, contenders, first=contest.standings[0].model)
            possible = compete(trained, self.evidence).possible
            contest = dataclasses.replace(contest, trained=possible)
        # None is chosen while a model whose cost is unknown may be the best.
        may_be_best = [one for one in contest.standings if one.probability >= POSSIBLE]
        blockers = tuple(one.model for one in may_be_best if one.cost is None)
        if not blockers:
            return contest
        return dataclasses.replace(contest, chosen=None, refusal="not measured", blockers=blockers)

    def _contenders_within(self, limit: float) -> list[Contender]:
        affordable = []  # without those of `_without_cost_or_loss`
        for one in self.candidates:
            cost = self.cost_of(one)
            if cost and cost <= SAME_BUDGET * limit and math.isfinite(one.loss):
                affordable.append(Contender(one, one.losses, cost))
        groups = grouped(affordable, lambda one: one.model)
        return [_cheapest_of_lowest(group) for group in groups.values()]

    def _without_cost_or_loss(self, present: set[str]) -> list[Contender]:
        """Returns further models that only diverged, or whose cost is unknown."""
        # A report names all of them, and one of unknown cost may be the best.
        diverged, unmeasured = [], []
        for model, group in grouped(self.candidates, lambda one: one.model).items():
            if model in present:
                continue
            without_cost = [one for one in group if self.cost_of(one) is None]
            if all(math.isinf(one.loss) for one in group):
                diverged.append(Contender(group[0], group[0].losses, self.cost_of(group[0])))
            elif without_cost:
                best = min(without_cost, key=lambda one: one.loss)
                unmeasured.append(Contender(best, best.losses, None))
        return diverged + unmeasured

    def _without_equals(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Keeps the best of models that compute the same function."""
        # With two names, a function would have two chances to have the lowest loss by luck.
        by_function = grouped(
            contenders, lambda one: min((one.model, *self.evidence.equal_to(one.model)))
        )
        kept = []
        for group in by_function.values():
            within = [one for one in group if one.known != "dearer" and one.cost is not None]
            best = _cheapest_of_lowest(within or group)
            others = tuple(one.model for one in group if one is not best)
            kept.append(dataclasses.replace(best, equal_to=others))
        return kept

    def points(self) -> list[FrontPoint]:
        """Returns the candidates with a known cost and a finite loss, the cheapest first."""
        points = []
        for one in self.candidates:
            cost, run = self.cost_of(one), one.first
            if cost and math.isfinite(one.loss):
                sizes = (run.parameters, run.active_parameters, run.tokens)
                points.append(FrontPoint(one.model, run.label, cost, one.loss, *sizes))
        return sorted(points, key=lambda point: (point.cost, point.loss))

    def front(self) -> tuple[FrontPoint, ...]:
        """Returns the Pareto front: candidates with a lower loss than all that cost no more."""
        front: list[FrontPoint] = []
        for point in self.points():
            if not front or point.loss < front[-1].loss:
                front.append(point)
        return tuple(front)

    def devices(self) -> tuple[str, ...]:
        """Returns the devices of the measured times if several: these cannot be compared."""
        names: dict[str, None] = {}
        for run in itertools.chain(*(one.runs for one in self.candidates)):
            if self.budget == "decode_ms" and run.inference:
                names[run.inference.device] = None
            if self.budget == "seconds":
                names |= {session.device: None for session in run.sessions}
        return tuple(names) if len(names) > 1 else ()

    # -------------------------------------------------------------- limits of a report
    def default_limits(self) -> list[float]:
        """Returns the limits that a report asks about, up to _MAX_LIMITS, in ascending order."""
        if not self.is_training:
            # The last point, too: at its cost, all models compete.
            points = [*self.front(), *self.points()[-1:]]
            return _largest_of_near([point.cost for point in points])[-_MAX_LIMITS:]
        limits = []  # the costs at which several models were trained
        for limit in _largest_of_near(list(itertools.chain(*self.costs.values()))):
            models_near = 0
            for costs in self.costs.values():
                models_near += any(limit / NEAR <= cost <= limit for cost in costs)
            if models_near > 1:
                limits.append(limit)
        if len(limits) > _MAX_LIMITS:
            limits = _powers_of_ten(self.costs) or limits
        return limits[-_MAX_LIMITS:]


def _largest_of_near(costs: Sequence[float]) -> list[float]:
    """Groups costs within a factor of NEAR; returns the largest of each group, in ascending order."""
    kept: list[float] = []
    for cost in sorted(costs, reverse=True):
        if not kept or cost * NEAR < kept[-1]:
            kept.append(cost)
    return kept[::-1]


def _powers_of_ten(costs: dict[str, list[float]]) -> list[float]:
    """Returns the powers of ten within the costs of two models or more, the largest cost that all
    reach, if it is more, and the next power: 1e13, 1e14, 3e14, 1e15. [] if no power is within the
    costs of two.
    """
    ranges = [(min(of_model), max(of_model)) for of_model in costs.values()]
    largest_of_two = sorted(largest for _, largest in ranges)[-2]
    next_exponent = math.ceil(math.log10(largest_of_two))
    powers = []
    for exponent in range(math.ceil(math.log10(min(map(min, ranges)))), next_exponent):
        power = 10.0**exponent
        if sum(least <= power <= largest for least, largest in ranges) > 1:
            powers.append(power)
    if not powers:
        return []
    largest_of_all = min(largest for _, largest in ranges)
    if largest_of_all > NEAR * powers[-1]:
        powers.append(largest_of_all)
    return [*powers, 10.0**next_exponent]


def _cheapest_of_lowest(contenders: Sequence[Contender]) -> Contender:
    """Returns the contender with the lowest loss; of losses within EQUAL of it, the cheapest."""
    highest = min(one.loss for one in contenders) + EQUAL
    about_equal = [one for one in contenders if not one.loss > highest]  # all, if all are inf
    return min(about_equal, key=lambda one: (one.cost or math.inf, one.loss))


# ------------------------------------------------------------------ training budgets
def _training_contenders(curves_of: dict[str, ScalingCurves], budget: float) -> list[Contender]:
    """Returns the models at a training budget; [] if none was trained with so little."""
    reached = {model: _best_reached(curves, budget) for model, curves in curves_of.items()}
    first = min(filter(None, reached.values()), key=lambda one: one.loss, default=None)
    if first is None:
        return []
    contenders = [first]
    # Those that were trained only with less or only with more stay, with what they may reach.
    for model, curves in curves_of.items():
        if model != first.model:
            first_curves = curves_of[first.model]
            contenders.append(_with_potential(reached[model], curves, first, first_curves, budget))
    return [one for one in contenders if one]


def _trained_near(limit: float, contenders: Sequence[Contender], first: str) -> list[Contender]:
    """Returns the first model, and those that were trained with about all of the budget."""
    trained = []
    for one in contenders:
        is_near = one.known != "dearer" and one.cost is not None and one.cost * NEAR >= limit
        if is_near or one.model == first:
            trained.append(one)
    return trained


def _best_reached(curves: ScalingCurves, budget: float) -> Contender | None:
    """Returns a model at the lowest loss that it has reached with at most a budget, by interpolation
    to the budget or by a run; None if it was trained only with more.
    """
    at_budget = min(curves.at_budget(budget).values(), key=lambda one: one.loss, default=None)
    point = curves.best_within(budget)
    if at_budget and (point is None or at_budget.loss <= point.candidate.loss):
        return at_budget
    if point is None:
        return None
    # With a loss at the budget itself, more training was tried, and was worse.
    is_tried = at_budget is not None or point.cost * SAME_BUDGET >= budget
    known = "trained" if is_tried else "cheaper"
    return Contender(point.candidate, point.candidate.losses, point.cost, known)


def _with_potential(
    reached: Contender | None,
    curves: ScalingCurves,
    first: Contender,
    first_curves: ScalingCurves,
    budget: float,
) -> Contender | None:
    """Returns a model with `untried`: by how much its loss may be lower at `budget`, with sizes or
    lengths that were not tried. None if nothing tells. `first` is the model with the lowest loss;
    `reached` is None if this model was trained only with more than the budget.
    """
    common = pair_at_nearest_budget(curves, first_curves, first.cost)
    if reached is None:
        return _above_budget(curves, first, common, budget)
    potentials = [reached.loss]
    if common:
        potentials.append(_like_first(first, *common))
    if reached.known == "cheaper":  # with all of the budget, its loss may go on falling as before
        potentials.append(_loss_at(budget, reached, curves))
    return dataclasses.replace(reached, untried=reached.loss - min(potentials))


def _above_budget(
    curves: ScalingCurves,
    first: Contender,
    common: tuple[Contender, Contender] | None,
    budget: float,
) -> Contender | None:
    """Returns a model that was trained only with more than the budget, with what it may reach with
    the budget; None if nothing tells. `common`: see `_like_first`.
    """
    if common:
        above, of_first = common
        untried = above.loss - _like_first(first, above, of_first)
        # with the parameters and tokens of its runs, not those of a budget beyond
        return dataclasses.replace(
            above, known="dearer", parameters=0.0, tokens=0.0, untried=untried
        )
    # The loss of a point just above the budget is already a lower bound: nothing to subtract.
    point = curves.cheapest_just_above(budget)
    return point and Contender(point.candidate, point.candidate.losses, point.cost, "dearer")


def _like_first(first: Contender, one: Contender, of_first: Contender) -> float:
    """Returns the loss of a model that differs from the first one as `one` does from `of_first`: both
    models on their common curve, nearest to the cost of the first one.
    """
    return first.loss + one.loss - of_first.loss


def _loss_at(budget: float, reached: Contender, curves: ScalingCurves) -> float:
    """Returns a loss after more training, falling as steeply as its curves did at most."""
    exponent = curves.steepest_fall(reached.candidate)
    exponent = STEEPEST if exponent is None else max(0.0, exponent)
    return reached.loss * (reached.cost / budget) ** exponent
