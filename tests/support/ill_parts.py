"""Workers, losses and rewards with one fault each, for test_health_slow.py."""

import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridrl.data.ragged import Ragged
from hybridrl.rewards import gsm8k
from hybridrl.rollout.engine import EnginePart
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.rollout import RolloutWorker
from hybridrl.workers.teacher import TeacherWorker


def keeping(batch, keep):
    """The batch with the tokens `keep` [N] of its responses only."""
    lengths = batch.responses.like(keep).counts()
    fields = ("responses", "response_mask", "rollout_log_probs")
    return replace(batch, **{n: Ragged(getattr(batch, n).values[keep], lengths) for n in fields})


def is_last(batch):
    """[N] bool, the last token of each response."""
    last = torch.zeros(len(batch.responses.values), dtype=torch.bool)
    last[batch.responses.lengths.cumsum(0) - 1] = True
    return last


class WithoutEndTokens(RolloutWorker):
    """Cuts the end tokens off."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests):
        batch = super().generate(requests)
        is_long = batch.responses.spread(batch.responses.lengths > 1)
        return keeping(batch, ~(is_last(batch) & is_long))


class SameSeeds(RolloutWorker):
    """All samples of a prompt are the first one."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests):
        batch, each = super().generate(requests), requests.each
        return batch.select([row - row % each for row in range(len(batch))])


class HalfTheSeeds(RolloutWorker):
    """Half the samples of a prompt are the first one, the others the last one."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests):
        batch, each = super().generate(requests), requests.each
        first = [row - row % each for row in range(len(batch))]
        return batch.select(
            [a if k % each < each / 2 else a + each - 1 for k, a in enumerate(first)]
        )


class OtherLogProbs(RolloutWorker):
    """vLLM's log-probs are off by 0.08 nats."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests):
        batch = super().generate(requests)
        shifted = batch.responses.like(batch.rollout_log_probs.values - 0.08)
        return replace(batch, rollout_log_probs=shifted)


class OldWeights(RolloutWorker):
    """Copies the actor's weights only once."""

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, version):
        if version == 0:
            self.metrics = super().reshard(version)
        for part in EnginePart:
            self.engine.wake(part)
        self.weight_version = version
        return self.metrics


class FlippedInShadow(RolloutWorker):
    """One bit of the second weights that arrive beside sampling flips."""

    def connect(self, roles):
        super().connect(roles)
        resharder, verify = self.shadow._resharder, self.shadow._resharder.verify

        def flipped(version):
            if version == 2:
                next(iter(resharder._parameters.values())).view(torch.uint8).flatten()[0] ^= 1
            verify(version)

        resharder.verify = flipped


class SlowOnRank1(RolloutWorker):
    """The second engine takes five times as long."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests):
        batch = super().generate(requests)
        if dist.get_rank() == 1:
            (stats,) = batch.engines
            time.sleep(4 * stats.seconds)
            batch = replace(batch, engines=(replace(stats, seconds=5 * stats.seconds),))
        return batch


class FrozenActor(ActorWorker):
    """Undoes its updates."""

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch, step, kl_coef):
        before = [weight.detach().clone() for weight in self.model.parameters()]
        metrics = super().update(batch, step, kl_coef)
        copy_weights(before, self.model.parameters())
        return metrics


class NoisyActor(ActorWorker):
    """Its updates end with noise on the weights."""

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch, step, kl_coef):
        metrics = super().update(batch, step, kl_coef)
        noisy = [w.detach() + 0.1 * torch.randn_like(w) for w in self.model.parameters()]
        copy_weights(noisy, self.model.parameters())
        return metrics


class FollowingReference(ReferenceWorker):
    """The reference is the actor of the moment."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch):
        (actor,) = [other for other in self.others if isinstance(other, ActorWorker)]
        copy_weights(actor.model.parameters(), self.model.parameters())
        return super().compute_log_probs(batch)


class OtherReference(ReferenceWorker):
    """The reference is another model."""

    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        copy_weights([w.detach() * 1.5 for w in self.model.parameters()], self.model.parameters())


class FlatTeacher(TeacherWorker):
    """Finds unlikely tokens likelier than the policy does; they are more often wrong ones."""

    def __init__(self, config, mesh):
        super().__init__(replace(config, temperature=config.temperature * 4), mesh)


def copy_weights(sources, targets):
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


class SometimesNaN(ActorWorker):
    """Every other loss is NaN."""

    calls = 0

    def policy_loss(self, micro, totals):
        loss, stats = super().policy_loss(micro, totals)
        self.calls += 1
        return (loss * math.nan if self.calls % 2 else loss), stats


class CriticSometimesNaN(CriticWorker):
    """Every other loss is NaN."""

    calls = 0

    def value_loss(self, micro, totals):
        loss, stats = super().value_loss(micro, totals)
        self.calls += 1
        return (loss * math.nan if self.calls % 2 else loss), stats


class WildCritic(CriticWorker):
    """Values are noise."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_values(self, batch):
        values = super().compute_values(batch)
        return values.like(values.values + 10 * torch.randn(len(values.values)))


def unlikely(log_probs, old_log_probs, advantages, response_mask):
    """Loss that makes every sample less likely."""
    return log_probs * response_mask


def constant(prompt, response, example):
    return 1.0


def zero(prompt, response, example):
    return 0.0


def of_prompt(prompt, response, example):
    return float(len(prompt) % 2)


def in_tags(prompt, response, example):
    return float(response.startswith("<answer>"))


def reversed_(prompt, response, example):
    return 1.0 - gsm8k.score(prompt, response, example, mode="strict")


def scaled(prompt, response, example):
    return 1e4 * gsm8k.score(prompt, response, example, mode="strict")


def raising(prompt, response, example):
    if len(response) % 2:
        raise ValueError("odd")
    return 1.0


def hanging(prompt, response, example):
    if len(response) % 16 == 0:
        time.sleep(3600)
    return float(len(response) % 2)


def slow(prompt, response, example):
    time.sleep(1.0)
    return float(len(response) % 2)
