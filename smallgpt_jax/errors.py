"""The one exception that stands for "the user can mend this"."""


class UserError(Exception):
    """Something a user asked for that cannot be done.

    The message is the whole report, one or two lines: what is wrong, where (file, line, config
    field) and what to do. Commands print it without a traceback and exit with status 1.
    """
