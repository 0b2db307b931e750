"""Frozen policies: the reference of the KL penalty, and the policy of an evaluation."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.checkpoint.files import STATE
from hybridrl.config.schema import LoRAConfig, ModelConfig, ReferenceConfig, ShardedConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.lora import adapters_off
from hybridrl.distributed.storage.checkpoint import StoredState
from hybridrl.distributed.storage.policy_weights import freeze_unless_stored
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.model_worker import ModelWorker, load_trained_weights

# Unused by a policy that is sampled: it computes no logits.
CHUNK_TOKENS = 1024


class ReferenceWorker(ModelWorker):
    """Worker for log-probs under the initial model. One instance per rank.

    If the actor has adapters, the reference is the actor's model without them, not a copy.
    """

    config_class = ReferenceConfig
    config: ReferenceConfig

    def __init__(self, config: ReferenceConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.is_under_adapters = config.lora is not None
        if not self.is_under_adapters:
            chunk_tokens = config.log_prob_chunk_tokens
            self.own(load_sharded_policy(config.model, config.fsdp, mesh, chunk_tokens))

    def connect(self, roles: dict[str, Worker]) -> None:
        """Store the other roles; use the actor's model if it has adapters."""
        super().connect(roles)
        if self.is_under_adapters:
            actor = roles["actor"]
            assert isinstance(actor, ModelWorker)
            self.model, self.weights = actor.model, actor.weights
            self.shares_prefixes = actor.shares_prefixes
            self.others = [other for other in self.others if other is not actor]

    def rest(self) -> None:
        """Offload the weights to host memory under idle_all, unless they are the actor's."""
        if not self.is_under_adapters:
            super().rest()

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """Compute log-probs of the response tokens: ragged float32, nats, on CPU.

        Rows are in the order of the first epoch's micro-batches.
        """
        return self.over_first_epoch(batch, self.forward)

    def forward(self, micro: RolloutBatch) -> Tensor:
        """Compute log-probs of the response tokens, [R] float32, nats, on the device."""
        packed = self.pack(micro)
        with adapters_off(self.model):
            return self.model(packed, self.config.temperature, Entropy.omit).log_probs


@dataclass(kw_only=True)
class PolicyConfig(ShardedConfig):
    """Config of a policy that is sampled.

    `checkpoint` is a folder, visible on every node, `lora` its adapters; None: the base model.
    """

    worker: str = "hybridrl.workers.reference.PolicyWorker"
    model: ModelConfig
    lora: LoRAConfig | None
    checkpoint: str | None


class PolicyWorker(ModelWorker):
    """Shards of a policy for a rollout engine in the same process, without an optimizer."""

    config_class = PolicyConfig
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        policy = load_sharded_policy(
            config.model, config.fsdp, mesh, CHUNK_TOKENS, config.lora, train_vision=True
        )
        self.own(policy)
        if config.checkpoint is not None:
            freeze_unless_stored(policy.lm, StoredState(Path(config.checkpoint) / STATE))
            load_trained_weights(self, Path(config.checkpoint), "actor")
