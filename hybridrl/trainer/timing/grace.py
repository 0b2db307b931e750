"""Whether SIGTERM leaves a run the time for a checkpoint."""

from collections.abc import Callable

from hybridrl.trainer.timing.timeline import Timeline


class GraceCheck:
    """Warns, once, of a run that SIGTERM would end without a checkpoint.

    Before the checkpoint is written, the phase that is under way comes to its end.

    Args:
        grace_s: checkpoint.on_sigterm, in seconds; 0: the run leaves at once, which is no surprise.
        warn: tells the user.
    """

    def __init__(self, grace_s: float, warn: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._warn = warn
        self._is_told = False

    def look(self, timeline: Timeline, write_s: float | None) -> None:
        """Compare a step's longest phase and the writing of a checkpoint with the grace.

        Args:
            timeline: of the step.
            write_s: seconds that the last checkpoint took; None: there is none yet.
        """
        if self._is_told or not self._grace_s or write_s is None or not timeline.sections:
            return
        phase = max((section.span for section in timeline.sections), key=lambda span: span.seconds)
        if phase.seconds + write_s <= self._grace_s:
            return
        self._is_told = True
        self._warn(
            f"SIGTERM may end this run without a checkpoint: {phase.name} took "
            f"{phase.seconds:.1f} s and writing one {write_s:.1f} s, and checkpoint.on_sigterm is "
            f"{self._grace_s:g} s. Raise it, and the time that whatever stops the run lets pass "
            "before SIGKILL."
        )
