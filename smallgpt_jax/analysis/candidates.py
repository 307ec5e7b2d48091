"""The candidates of a record: models at one size, length and learning rate."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.findings import LEVEL
from smallgpt_jax.analysis.record import Record, Run, grouped, size_of
from smallgpt_jax.analysis.spreads import VariancePrior
from smallgpt_jax.errors import UserError, require_list, suggestion

EQUAL = 1e-3  # nats; models whose losses differ by less with each seed are the same function
# Of a size and length, from which its differences have their own typical variance: models, and degrees
# of freedom, which are those of four models with two seeds.
_MIN_MODELS, _MIN_DEGREES = 4, 3
_VARYING = 4.0  # range of losses, in multiples of EQUAL, above which equal ones are no coincidence
_SAME_ROWS = 1.01  # ratio up to which numbers of validation tokens count as the same rows


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The runs of one name, length and learning rate, which differ in their seeds."""

    runs: tuple[Run, ...]
    losses: dict[int, float]  # by the order of batches; inf if the run has diverged

    @property
    def first(self) -> Run:
        """Any run: they differ only in seeds and losses."""
        return self.runs[0]

    @property
    def model(self) -> str:
        return self.first.model

    @property
    def loss(self) -> float:
        """The mean over the seeds; inf if one has diverged."""
        return statistics.fmean(self.losses.values())

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def flops(self) -> float | None:
        return self.first.last.flops if self.first.last else None


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model that is compared at a budget, or as it was trained: what is known of its loss."""

    candidate: Candidate  # the trained one, or the nearer of two between which it is interpolated
    losses: dict[int, float]  # by order of batches
    cost: float | None  # in the unit of the budget; None if it was not measured
    known: str = "trained"  # see `Standing.known`
    # variance of the losses over seeds, as a multiple of a trained run's; below 1 if interpolated
    noise: float = 1.0
    parameters: float = 0.0  # interpolated, as the loss is; 0: those of the candidate
    tokens: float = 0.0
    untried: float = 0.0  # nats that the loss may be lower, with what was not tried
    equal_to: tuple[str, ...] = ()  # see `Standing.equal_to`

    @property
    def model(self) -> str:
        return self.candidate.model

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses.values())


def _candidates_of(runs: Sequence[Run]) -> list[Candidate]:
    """Returns one candidate per name and length: the one at the best learning rate."""
    seed_of = _seed_of_pairs(runs)
    # A diverged seed makes a loss infinite for every reader: who trains the model may meet it.
    ended = [run for run in runs if run.diverged or (run.is_finished and run.tokens > 0)]
    candidates = []
    for of_length in grouped(ended, lambda run: (run.name, run.steps)).values():
        of_rates = [
            Candidate(tuple(group), _losses(group, seed_of))
            for group in grouped(of_length, lambda run: run.learning_rate).values()
        ]
        candidates.append(min(of_rates, key=lambda one: one.loss))
    return candidates


def _seed_of_pairs(runs: Sequence[Run]) -> Callable[[Run], int]:
    """Returns the seed by which the runs of two models are paired: the order of the batches, or that of
    the initial weights if no name has several orders.
    """
    for of_name in grouped(runs, lambda run: run.name).values():
        if len({run.batch_order for run in of_name}) > 1:
            return lambda run: run.batch_order
    return lambda run: run.seed


def _losses(runs: Sequence[Run], seed_of: Callable[[Run], int]) -> dict[int, float]:
    """Returns {seed by which runs are paired: loss}."""
    losses = {}
    for seed, group in grouped(runs, seed_of).items():  # several runs of a seed are one sample
        losses[seed] = statistics.fmean(run.loss for run in group)
    return losses


def longest_trained(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidate of each name (MODEL or MODEL@SIZE) that was trained for the most steps."""
    groups = grouped(candidates, lambda one: one.first.name)
    return [max(group, key=lambda one: one.first.steps) for group in groups.values()]


