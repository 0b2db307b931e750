"""The rollout engine as the loop sees it: which weights vLLM holds, and when it sleeps."""

from collections.abc import Callable

from hybridrl.config.choices import Offload
from hybridrl.controller.worker_group import WorkerGroup, Workers

# A row per rank: metrics by name.
PerRank = list[dict[str, float]]


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
        """Put vLLM to sleep; it frees what rollout.sleep names, perhaps its weights.

        Stale weights stay so, also where they are kept.
        """
        kept = self._rollout.call("sleep")[0]
        self.rollout_version = None if self.rollout_version is None else kept

    def end_evaluation(self) -> None:
        """Mark vLLM's weights as stale: the next step reshards, as the first of a resumed run does.

        That empties the prefix cache.
        """
        self.sleep()
        self.rollout_version = None

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


class SplitEngine(HybridEngine):
    """vLLM on ranks of its own, which never sleeps.

    Weights arrive in a shadow copy, while vLLM may sample, and are swapped in between two calls.
    """

    def __init__(self, rollout: WorkerGroup, sender: WorkerGroup) -> None:
        super().__init__(rollout, Offload.none)
        self._sender = sender

    def reshard(self) -> dict[str, float]:
        """Move the actor's weights to vLLM, which does not sample now; return metrics."""
        return self.swap(self.send())

    def send(self) -> Callable[[], PerRank]:
        """Begin to send the actor's weights; return a function that waits."""
        wait: Callable[[], PerRank] = self._sender.begin("send", self.weight_version)
        return wait

    def swap(self, sent: Callable[[], PerRank] | None) -> dict[str, float]:
        """Swap in the weights that are sent, if any, and reset the prefix cache.

        Returns:
            Maximum of each metric over ranks: split/swap_s (pause of the engines), split/arrival_s
            (until the weights were there), reshard/<part of the sync on ranks that receive>.
        """
        swapped = self._rollout.begin("swap", self.weight_version)
        if sent is not None:
            sent()
        per_rank: PerRank = swapped()
        self.rollout_version = self.weight_version
        worst = {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}
        names = {"pause_s": "split/swap_s", "wait_s": "split/arrival_s"}
        return {
            names.get(name, name.replace("sync.", "reshard/")): value
            for name, value in worst.items()
        }

    def sleep(self) -> None:
        """Do nothing."""

    def end_evaluation(self) -> None:
        """Empty the prefix cache, as a resumed run begins its next step."""
        self.swap(None)

    def restore(self, weight_version: int, *, is_current: bool) -> None:
        """Restore an earlier run's state: vLLM holds the actor's weights."""
        self.weight_version = weight_version
        self.reshard()


def engine_of(workers: Workers, offload: Offload) -> HybridEngine:
    """Return the engine of a run: on the actor's ranks, or on others."""
    if workers.sender is None:
        return HybridEngine(workers.rollout, offload)
    return SplitEngine(workers.rollout, workers.sender)
