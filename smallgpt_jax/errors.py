"""Exceptions that commands print as a message, without a traceback."""


class UserError(Exception):
    """An error that a user can cause and fix.

    The message is the whole report, one or two lines: where (flag, field, file, line), what is wrong, what to do.
    Commands print it without a traceback and exit with status 1.
    """


class WorkdirBusyError(UserError):
    """Another process, `by`, is training in the workdir."""

    def __init__(self, message: str, by: str):
        super().__init__(message)
        self.by = by


class DivergenceError(UserError):
    """Loss, gradient or weights of a run are not finite."""


class StoppedError(Exception):
    """A run has ended on a stop request; `status` is the exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
