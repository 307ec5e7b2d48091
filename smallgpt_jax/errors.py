"""Exceptions that are told to the user in a line, without a traceback."""


class UserError(Exception):
    """Something a user asked for that cannot be done.

    The message is the whole report, one or two lines: what is wrong, where (file, line, config
    field) and what to do. Commands print it without a traceback and exit with status 1.
    """


class InTraining(UserError):
    """Another process is training in the workdir; `by` says which."""

    def __init__(self, message: str, by: str):
        super().__init__(message)
        self.by = by


class Diverged(UserError):
    """Loss or gradient of a run have not been finite."""


class Stopped(Exception):
    """A run has ended because it was asked to; `status` is the exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
