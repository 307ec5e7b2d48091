"""The config group `compare`."""

import dataclasses
import itertools
import math
from typing import ClassVar

from smallgpt_jax.config.group import ConfigGroup

EQUALIZED = ("tokens", "flops", "parameters", "seconds", "own")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig(ConfigGroup):
    GROUP: ClassVar[str] = "compare"

    # the quantity that is equal for all runs: training "tokens" | training "flops" | training
    # "seconds" | "parameters". With "parameters", the models get widths at which their numbers of
    # parameters are equal within 2%. All runs are then trained on the same number of tokens. "own":
    # nothing is equal; each run is trained for its own train.steps
    budget: str = "tokens"
    # names of the runs to train, in this order, separated by commas
    names: str = ""
    # the run whose train.steps and number of parameters set the budget
    reference: str = ""
    # seconds of training per run, for budget "seconds"
    seconds: float = 0.0
    # number of seeds that each run is trained with: train.seed, train.seed + 1, … With most_seeds,
    # those of the first round
    # With 2, nobody can tell how much losses vary, so there are no compute multipliers
    seeds: int = 3
    # seeds are added, up to this number per name, where the difference of two names cannot be told
    # and either more than `stake` nats are at stake or so many seeds are expected to tell it.
    # Verdicts then hold after each seed (docs/comparison.md). 0: each name has `seeds`
    most_seeds: int = 0
    # with most_seeds: nats that it may cost, on average, to take the better of two models by the
    # seeds so far; with less at stake, they get no further seeds
    stake: float = 0.01
    # multiples of each run's learning_rate and final_learning_rate, for example (0.5, 1, 2). Runs
    # with the seed train.seed - 1 are trained at all multiples and choose the best one, which has
    # the lowest validation loss at the end. The seeds of the comparison are trained only at the
    # best one. (): only the runs' own rates. Runs named MODEL@SIZE share the grid of their MODEL's
    # first name in `names`: its best multiple is used at all sizes
    learning_rates: tuple[float, ...] = ()
    # maximum number of multiples that are added per run. As long as the best multiple is the lowest
    # or the highest, the next one beyond it is added
    max_added_learning_rates: int = 4
    # multiples of each run's number of steps, in ascending order, for example (0.25, 0.5, 1). The
    # run of horizon 1 is trained first; each shorter run starts from its checkpoint where its own
    # decay starts, and equals a run that was trained alone. Needs the schedule "wsd" or
    # "wsd_linear". Grids of learning rates have only horizon 1. (): only 1
    horizons: tuple[float, ...] = ()
    # SIZE of the runs named MODEL@SIZE that are trained last, such as "5M"; "": none. Before the
    # first of them starts, scaling laws of all other runs predict their losses. The predictions are
    # written to predictions.json, once
    held_out: str = ""
    # False: the comparison ends before the first held-out run, with predictions.json written
    train_held_out: bool = True
    # False: no run is trained or measured; the report and results.json contain the runs so far
    train: bool = True
    # the loss of a run is the mean over this number of its last evaluations. 1: the evaluation
    # after the last step
    averaged_evaluations: int = 1
    # finished runs are also evaluated at these multiples of their context length
    contexts: tuple[int, ...] = (1,)
    # finished runs are also evaluated on these texts: "NAME=SOURCE,…" (see data.source)
    texts: str = ""
    # measure the inference of finished runs: time of prefill and of decoding, bytes of the cache
    decoding: bool = True
    # observe finished runs as the command `diagnose` does
    diagnose: bool = False

    def validate(self) -> None:
        self.validate_choice("budget", EQUALIZED)
        self.validate_range("seeds", "averaged_evaluations", least=1)
        self.validate_range("stake", "max_added_learning_rates")
        if self.most_seeds and self.most_seeds <= self.seeds:
            self.refuse("most_seeds", f"must be above config.compare.seeds={self.seeds}, or 0")
        if self.most_seeds and self.seeds < 2:
            self.refuse("seeds", "must be at least 2 with config.compare.most_seeds")
        if self.budget == "seconds" and not 0 < self.seconds < math.inf:
            self.refuse("seconds", "must be above 0 with budget 'seconds'")
        if self.budget != "seconds" and self.seconds:
            self.refuse("seconds", "needs config.compare.budget='seconds'")
        if not self.contexts or any(type(times) is not int or times < 1 for times in self.contexts):
            self.refuse("contexts", "must be integers, at least 1")
        self._validate_learning_rates()
        self._validate_horizons()

    def _validate_horizons(self) -> None:
        # A bool would count as a number: of tuples, the types of the items are not declared.
        if not all(type(horizon) in (int, float) and horizon > 0 for horizon in self.horizons):
            self.refuse("horizons", "must be numbers above 0")
        is_ascending = all(one < other for one, other in itertools.pairwise(self.horizons))
        if self.horizons and (self.horizons[-1] != 1 or not is_ascending):
            advice = "must be in ascending order and end in 1, for example 0.25,0.5,1"
            self.refuse("horizons", advice)

    def _validate_learning_rates(self) -> None:
        rates = self.learning_rates
        for number, rate in enumerate(rates):
            if type(rate) not in (int, float) or not 0 < rate < math.inf:
                self.refuse(
                    "learning_rates",
                    f"{rate!r} is not a positive, finite number; give multiples of the runs' "
                    "own learning rates, for example 0.5,1,2",
                )
            if rate in rates[:number]:
                self.refuse("learning_rates", f"{rate!r} is listed twice; list each multiple once")
        if len(rates) == 1:
            self.refuse(
                "learning_rates",
                "a grid has at least two multiples; to train at a single learning rate, set "
                "config.optimizer.learning_rate",
            )
