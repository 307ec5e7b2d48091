"""Ctrl-C while a command imports its libraries, which takes seconds: a message and status 130, as `cli` does later."""

import os
import signal


def exit_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the caller ignores Ctrl-C
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Ends `exit_on_interrupt`: from now on, Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_) -> None:
    """Does not raise, because libraries turn a KeyboardInterrupt in their imports into other errors."""
    os.write(2, b"error: stopped\n")
    os._exit(130)
