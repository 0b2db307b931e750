"""Errors that tell their whole story themselves: no traceback adds to them."""


class RunStopped(RuntimeError):
    """A run ends itself, because going on would be worth nothing."""
