"""Phase update: optimizer steps of critic and actor, and forward passes of the updated actor."""

from dataclasses import dataclass, replace

from hybridrl.config.estimators import trains_policy
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import Call, WorkerGroup, Workers, call_together
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, UpdateSizes, schedule
from hybridrl.trainer.advantage import KLControl
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.record import Row
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine
from hybridrl.trainer.timing.phases import Phases
from hybridrl.trainer.timing.throughput import ATTENTION, COMPUTED

FIRST_RATIO = "actor/first_log_ratio_max"


@dataclass(frozen=True)
class Updates:
    """Optimizer steps of a run."""

    config: RunConfig
    workers: Workers
    engine: HybridEngine
    kl: KLControl
    guard: NonFiniteGuard
    sizes: UpdateSizes
    phases: Phases

    def update(self, scheduled: ScheduledBatch, step: int) -> Row:
        """Run optimizer steps of the critic and, after its warm-up, of the actor; return metrics.

        An adaptive KL coefficient changes last, so that the whole step uses one value.
        """
        calls, kl_coef, policy = {}, self.kl.loss_coef, trains_policy(self.config, step)
        if self.workers.critic is not None:
            calls["update_critic"] = Call(self.workers.critic, "update", (step,))
        if policy:
            calls["update_actor"] = Call(self.workers.actor, "update", (step, kl_coef))
        with self.phases.section("update"):
            outcomes = call_together(calls, scheduled)
        self.phases.split("update", outcomes)
        self.engine.weight_version += policy
        tokens, attention = scheduled.computed(self.sizes)
        metrics: Row = {COMPUTED: float(tokens), ATTENTION: attention}
        for outcome in outcomes.values():
            metrics |= outcome.value
        self.guard.note(step, scheduled, kl_coef, metrics)
        if policy and self.config.rollout.exact:
            self._check_equality(step, scheduled.batch, metrics)
        return metrics | self.kl.adapt(scheduled.batch)

    def _check_equality(self, step: int, batch: RolloutBatch, metrics: Row) -> None:
        """Stop the run unless the first mini-batch's log-probs were vLLM's; name the first token.

        Without a token of the present weights the metric is null. A NaN is the guard's matter.
        """
        largest = metrics.get(FIRST_RATIO)
        if largest is None:
            raise RunStopped(
                f"rollout.exact = true, but the update by {self.config.actor.worker} reports no "
                f"{FIRST_RATIO}, which shows that log-probs are equal.\n"
                f"Set rollout.exact=false, or report the metrics of ActorWorker.policy_loss."
            )
        if not batch.current.values.any():
            metrics[FIRST_RATIO] = None
        elif abs(largest) > 0:
            differences: list[str | None] = self.workers.actor.call("first_difference")
            rank, text = next(pair for pair in enumerate(differences) if pair[1])
            raise RunStopped(
                f"rollout.exact = true, and in step {step} a log-prob of the trainer is not "
                f"vLLM's, first on rank {rank}: {text}.\nThe update ran on unequal policies. "
                f"Set rollout.exact=false, and report the model, the GPU and this message."
            )

    def log_probs(self, batch: RolloutBatch, role: WorkerGroup | None = None) -> Ragged:
        """Compute log-probs of any number of responses, by the present weights or by `role`."""
        return self._forward("compute_log_probs", batch, role)

    def scores(self, batch: RolloutBatch) -> Ragged:
        """Compute scores of any number of responses by the reward model that is trained."""
        return self._forward("compute_scores", batch, self.workers.critic)

    def token_stats(self, batch: RolloutBatch) -> Ragged:
        """Compute log-probs (real part) and entropies (imaginary part) by the present weights."""
        return self._forward("compute_token_stats", batch)

    def expert_shares(self) -> list[list[float]]:
        """Return each expert's share of its layer's choices in the last update."""
        shares: list[list[float]] = self.workers.actor.call("expert_shares")
        return shares

    def _forward(self, method: str, batch: RolloutBatch, role: WorkerGroup | None = None) -> Ragged:
        """Run a forward method, of the actor unless `role` is given.

        Responses are repeated until they fill all ranks.
        """
        batch = replace(batch, episode=None)
        count, shards = len(batch), self.sizes.num_shards
        whole = -(-count // shards) * shards
        repeated = batch.select([index % count for index in range(whole)])
        sizes = replace(self.sizes, mini_batch_size=whole, epochs=1)
        scheduled = schedule(repeated, sizes, seed=self.config.seed, step=0)
        values: Ragged = (role or self.workers.actor).call(method, scheduled)
        return values.select(range(count))
