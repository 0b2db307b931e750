"""The frozen reference policy of the KL penalty."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import ReferenceConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.fsdp import load_sharded_policy, reshard
from hybridrl.distributed.log_probs import Entropy
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.packing import pack
from hybridrl.workers.base import Worker
from hybridrl.workers.dispatch import Dispatch, on_all_ranks


class ReferenceWorker(Worker):
    """Log-probs under the model that training started from. One instance per rank."""

    config_class = ReferenceConfig
    config: ReferenceConfig

    def __init__(self, config: ReferenceConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.model = load_sharded_policy(
            config.model, config.fsdp, mesh, config.log_prob_chunk_tokens
        )

    @on_all_ranks(Dispatch.SHARD_DP)
    @torch.no_grad()
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """Log-probs of the response tokens: ragged float32, nats, on CPU.

        Rows stand in the order of the first epoch's micro-batches.
        """
        log_probs = batch.map_first_epoch(self._log_probs)
        reshard(self.model)
        return log_probs

    def _log_probs(self, micro: RolloutBatch) -> Ragged:
        packed = pack(micro, device_of(self.mesh))
        result = self.model(packed, self.config.temperature, Entropy.omit)
        return micro.responses.like(result.log_probs.cpu())