# ------------------------------------------------------------------ a record
@dataclasses.dataclass(frozen=True)
class Evidence:
    """The candidates of a record, at their best learning rates, and how much their losses vary."""

    record: Record
    candidates: tuple[Candidate, ...]
    variance_prior: VariancePrior  # of all differences
    # {(size, steps): prior} where _MIN_MODELS were trained: losses vary more at some than at others
    variance_priors: dict[tuple[str, int], VariancePrior]
    equal: tuple[tuple[str, ...], ...]  # groups of models of one function

    def variance_prior_at(self, candidate: Candidate) -> VariancePrior:
        """Returns the prior at its size and steps; that of the record where models are few."""
        return self.variance_priors.get(_size_and_steps(candidate), self.variance_prior)

    @property
    def pair_level(self) -> float | None:
        """Level of one pair in the sequential test; None if no seeds were added in rounds."""
        if not self.record.seeds_as_needed:
            return None
        return level_of_pair(run.name for run in self.record.runs)

    def among(self, models: Sequence[str]) -> "Evidence":
        """Returns the evidence with candidates of these models only; (): of all. How much losses vary
        is still learned from all. Raises UserError for a model that the record does not have.
        """
        require_list("models", models)
        if not models:
            return self
        present = dict.fromkeys(one.model for one in self.candidates)
        for model in models:
            if model not in present:
                raise UserError(
                    f"--models: the record has no finished run of {model!r}; choose from "
                    f"{', '.join(present)}{suggestion(model, present)}"
                )
        candidates = tuple(one for one in self.candidates if one.model in models)
        return dataclasses.replace(self, candidates=candidates)

    def equal_to(self, model: str) -> tuple[str, ...]:
        """Returns the other models that compute the same function (`_equal_models`)."""
        group = next((group for group in self.equal if model in group), ())
        return tuple(other for other in group if other != model)


def evidence_of(record: Record) -> Evidence:
    """Returns the candidates, and how much the losses of those without a diverged seed vary."""
    candidates = _candidates_of(record.runs)
    finite = [one for one in candidates if math.isfinite(one.loss)]
    losses = []  # one array (models, orders of batches) per size and number of steps
    priors = {}
    for size_and_steps, group in grouped(finite, _size_and_steps).items():
        losses.append(spreads.matrix([one.losses for one in group]))
        degrees = _degrees_of_freedom(group)
        # Rounds of seeds were decided with the spread of one size and length alone, so that is the
        # prior here, too.
        is_enough = len(group) >= _MIN_MODELS and degrees >= _MIN_DEGREES
        if is_enough or record.seeds_as_needed:
            priors[size_and_steps] = spreads.variance_prior_of(losses[-1:], degrees)
    prior = spreads.variance_prior_of(losses, _degrees_of_freedom(finite))
    if not _share_seeds(finite):
        prior = dataclasses.replace(prior, total_degrees=0.0)  # no difference has a spread
    return Evidence(record, tuple(candidates), prior, priors, _equal_models(finite))


def _share_seeds(candidates: Sequence[Candidate]) -> bool:
    """Returns whether there is a single model, or two models have two common seeds."""
    return len({one.model for one in candidates}) < 2 or any(
        one.model != other.model and len(one.losses.keys() & other.losses.keys()) > 1
        for one, other in itertools.combinations(candidates, 2)
    )


def _size_and_steps(candidate: Candidate) -> tuple[str, int]:
    return candidate.first.size, candidate.first.steps


def _degrees_of_freedom(candidates: Sequence[Candidate]) -> int:
    """Returns the degrees of freedom of all differences between models: (m − 1)(n − 1) for m models
    with n orders of batches at a size.
    """
    degrees = 0
    for of_size in grouped(candidates, lambda one: one.first.size).values():
        # The most of each model: several lengths add none, because they share their first steps.
        orders = []
        for of_model in grouped(of_size, lambda one: one.first.name).values():
            orders.append(max(len(one.losses) for one in of_model))
        # The model with the most orders is the one that the others are compared with.
        degrees += sum(count - 1 for count in orders) - (max(orders) - 1)
    return degrees


def level_of_pair(names: Iterable[str]) -> float:
    """Returns LEVEL, divided among all pairs of names of one size (Bonferroni)."""
    sizes = grouped(dict.fromkeys(names), size_of).values()
    return LEVEL / max(1, sum(math.comb(len(of_size), 2) for of_size in sizes))


