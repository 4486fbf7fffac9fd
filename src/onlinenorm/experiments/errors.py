"""The error that an experiment ends with where its user can do something about it."""


class ExperimentError(Exception):
    """What went wrong and what to do about it, in words for the user: the command prints this message and exits."""


class Busy(ExperimentError):
    """Another process is doing the same run."""
