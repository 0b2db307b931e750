"""Errors that are shown without a traceback."""


class RunStopped(RuntimeError):
    """The run cannot learn any more and ends itself."""