# ------------------------------------------------------------------ what can be compared
def are_comparable(candidates: Sequence[Candidate]) -> bool:
    """Whether the losses are means over equal validation rows, and of the same objective."""
    runs = [run for one in candidates for run in one.runs]
    tokens = [run.last.targets for run in runs if run.last]
    has_same_rows = bool(tokens) and max(tokens) <= _SAME_ROWS * min(tokens)
    return has_same_rows and len({_objective(run) for run in runs}) <= 1


def _objective(run: Run) -> str:
    """Returns the objective; "answers" for runs on prompts, which score only the answers."""
    if run.config.get("data.format", "text") != "text":
        return "answers"
    return run.config.get("train.objective", "causal")


def is_scaling(record: Record) -> bool:
    """Whether a model was trained at several sizes: its runs have several names MODEL@SIZE."""
    names = {(run.model, run.size) for run in record.runs}
    return len(names) > len({model for model, _ in names})


def size_of_most_models(runs: Sequence[Run]) -> str:
    """Returns the SIZE at which the most models have ended runs, the largest one of several."""
    ended = [run for run in runs if run.is_finished or run.diverged]
    runs_of = grouped(ended, lambda run: run.size)

    def models_and_parameters(size: str) -> tuple[int, float]:
        models = {run.model for run in runs_of[size]}
        return len(models), statistics.fmean(run.active_parameters for run in runs_of[size])

    return max(runs_of, key=models_and_parameters, default="")


# ------------------------------------------------------------------ equal models
def _equal_models(candidates: Sequence[Candidate]) -> tuple[tuple[str, ...], ...]:
    """Returns groups of models that compute the same function; most have one member."""
    groups: dict[str, list[str]] = {}  # {first model: all of its function}
    of_model = grouped(candidates, lambda one: one.model)
    for model, of_this in of_model.items():
        equal = (first for first in groups if _are_equal(of_this, of_model[first]))
        groups.setdefault(next(equal, model), []).append(model)
    return tuple(map(tuple, groups.values()))


def _are_equal(one_model: Sequence[Candidate], other_model: Sequence[Candidate]) -> bool:
    """Whether two models have equal losses, or equal configs, in all common settings."""
    other_at = {_setting(one): one for one in other_model}
    pairs = [(one, other_at[_setting(one)]) for one in one_model if _setting(one) in other_at]
    if not pairs:
        return False
    if _have_equal_losses(pairs):
        return True
    runs = [run for one in (*one_model, *other_model) for run in one.runs]
    # Imported weights may differ although the configs agree.
    if any(run.is_imported for run in runs):
        return False
    return all(
        _config_of_function(one.first) == _config_of_function(other.first) for one, other in pairs
    )


def _setting(candidate: Candidate) -> tuple[str, int, float]:
    """Returns what two models must have in common for equal functions to have equal losses."""
    run = candidate.first
    return run.size, run.steps, run.learning_rate


def _have_equal_losses(pairs: Sequence[tuple[Candidate, Candidate]]) -> bool:
    """Whether the losses of each common order of batches differ by less than EQUAL, although they vary
    by more over orders, sizes and lengths.
    """
    losses = []
    for one, other in pairs:
        common = one.losses.keys() & other.losses.keys()
        if not common:
            return False
        losses += [(one.losses[order], other.losses[order]) for order in common]
    # Losses near zero, of solved tasks, are alike without being of one function; so are those of
    # models that have learned nothing, which hardly vary, and now and then two single losses.
    ones = [a for a, _ in losses]
    do_vary = max(ones) - min(ones) > _VARYING * EQUAL
    return do_vary and all(abs(a - b) < EQUAL * min(1, a, b) for a, b in losses)


def _config_of_function(run: Run) -> dict:
    """Returns what determines the function: the config without seeds, of cgpt with kernel size 1 as of
    lgpt, which computes the same.
    """
    fields = {field: run.config[field] for field in run.config if not field.endswith(".seed")}
    if fields.get("model.architecture") == "cgpt" and fields.get("model.conv_kernel") == 1:
        fields["model.architecture"] = "lgpt"
        del fields["model.conv_kernel"]
    return fields
