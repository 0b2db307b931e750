"""The reward model: a frozen classifier that scores each response as a whole."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import RewardModelConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.packing import States, to_device
from hybridrl.distributed.fsdp import load_sharded_reward_model
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import ModelWorker


class RewardModelWorker(ModelWorker):
    """Worker that scores responses. One instance per rank, each with one FSDP shard.

    To change the scores, subclass, override `forward`, and set
    `reward_model.worker=my_package.MyRewardModelWorker`.
    """

    config_class = RewardModelConfig
    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.own(load_sharded_reward_model(config.model.path, config.fsdp, mesh))

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_scores(self, batch: RankBatch) -> Ragged:
        """Compute each response's score on its last token, 0 on the others: ragged float32, CPU.

        Rows are in the order of the first epoch's micro-batches. Unweighted.
        """
        return self.over_first_epoch(batch, self.forward)

    def forward(self, micro: RolloutBatch) -> Tensor:
        """Compute a score for each response token, [R] float32, on the device."""
        scores = self.model(self.pack(micro, States.last))
        last = to_device(micro.responses.lengths.cumsum(0) - 1, self.device)
        per_token = scores.new_zeros(len(micro.responses.values))
        return per_token.index_copy_(0, last, scores)
