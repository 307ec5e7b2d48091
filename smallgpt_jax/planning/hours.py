"""Hours and money of a whole training, and the size of model that some hours pay for."""

from typing import NamedTuple

from smallgpt_jax.devices import chips
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import duration
from smallgpt_jax.planning import topologies
from smallgpt_jax.planning.plan import Plan, plan

_TRIALS = 4  # plans; each compiles the step of another size
_CLOSE = 0.05  # relative error of the hours at which the search ends
_FIRST_MFU = 0.3


class SizedPlan(NamedTuple):
    recipe: str  # with its size, such as "configs/llama.py:2.1e19"
    plan: Plan


def training_hours(planned: Plan) -> float | None:
    """Returns the hours of a training; None if the time of a step is unknown, as on CPUs."""
    seconds = planned.estimate.estimated_step_seconds
    return seconds and planned.config.train.steps * seconds / 3600


def cost_message(planned: Plan, price: float | None) -> str:
    """Returns how long training takes and, with `price` per device and hour, what it costs."""
    steps, devices = planned.config.train.steps, planned.estimate.devices
    hours = training_hours(planned)
    if hours is None:
        return f"{steps:,} steps: {_not_known(planned, price)}"
    time = duration(3600 * hours) if hours > 1 / 3600 else "less than a second"
    message = f"{steps:,} steps: {time} on {devices} device{'s' if devices > 1 else ''}"
    if price is not None:
        money = price * devices * hours
        amount = f"{money:,.2f}" if money >= 0.01 else "less than 0.01"
        message += f", {amount} at {price:g} per device and hour"
    return f"{message} (estimated, without evaluation and saving)"


def _not_known(planned: Plan, price: float | None) -> str:
    what = "hours" if price is None else f"hours and cost at {price:g} per device and hour"
    if planned.estimate.device_kind != "cpu":  # it does not fit, or has a kernel of unknown cost
        return f"{what} not known; the compiled step does not tell its speed"
    return (
        f"{what} not known; CPUs have no estimate: main shows the time left, and compare --dry_run "
        "measures this machine for a comparison"
    )


def plan_for_hours(recipe: str, topology: str, hours: float) -> SizedPlan:
    """Returns the plan of the size of a recipe whose training takes about this time."""
    # The time of a step is only known once it is compiled. A guess by MFU starts the search, and
    # each plan corrects the FLOPs in proportion.
    flops = _FIRST_MFU * _peak_flops(topology) * 3600 * hours
    trials: list[tuple[float, SizedPlan]] = []  # and their relative errors of the hours
    for _ in range(_TRIALS):
        sized = f"{recipe}:{flops:.3g}".replace("e+", "e")  # sizes are written as 1e18
        try:
            planned = plan(sized, topology)
        except UserError as error:  # such as no size of so many FLOPs
            raise UserError(f"--hours={hours:g}: {error}") from None
        estimated = training_hours(planned)
        if estimated is None:
            reason = planned.problem or "the time of a step is not known"
            raise UserError(f"--hours={hours:g}, {sized} on {topology}: {reason}")
        error_of_hours = abs(estimated / hours - 1)
        trials.append((error_of_hours, SizedPlan(sized, planned)))
        # The next model would be larger, and fit even less.
        fits_no_more = planned.problem and estimated < hours
        if error_of_hours < _CLOSE or fits_no_more:
            return trials[-1][1]
        flops *= hours / estimated
    return min(trials, key=lambda trial: trial[0])[1]


def _peak_flops(topology: str) -> float:
    with topologies.settings_restored():
        devices = topologies.topology_devices(topology)
        chip = chips.find_chip(devices[0].device_kind)
    if not chip:
        raise UserError(f"--topology={topology}: --hours needs TPUs or GPUs, whose speed is known")
    return chip.flops * len(devices)
