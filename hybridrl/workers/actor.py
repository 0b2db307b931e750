"""The policy being trained: log-probs and clipped updates on one FSDP shard."""

from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.algorithms.losses import entropy_loss, kl_loss, log_ratio_max, policy_loss, ratio_max
from hybridrl.config.schema import ActorConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.export import write_hf_folder
from hybridrl.distributed.fsdp import full_state_dict, load_sharded_policy, named_shards
from hybridrl.distributed.log_probs import Entropy, ResponseLogProbs
from hybridrl.distributed.offload import offloadable_weights
from hybridrl.distributed.shards import NamedShard
from hybridrl.models.resolve import model_folder
from hybridrl.workers.dispatch import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.optimizer import Optimizer
from hybridrl.workers.training import LossStats, Training


class ActorWorker(ModelWorker):
    """Trains the policy. One instance per rank, each holding one FSDP shard.

    Methods marked `on_all_ranks` are collectives: the worker group calls them on every rank, and
    each rank must do the same number of forward passes. To change the objective, subclass,
    override `policy_loss`, and set `actor.worker=my_package.MyActorWorker`.

    Attributes:
        kl_coef: weight of the KL penalty in the loss during `update`.
    """

    config_class = ActorConfig
    config: ActorConfig

    def __init__(self, config: ActorConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.model = load_sharded_policy(
            config.model, config.fsdp, mesh, config.log_prob_chunk_tokens, config.lora
        )
        self.weights = offloadable_weights(self.model, config.fsdp.offload, self.device)
        self.optimizer = Optimizer(
            self.model, config.optim, config.total_steps, config.fsdp.offload
        )
        self.kl_coef = 0.0

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """Log-probs of the response tokens under the current weights: ragged float32, nats, CPU.

        Runs over the same micro-batches as the first epoch of `update`, so that the policy ratio
        there is exactly 1; rows stand in their order.
        """
        return self.over_first_epoch(
            batch, lambda micro: self.forward(micro, Entropy.omit).log_probs
        )

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch, step: int, kl_coef: float) -> dict[str, float]:
        """Take one optimizer step per mini-batch of `batch`; return metrics over all ranks.

        Args:
            batch: this rank's responses, with old_log_probs, advantages and, for a KL penalty in
                the loss, ref_log_probs.
            step: training step, counted from 1; it sets the learning rate.
            kl_coef: weight of the KL penalty in the loss; 0 if it acts elsewhere or not at all.
        """
        self.begin()
        self.kl_coef = kl_coef
        lr = self.optimizer.set_step(step)
        training = Training(
            self.model, self.optimizer, self.policy_loss, self.device, self.config.fsdp
        )
        with self.optimizer.on_device():
            for index, mini in enumerate(batch.mini_batches()):
                training.take_step(mini)
                # A loss of a subclass may not report it.
                if index == 0 and "log_ratio_max" in training.maxima:
                    training.maxima["first_log_ratio_max"] = training.maxima["log_ratio_max"]
        return {f"actor/{name}": value for name, value in training.report().items()} | {
            "actor/lr": lr
        }

    def policy_loss(self, micro: RolloutBatch, num_tokens: float) -> tuple[Tensor, LossStats]:
        """The scalar to minimise: a sum over this micro-batch's tokens, over `num_tokens`.

        Dividing by the global token count of the mini-batch, not by this micro-batch's, makes the
        gradient independent of how samples were spread over ranks and micro-batches.

        Args:
            micro: responses of one packed forward.
            num_tokens: response tokens of the mini-batch over all ranks.

        Returns:
            The loss with its graph, and what to report (`LossStats`).
        """
        coef = self.config.entropy_coef
        result = self.forward(micro, Entropy.differentiate if coef else Entropy.report)
        log_probs, mask = result.log_probs, self.on_device(micro.response_mask)
        old_log_probs = self.on_device(micro.old_log_probs)
        loss, sums = policy_loss(
            log_probs,
            old_log_probs,
            self.on_device(micro.advantages),
            mask,
            clip_ratio=self.config.clip_ratio,
            num_tokens=num_tokens,
        )
        assert result.entropy is not None
        bonus, entropy = entropy_loss(result.entropy, mask, coef=coef, num_tokens=num_tokens)
        loss = loss + bonus
        stats = LossStats(
            sums={
                "ratio_mean": sums["ratio"],
                "clip_fraction": sums["clip_fraction"],
                "ppo_kl": sums["approx_kl"],
                "entropy": entropy["entropy"],
            },
            maxima={
                "ratio_max": ratio_max(log_probs, old_log_probs, mask),
                "log_ratio_max": log_ratio_max(log_probs, old_log_probs, mask),
            },
        )
        if self.kl_coef:
            penalty, kl = kl_loss(
                log_probs,
                self.on_device(micro.ref_log_probs),
                mask,
                coef=self.kl_coef,
                estimator=self.config.kl.estimator,
                num_tokens=num_tokens,
            )
            loss = loss + penalty
            stats.sums.update(kl)
        return loss, stats

    def forward(self, micro: RolloutBatch, entropy: Entropy) -> ResponseLogProbs:
        """Log-probs, and entropy if wanted, of the response tokens, on the worker's device."""
        return self.model(self.pack(micro), self.config.temperature, entropy)

    def named_shards(self) -> list[NamedShard]:
        """This rank's shards of the weights, for a reshard in the same process."""
        return named_shards(self.model)

    @on_all_ranks(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> None:
        """Write the policy to `folder` as an ordinary HF model, with tokenizer and configuration.

        float32, as trained. The folder appears under its name when it is complete.
        """
        self.begin()
        weights = full_state_dict(self.model)
        if dist.get_rank() == 0:
            write_hf_folder(weights, model_folder(self.config.model), Path(folder))
