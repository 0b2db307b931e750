"""The rollout engine as the loop sees it: which weights vLLM holds, and when it sleeps."""

from hybridrl.config.choices import Offload
from hybridrl.controller.worker_group import WorkerGroup


class HybridEngine:
    """vLLM on the GPUs of the actor, whose weights it samples with.

    Attributes:
        weight_version: updates of the actor so far.
        rollout_version: of the weights that vLLM holds; None: no valid ones.

    Source: Sheng et al. 2024 (HybridFlow), section 5, https://arxiv.org/abs/2409.19256
    """

    def __init__(self, rollout: WorkerGroup, offload: Offload) -> None:
        self.weight_version = 0
        self.rollout_version: int | None = None
        self._rollout = rollout
        self._offload = offload

    @property
    def is_current(self) -> bool:
        """True if vLLM holds the actor's weights."""
        return self.rollout_version == self.weight_version

    def reshard(self) -> dict[str, float]:
        """Copy the actor's weights to vLLM; return the maximum of each metric over ranks."""
        per_rank = self._rollout.call("reshard", self.weight_version)
        self.rollout_version = self.weight_version
        return {f"reshard/{name}": max(rank[name] for rank in per_rank) for name in per_rank[0]}

    def sleep(self) -> None:
        """Put vLLM to sleep; it frees what rollout.sleep names, perhaps its weights."""
        self.rollout_version = self._rollout.call("sleep")[0]

    def make_room_for_optimizer(self) -> None:
        """Put vLLM to sleep if optimizer state is offloaded and must return to the GPU."""
        if self._offload is not Offload.none:
            self.sleep()

    def restore(self, weight_version: int, *, is_current: bool) -> None:
        """Restore an earlier run's state: vLLM awake with the actor's weights, or asleep."""
        self.weight_version = weight_version
        self.reshard()
        if not is_current:
            self.sleep()
            self.rollout_version = None  # even if it keeps weights: those are of another version
