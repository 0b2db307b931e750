"""The reward model: a classifier that scores each response as a whole; frozen, or trained."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from hybridrl.algorithms.preference_losses import bradley_terry
from hybridrl.config.schema import CriticConfig, RewardModelConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.packing import States, to_device
from hybridrl.distributed.fsdp import load_sharded_critic, load_sharded_reward_model
from hybridrl.distributed.storage.export import write_gathered
from hybridrl.distributed.storage.policy_weights import GatheredClassifier
from hybridrl.models.resolve import model_folder, read_object
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import ModelWorker, TrainedWorker
from hybridrl.workers.training import LossStats


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
        return on_last_tokens(self.model(self.pack(micro, States.last)), micro)


class RewardTrainer(TrainedWorker):
    """Worker that trains a reward model on pairs: the policy's backbone with a new head.

    It stands in the critic's place and has its settings.
    """

    config_class = CriticConfig
    config: CriticConfig

    def __init__(self, config: CriticConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        model = load_sharded_critic(config.model, config.fsdp, mesh, config.model.seed)
        model.head.bias.requires_grad_(False)  # 0: pairs do not say it, and classifiers have none
        self.own(model)

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_scores(self, batch: RankBatch) -> Ragged:
        """Compute the scores as `RewardModelWorker` does."""
        return self.over_first_epoch(batch, self.forward)

    def forward(self, micro: RolloutBatch) -> Tensor:
        """Compute a score for each response token, 0 on all but the last; [R], on the device."""
        return on_last_tokens(self.model(self.pack(micro, States.last)), micro)

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch, step: int) -> dict[str, float]:
        """Take one optimizer step per mini-batch of pairs; return metrics over all ranks."""
        with self.training(self.pair_loss, step) as training:
            for mini in batch.policy_mini_batches():
                training.take_step(*mini)
        # As of any supervised training: there is no other.
        return {f"actor/{name}": value for name, value in training.report().items()}

    def pair_loss(self, micro: RolloutBatch, totals: Totals) -> tuple[Tensor, LossStats]:
        """Compute the loss: a sum over a micro-batch's pairs, divided by the mini-batch's."""
        last = micro.responses.lengths.cumsum(0) - 1
        preferred = to_device(micro.preferred.values[last], self.device)
        loss = bradley_terry(self.model(self.pack(micro, States.last)), preferred)
        return loss.values.sum() / totals.episodes, LossStats(loss.sums)

    @on_all_ranks(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> str | None:
        """Write an HF sequence classifier with one label; return an error of the disk, or None."""
        self.begin()
        source = model_folder(self.config.model)
        config = read_object(source / "config.json")
        # Families of which transformers has no classifier can be loaded by `RewardModelWorker`.
        other = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        kind, padding = config["model_type"], config.get("pad_token_id")
        changes = {
            "architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind, other)],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            # transformers looks for a response's last token before its padding.
            "pad_token_id": None if padding in stop_token_ids(source) else padding,
        }
        return write_gathered(GatheredClassifier(self.model), source, folder, changes=changes)


def on_last_tokens(scores: Tensor, micro: RolloutBatch) -> Tensor:
    """Return [R]: each response's score on its last token, 0 on the others."""
    last = to_device(micro.responses.lengths.cumsum(0) - 1, scores.device)
    per_token = scores.new_zeros(len(micro.responses.values))
    return per_token.index_copy_(0, last, scores)
