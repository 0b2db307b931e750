"""Why environments failed, by the numbers that stand for it in a batch of tensors."""

from hybridrl.rewards.messages import FailureKind

# Different reasons that are kept; more of them would be one for each conversation.
MAX_REASONS = 1000
MANY = "for one of many reasons; the log has the first of them"


class Failures:
    """The reasons for which environments have failed since the run began.

    RolloutBatch.environment_failures has the number of one for each response, 0 for none.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[FailureKind, str], int] = {}

    def number(self, kind: FailureKind, reason: str) -> int:
        """The number of a reason, which is given to it when it is first met."""
        if (kind, reason) not in self._numbers and len(self._numbers) >= MAX_REASONS:
            reason = MANY
        return self._numbers.setdefault((kind, reason), len(self._numbers) + 1)

    def told(self, number: int) -> tuple[FailureKind, str]:
        """What a number above 0 stands for."""
        return list(self._numbers)[number - 1]
