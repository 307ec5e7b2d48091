"""The TensorBoard event file of a run."""

import time
from pathlib import Path

from smallgpt_jax.storage.tensorboardx import without_torch


class EventFile:
    """Writes scalars to a TensorBoard event file. All methods raise OSError if it is not writable."""

    def __init__(self, folder: Path, first_step: int):
        """TensorBoard ignores events after `first_step` in the older files of a resumed run."""
        with without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary

        # Events are written without tensorboardX's thread, which hangs after a failed write.
        self._events = EventsWriter(str(folder / "events"))
        self._event = Event
        self._summary = Summary
        self._write(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        scalars = [
            self._summary.Value(tag=f"{split}/{name}", simple_value=value)
            for name, value in values.items()
        ]
        self._write(step=step, summary=self._summary(value=scalars))

    def _write(self, **fields) -> None:
        self._events.write_event(self._event(wall_time=time.time(), **fields))
        self._events.flush()

    def close(self) -> None:
        self._events.close()
