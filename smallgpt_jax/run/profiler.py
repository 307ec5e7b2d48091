"""Traces of training steps for xprof, TensorBoard's profiler."""

from collections.abc import Callable

import jax

from smallgpt_jax.devices import distributed
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.names import PROFILE_FOLDER
from smallgpt_jax.run.spool import Spool


class Profiler:
    """Traces `steps` training steps from step `first` on, on process 0; 0: none. Errors do not end
    the run.
    """

    def __init__(self, spool: Spool, first: int, steps: int, log: Callable[[str], None]):
        self._written = spool.folder / PROFILE_FOLDER
        self._folder = spool.workdir / PROFILE_FOLDER  # to which the spool uploads, for messages
        self._log = log
        self._traced = range(0)
        if first and distributed.is_primary():
            self._traced = range(first, first + steps)
        self._is_active = False

    def after_step(self, step: int, state) -> None:
        # `state` is the result of `step`; it need not be computed yet.
        if (step + 1 in self._traced) != self._is_active:
            jax.block_until_ready(state)  # so that the trace has whole steps
            self._switch()

    def close(self) -> None:
        if self._is_active:
            self._switch()

    def _switch(self) -> None:
        self._is_active = not self._is_active
        try:
            if self._is_active:
                jax.profiler.start_trace(str(self._written))
            else:
                jax.profiler.stop_trace()
                self._log(
                    f"wrote a profile to {self._folder}; to view it: pip install xprof && "
                    f"xprof --logdir={self._folder}"
                )
        except Exception as error:  # the profiler raises many types of exceptions
            self._traced = range(0)
            self._is_active = False
            self._log(
                f"could not write a profile: {short_reason(error)}. Training continues without it"
            )
