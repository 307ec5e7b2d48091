"""Non-finite updates: skipped, or the end of the run."""

import math
import textwrap
from collections.abc import Callable, Sequence

from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.run.logger import StepMetrics


class NonFiniteGuard:
    """Ends the run at the first non-finite update or, if `on_nonfinite` is "skip", after
    `max_nonfinite` in a row. The training step skips such updates. An applied update that makes the
    weights non-finite always ends the run.
    """

    def __init__(
        self,
        on_nonfinite: str,
        max_nonfinite: int,
        row_numbers_at: Callable[[int], Sequence[int]],
        newest_checkpoint: Callable[[], int | None],
        log: Callable[[str], None] = print,
    ):
        self._skips, self._max = on_nonfinite == "skip", max_nonfinite
        self._row_numbers_at, self._newest_checkpoint, self._log = (
            row_numbers_at,
            newest_checkpoint,
            log,
        )
        self._consecutive = 0

    def check(self, metrics: StepMetrics) -> None:
        """Raises DivergenceError if the run must end."""
        if metrics.is_finite:
            self._consecutive = 0
            return
        self._consecutive += 1
        values = metrics.read()
        was_applied = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        rows = ", ".join(map(str, self._row_numbers_at(metrics.step)))
        description = (
            f"step {metrics.step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
            + (", the updated weights are not finite" if was_applied else "")
            + f"; its batch: rows {textwrap.shorten(rows, 60, placeholder=' …')} of the training text"
        )
        skips = self._skips and not was_applied
        if skips and self._consecutive < self._max:
            self._log(f"{description}. Update skipped ({values['skipped']:.0f} so far)")
            return
        newest = self._newest_checkpoint()
        reason = (
            f"{self._consecutive} non-finite updates in a row (config.train.max_nonfinite)"
            if skips
            else "training has diverged"
        )
        checkpoint_note = (
            "There is no checkpoint"
            if newest is None
            else f"The newest checkpoint, of step {newest}, is not affected"
        )
        skip_hint = "" if skips or was_applied else ", or --config.train.on_nonfinite=skip"
        raise DivergenceError(
            f"{reason}: {description}.\n{checkpoint_note}. Try a lower "
            f"config.optimizer.learning_rate{skip_hint}"
        )
