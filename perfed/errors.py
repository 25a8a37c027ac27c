"""The one exception a user of perfed has to know."""


class PerfedError(ValueError):
    """Bad input or an impossible request: one line saying what, where and what is allowed.

    The command line prints the text and exits with code 2.
    """
