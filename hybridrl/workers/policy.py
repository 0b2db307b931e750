"""Policy of an evaluation: sampled, not trained."""

from dataclasses import dataclass
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import FSDPConfig, LoRAConfig, ModelConfig, RoleConfig
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.workers.model_worker import ModelWorker, load_trained_weights

# Unused: no logits are computed.
CHUNK_TOKENS = 1024


@dataclass(kw_only=True)
class PolicyConfig(RoleConfig):
    """Config of a policy that is sampled.

    Attributes:
        model: base model.
        fsdp: sharding spec.
        lora: adapters of the checkpoint, if any.
        checkpoint: folder of a checkpoint, visible on every node; None: the base model itself.
    """

    worker: str = "hybridrl.workers.policy.PolicyWorker"
    model: ModelConfig
    fsdp: FSDPConfig
    lora: LoRAConfig | None
    checkpoint: str | None


class PolicyWorker(ModelWorker):
    """Shards of a policy for a rollout engine in the same process, without an optimizer.

    Raises:
        ConfigError: the checkpoint holds weights of another model.
    """

    config_class = PolicyConfig
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.own(load_sharded_policy(config.model, config.fsdp, mesh, CHUNK_TOKENS, config.lora))
        if config.checkpoint is not None:
            load_trained_weights(self, Path(config.checkpoint), "actor")
