"""Value function: the critic's calls in a step; a null object without a critic."""

from hybridrl.algorithms.masked import on_mask
from hybridrl.controller.worker_group import Call, WorkerGroup
from hybridrl.data.batch import RolloutBatch


class NoCritic:
    """Null object for advantage estimators without values."""

    warmup_steps = 0

    def forward_calls(self) -> dict[str, Call]:
        """Return no call."""
        return {}

    def update_calls(self, step: int) -> dict[str, Call]:
        """Return no call."""
        return {}

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Return no metrics."""
        return {}


class Critic:
    """Value function that is trained beside the policy.

    Args:
        group: the worker group that holds it.
        warmup_steps: first steps of the run, in which only the critic trains.
    """

    def __init__(self, group: WorkerGroup, warmup_steps: int) -> None:
        self._group = group
        self.warmup_steps = warmup_steps

    def forward_calls(self) -> dict[str, Call]:
        """Return the call that computes `values`."""
        return {"values": Call(self._group, "compute_values")}

    def update_calls(self, step: int) -> dict[str, Call]:
        """Return the call that trains the critic, by the name of its phase."""
        return {"update_critic": Call(self._group, "update", (step,))}

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Compute critic/value_mean and critic/return_mean over the response tokens."""
        assert batch.values is not None and batch.returns is not None
        mask = batch.response_mask.values
        return {
            "critic/value_mean": float(on_mask(batch.values.values, mask).mean()),
            "critic/return_mean": float(on_mask(batch.returns.values, mask).mean()),
        }


ValueFunction = NoCritic | Critic
