"""The critic's part in a step: values before, updates after; or nothing where there is no critic.

Chosen once from config; the loop asks for the same things whichever it is.
"""

from typing import Protocol

from hybridrl.algorithms.masked import on_mask
from hybridrl.controller.worker_group import Call, WorkerGroup
from hybridrl.data.batch import RolloutBatch


class ValueFunction(Protocol):
    """The critic's part in a step."""

    @property
    def warmup_steps(self) -> int:
        """First steps of the run, in which the policy is not trained."""
        ...

    def scores(self) -> dict[str, Call]:
        """The call that computes `values`, if there is a critic."""
        ...

    def updates(self, step: int) -> dict[str, Call]:
        """The call that trains the critic, by the name of its phase, if there is one."""
        ...

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """What is known of the values and their targets."""
        ...


class NoCritic:
    """The advantage estimator takes no values: nothing is computed, nothing is trained."""

    warmup_steps = 0

    def scores(self) -> dict[str, Call]:
        """No call."""
        return {}

    def updates(self, step: int) -> dict[str, Call]:
        """No call."""
        return {}

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Nothing is known."""
        return {}


class Critic:
    """A value function that is trained beside the policy.

    Args:
        group: the worker group that holds it.
        warmup_steps: first steps of the run, in which it alone is trained.
    """

    def __init__(self, group: WorkerGroup, warmup_steps: int) -> None:
        self._group = group
        self.warmup_steps = warmup_steps

    def scores(self) -> dict[str, Call]:
        """The call that computes `values`."""
        return {"values": Call(self._group, "compute_values")}

    def updates(self, step: int) -> dict[str, Call]:
        """The call that trains the critic."""
        return {"update_critic": Call(self._group, "update", (step,))}

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Means over the response tokens: critic/value_mean, critic/return_mean."""
        assert batch.values is not None and batch.returns is not None
        mask = batch.response_mask.values
        return {
            "critic/value_mean": float(on_mask(batch.values.values, mask).mean()),
            "critic/return_mean": float(on_mask(batch.returns.values, mask).mean()),
        }
