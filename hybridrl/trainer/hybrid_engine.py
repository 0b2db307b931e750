"""Training and sampling on the same GPUs: which weights vLLM holds, and when it makes room.

Source: Sheng et al. 2024 (HybridFlow), section 5, https://arxiv.org/abs/2409.19256
"""

from hybridrl.config.choices import Offload
from hybridrl.controller.worker_group import WorkerGroup


class HybridEngine:
    """vLLM beside the actor whose weights it samples with.

    Args:
        rollout: the rollout engines of all ranks.
        offload: what of the trained roles idles on the host (fsdp.offload).

    Attributes:
        weight_version: updates of the actor so far.
        rollout_version: of the weights that vLLM holds; None: none that may be sampled with.
    """

    def __init__(self, rollout: WorkerGroup, offload: Offload) -> None:
        self.weight_version = 0
        self.rollout_version: int | None = None
        self._rollout = rollout
        self._offload = offload

    @property
    def is_current(self) -> bool:
        """Whether vLLM holds the actor's weights."""
        return self.rollout_version == self.weight_version

    def reshard(self) -> dict[str, float]:
        """Bring vLLM's weights up to the actor's; seconds and bytes of the slowest rank."""
        per_rank = self._rollout.call("reshard", self.weight_version)
        self.rollout_version = self.weight_version
        names = per_rank[0]
        return {f"reshard/{name}": max(metrics[name] for metrics in per_rank) for name in names}

    def sleep(self) -> None:
        """Have vLLM give back what rollout.sleep names, perhaps its weights."""
        self.rollout_version = self._rollout.call("sleep")[0]

    def make_room_for_moments(self) -> None:
        """Have vLLM sleep where the actor's moments, which come back, idle on the host."""
        if self._offload is not Offload.none:
            self.sleep()

    def restore(self, weight_version: int, *, is_current: bool) -> None:
        """Be as an earlier run was: vLLM awake with the actor's weights, or asleep.

        Args:
            weight_version: updates that the actor's weights have had.
            is_current: whether vLLM held them.
        """
        self.weight_version = weight_version
        self.reshard()
        if not is_current:
            self.sleep()
            self.rollout_version = None  # also where weights stay: they were of another version
