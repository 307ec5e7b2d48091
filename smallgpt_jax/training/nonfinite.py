"""Non-finite updates: skipped, or the end of the run."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Sequence

from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.run.logger import StepMetrics


@dataclasses.dataclass
class NonFiniteGuard:
    """Ends the run at the first non-finite update or, if `on_nonfinite` is "skip", after
    `max_nonfinite` in a row. Non-finite weights always end it.
    """

    on_nonfinite: str
    max_nonfinite: int
    row_numbers_at: Callable[[int], Sequence[int]]  # of the batch of a step
    newest_checkpoint: Callable[[], int | None]
    log: Callable[[str], None] = print
    consecutive: int = 0  # non-finite updates in a row

    def check(self, metrics: StepMetrics) -> None:
        """Raises DivergenceError if the run must end."""
        if metrics.is_finite:
            self.consecutive = 0
            return
        self.consecutive += 1
        values = metrics.read()
        # An update with a finite loss and gradient is applied; its weights are then not finite.
        was_applied = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        description = self._describe(metrics.step, values, was_applied)
        skips = self.on_nonfinite == "skip" and not was_applied
        if skips and self.consecutive < self.max_nonfinite:
            self.log(f"{description}. Update skipped ({values['skipped']:.0f} so far)")
            return

        reason, advice = "training has diverged", "Try a lower config.optimizer.learning_rate"
        if skips:
            reason = f"{self.consecutive} non-finite updates in a row (config.train.max_nonfinite)"
        elif not was_applied:
            advice += ", or --config.train.on_nonfinite=skip"
        newest = self.newest_checkpoint()
        note = "There is no checkpoint"
        if newest is not None:
            note = f"The newest checkpoint, of step {newest}, is not affected"
        raise DivergenceError(f"{reason}: {description}.\n{note}. {advice}")

    def _describe(self, step: int, values: dict, was_applied: bool) -> str:
        description = f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if was_applied:
            description += ", the updated weights are not finite"
        rows = ", ".join(map(str, self.row_numbers_at(step)))
        rows = textwrap.shorten(rows, 60, placeholder=" …")
        return f"{description}; its batch: rows {rows} of the training text"
