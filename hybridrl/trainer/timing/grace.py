"""Check of checkpoint.on_sigterm against measured times."""

from collections.abc import Callable

from hybridrl.trainer.timing.timeline import Timeline


class GraceCheck:
    """Warning, once, if SIGTERM would end the run without a checkpoint.

    The running phase ends before the checkpoint is written.

    Args:
        grace_s: checkpoint.on_sigterm, in seconds; 0: no checkpoint is expected.
        warn: prints a warning.
    """

    def __init__(self, grace_s: float, warn: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._warn = warn
        self._has_warned = False

    def look(self, timeline: Timeline, write_s: float | None) -> None:
        """Compare a step's longest phase plus the writing of a checkpoint with the grace.

        Args:
            timeline: of the step.
            write_s: seconds of writing the last checkpoint; None: none yet.
        """
        if self._has_warned or not self._grace_s or write_s is None or not timeline.sections:
            return
        phase = max((section.span for section in timeline.sections), key=lambda span: span.seconds)
        if phase.seconds + write_s <= self._grace_s:
            return
        self._has_warned = True
        self._warn(
            f"SIGTERM may end this run without a checkpoint: {phase.name} took "
            f"{phase.seconds:.1f} s and writing one {write_s:.1f} s, and checkpoint.on_sigterm is "
            f"{self._grace_s:g} s. Raise it, and the time between SIGTERM and SIGKILL of your "
            "scheduler."
        )
