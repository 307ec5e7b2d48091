"""Failures of the library `tokenizers`, which is written in Rust and panics if a file is damaged."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

from smallgpt_jax.formatting import short_reason

_DESCRIPTOR_LOCK = threading.Lock()  # one thread at a time replaces file descriptor 2


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises ValueError if the library fails. It raises a plain Exception, or, where it panics, a
    BaseException of a type that cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(short_reason(error)) from None
        raise


@contextlib.contextmanager
def no_panic_messages() -> Iterator[None]:
    """Hides the stack that the library writes to file descriptor 2 when it panics."""
    with contextlib.ExitStack() as hidden:
        hidden.enter_context(_DESCRIPTOR_LOCK)
        try:
            standard_error = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        hidden.callback(os.close, standard_error)
        hidden.callback(os.dup2, standard_error, 2)
        messages = hidden.enter_context(tempfile.TemporaryFile())
        os.dup2(messages.fileno(), 2)
        yield
        messages.seek(0)  # without a panic, only what other threads have written in the meantime
        os.write(standard_error, messages.read())
