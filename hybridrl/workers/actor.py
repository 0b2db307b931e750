"""The policy being trained: log-probs and clipped updates on one FSDP shard."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.algorithms.distillation import divergence_loss
from hybridrl.algorithms.losses import entropy_bonus, kl_penalty, ratio_maxima
from hybridrl.algorithms.token_loss import TokenLoss, aggregate, as_token_loss
from hybridrl.config.choices import RouterReplay
from hybridrl.config.policy_losses import KEY, policy_loss_of
from hybridrl.config.schema import ActorConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.exact import uneven_product
from hybridrl.distributed.forward.log_probs import Entropy, ResponseLogProbs
from hybridrl.distributed.forward.packing import States, to_device
from hybridrl.distributed.forward.routers import Router
from hybridrl.distributed.forward.routing import Routing, RoutingTotals
from hybridrl.distributed.forward.token_models import Target
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.storage.export import AdapterFiles, write_gathered
from hybridrl.distributed.storage.policy_weights import GatheredWeights, adapter_state_dict
from hybridrl.models.resolve import model_folder, name_or_folder
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.model_worker import TrainedWorker
from hybridrl.workers.teacher import TeacherWorker
from hybridrl.workers.training import LossStats

# Reported names of sums, if they differ.
REPORTED = {"ratio": "ratio_mean", "approx_kl": "ppo_kl"}


class ActorWorker(TrainedWorker):
    """Worker that trains the policy. One instance per rank, each with one FSDP shard.

    Methods marked `on_all_ranks` are collectives: the worker group calls them on every rank, and
    each rank must do the same number of forward passes. To change the objective, subclass,
    override `policy_loss`, and set `actor.worker=my_package.MyActorWorker`.
    """

    config_class = ActorConfig
    config: ActorConfig

    def __init__(self, config: ActorConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.own(
            load_sharded_policy(
                config.model,
                config.fsdp,
                mesh,
                config.log_prob_chunk_tokens,
                config.lora,
                train_vision=config.train_vision,
            )
        )
        for module in self.model.modules():
            if isinstance(module, Router):
                module.replays = config.router_replay is RouterReplay.replay
        self.kl_coef, self.routing = 0.0, RoutingTotals()
        # With rollout.exact: micro-batches of the first mini-batch, and their log-probs.
        self.compared: list[tuple[RolloutBatch, Tensor]] = []
        loss, args = policy_loss_of(config.algorithm.loss.function), config.algorithm.loss.args
        settings = {name: args[name] for name in loss.settings}
        self.token_loss = partial(locate(f"{KEY}.function", loss.path), **settings)
        # Fields of the batch, or computed here.
        self.loss_tensors = loss.tensors
        # Whose divergence is a part of the loss.
        self.teacher: TeacherWorker | None = None

    def connect(self, roles: dict[str, Worker]) -> None:
        """Store the other roles, and the teacher if the loss has its divergence."""
        super().connect(roles)
        teacher = roles.get("teacher")
        if isinstance(teacher, TeacherWorker) and not teacher.config.is_sampled:
            self.teacher = teacher

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """Compute log-probs of the response tokens: ragged float32, nats, on CPU.

        Uses the micro-batches of the first epoch of `update`, and their order of rows, so that
        the policy ratio there is exactly 1.
        """
        return self.over_first_epoch(batch, self.log_probs)

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_token_stats(self, batch: RankBatch) -> Ragged:
        """Compute log-probs and entropies of the response tokens: ragged complex64, on CPU.

        The real part is the log-prob, the imaginary part the entropy of the token's distribution;
        nats. Otherwise as `compute_log_probs`.
        """

        def compute(micro: RolloutBatch) -> Tensor:
            output = self.forward(micro, Entropy.report)
            assert output.entropy is not None
            return torch.complex(output.log_probs, output.entropy)

        return self.over_first_epoch(batch, compute)

    def log_probs(self, micro: RolloutBatch) -> Tensor:
        """Compute log-probs of the response tokens, [R] float32, nats, on the device."""
        return self.forward(micro, Entropy.omit).log_probs

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch, step: int, kl_coef: float) -> dict[str, float]:
        """Take one optimizer step per mini-batch of `batch`; return metrics over all ranks.

        `batch` has the fields that the loss takes and, unless `kl_coef`, the weight of the KL
        penalty in the loss, is 0, ref_log_probs. `step`, counted from 1, sets the learning rate.
        """
        self.kl_coef, self.routing, self.compared = kl_coef, RoutingTotals(), []
        with self.training(self.policy_loss, step) as training:
            for index, mini in enumerate(batch.policy_mini_batches()):
                training.take_step(*mini)
                self.routing.compares = False
                # Not reported for reference answers, nor by the loss of some subclasses.
                if index == 0 and "log_ratio_max" in training.maxima:
                    largest = training.maxima["log_ratio_max"]
                    largest = training.maxima.pop("exact_log_ratio_max", largest)
                    training.maxima["first_log_ratio_max"] = largest
        if self.teacher is not None:
            self.teacher.free_heads()
        metrics = {f"actor/{name}": value for name, value in training.report().items()}
        routing = self.routing.report(whole_sequences=self.sequence_group is None)
        return metrics | {f"router/{name}": value for name, value in routing.items()}

    @on_all_ranks(Dispatch.BROADCAST)
    def first_difference(self) -> str | None:
        """Describe the first token of the last update whose log-prob is not vLLM's; None: none.

        Only with rollout.exact, of the first mini-batch and tokens of the present weights.
        """
        for micro, log_probs in self.compared:
            sampled = micro.old_log_probs
            own = sampled.like(log_probs.cpu())
            unequal = sampled.like(micro.current.values & (own.values != sampled.values))
            row = next((n for n, tokens in enumerate(unequal.rows()) if tokens.any()), None)
            if row is not None:
                place = int(unequal.rows()[row].nonzero()[0])
                uneven = uneven_product(self.model, self.device) or "no linear layer by itself"
                return (
                    f"token {place} of {int(sampled.lengths[row])} after a prompt of "
                    f"{int(micro.prompts.lengths[row])}, from engine {int(micro.engine[row])}, has "
                    f"{float(sampled.rows()[row][place]):.9g} in vLLM and "
                    f"{float(own.rows()[row][place]):.9g} in the trainer. On this GPU {uneven} "
                    f"depends on the batch"
                )
        return None

    @on_all_ranks(Dispatch.RANK_ZERO)
    def expert_shares(self) -> list[list[float]]:
        """Return the share of each expert in its layer's choices, by layer, of the last update."""
        assert self.routing.shares is not None, "no update, or no experts"
        return self.routing.shares.tolist()

    def policy_loss(self, micro: RolloutBatch, totals: Totals) -> tuple[Tensor, LossStats]:
        """Compute the loss: a sum over a micro-batch's tokens, divided by `totals`.

        The totals, tokens of the policy loss and episodes with such tokens, are of the mini-batch
        over all ranks, not of this micro-batch. So the gradient does not depend on the distribution
        of responses over ranks and micro-batches.
        """
        use = Entropy.differentiate if self.config.entropy_coef else Entropy.report
        teacher = self.teacher
        log_probs, entropy, routing, _, divergence = self.forward(
            micro, use, None if teacher is None else teacher.target(micro)
        )
        assert entropy is not None
        mask = self.on_device(micro.counted)
        sequence_id = to_device(micro.responses.row_ids(), self.device)
        computed = {"log_probs": log_probs, "response_mask": mask, "sequence_id": sequence_id}
        bonus = entropy_bonus(entropy, mask, coef=self.config.entropy_coef)
        terms, sums = [bonus.values], bonus.sums
        if divergence is None or "advantages" in micro.added:  # given answers have none
            loss = self.reward_loss(micro, computed)
            terms.append(loss.values)
            sums = loss.sums | sums
        if teacher is not None and divergence is not None:
            distillation = divergence_loss(divergence, mask, coef=teacher.config.coef)
            terms.append(distillation.values)
            sums |= distillation.sums
        if self.kl_coef:
            ref_log_probs = self.on_device(micro.ref_log_probs)
            penalty = kl_penalty(
                log_probs,
                ref_log_probs,
                mask,
                coef=self.kl_coef,
                estimator=self.config.algorithm.kl.estimator,
            )
            terms.append(penalty.values)
            sums |= penalty.sums
        scalar = aggregate(
            self.config.algorithm.aggregation,
            torch.stack(terms).sum(0),
            mask,
            sequence_id,
            totals,
            self.config.max_response_tokens,
            to_device(micro.episode_tokens, self.device),
        )
        if routing is not None:
            self.routing.add(routing)
            if self.config.router_balance_coef:
                scalar = scalar + self.balance_loss(routing, micro, totals)
        maxima = {}
        if "old_log_probs" in micro.added:  # reference answers have none
            old = self.on_device(micro.old_log_probs)
            maxima = ratio_maxima(log_probs, old, mask)
            if "current" in micro.added and self.routing.compares:
                sampled = ratio_maxima(log_probs, old, self.on_device(micro.current))
                maxima["exact_log_ratio_max"] = sampled["log_ratio_max"]
                self.compared.append((micro, log_probs.detach()))
        return scalar, LossStats({REPORTED.get(k, k): v for k, v in sums.items()}, maxima)

    def reward_loss(self, micro: RolloutBatch, computed: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the policy loss of algorithm.loss, token by token.

        `computed` are its tensors that are no fields of the batch. Without a factor of the
        advantages, beside a teacher, only its metrics are kept.
        """
        inputs = {
            name: computed[name] if name in computed else self.on_device(getattr(micro, name))
            for name in self.loss_tensors
        }
        log_probs, function = computed["log_probs"], self.config.algorithm.loss.function
        loss = as_token_loss(self.token_loss(**inputs), function, log_probs)
        if self.teacher is not None and not self.teacher.config.reward_coef:
            return TokenLoss(torch.zeros_like(log_probs), loss.sums)
        if "loss_weights" in micro.added:
            return TokenLoss(loss.values * self.on_device(micro.loss_weights), loss.sums)
        return loss

    def balance_loss(self, routing: Routing, micro: RolloutBatch, totals: Totals) -> Tensor:
        """Compute the weighted load-balancing loss: a mean over episodes.

        An episode's responses share its weight by their counted tokens. Those without such a
        token, which the total leaves out, do not count.
        """
        shares = micro.counted.counts() / micro.episode_tokens.clamp(min=1)
        losses = routing.balance * to_device(shares, self.device)
        return self.config.router_balance_coef * losses.sum() / totals.episodes

    def forward(
        self, micro: RolloutBatch, entropy: Entropy, target: Target | None = None
    ) -> ResponseLogProbs:
        """Compute log-probs, and optionally entropy, of the response tokens, on the device.

        `target` computes one more number of each token, from the states before the head.
        """
        packed = self.pack(micro, States.predicting, micro.routed_experts)
        return self.model(packed, self.config.temperature, entropy, target)

    @on_all_ranks(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> str | None:
        """Write the policy to `folder` as an ordinary HF model, with tokenizer and configuration.

        Weights are float32, with adapters merged; the adapters are also saved in peft's format.
        The folder gets its final name when complete. Returns an error message of the disk, or None.
        """
        self.begin()
        model, lora = self.config.model, self.config.lora
        weights, adapters = GatheredWeights(self.model), adapter_state_dict(self.model)
        files = None if lora is None else AdapterFiles(adapters, lora, name_or_folder(model))
        return write_gathered(weights, model_folder(model), folder, adapter=files)
