"""What training.py computes: the model's shape, lengths, a batch, the actor's config."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.shapes import TINY
from hybridrl.config.algorithm_schema import (
    AlgorithmConfig,
    KLConfig,
    LossConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
)
from hybridrl.config.choices import (
    Accumulation,
    Aggregation,
    CorrectionLevel,
    CorrectionMethod,
    DType,
    Init,
    KLEstimator,
    KLPlacement,
    Layout,
    LRSchedule,
    Offload,
)
from hybridrl.config.schema import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged

# Smaller still, so that CPUs are done in a minute.
SMALL = TINY | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Attributes:
        sequences: per rank and optimizer step.
        length: mean tokens of a sequence, prompt included.
        prompt: tokens of each prompt.
        max_tokens: budget of a micro-batch.
        chunk_tokens: actor.log_prob_chunk_tokens.
        sigma: standard deviation of log(length) where lengths are log-normal.
    """

    sequences: int
    length: int
    prompt: int
    max_tokens: int
    chunk_tokens: int
    sigma: float


def draw_lengths(name: str, ranks: int, size: Size) -> torch.Tensor:
    """Tokens of each sequence; both kinds have the same sum."""
    num, total = ranks * size.sequences, ranks * size.sequences * size.length
    if name == "equal":
        return torch.full((num,), size.length)
    draws = torch.randn(num, generator=torch.Generator().manual_seed(0)).mul(size.sigma).exp()
    lengths = (draws / draws.sum() * total).long()
    lengths = lengths.clamp(size.prompt + 1, size.max_tokens)
    lengths[lengths.argmin()] += total - lengths.sum()
    return lengths


def random_batch(lengths: torch.Tensor, prompt: int, vocab: int) -> RolloutBatch:
    """Random tokens with made-up advantages, all of them sampled by the policy."""
    generator = torch.Generator().manual_seed(0)

    def tokens(rows: torch.Tensor) -> Ragged:
        return Ragged(torch.randint(0, vocab, (int(rows.sum()),), generator=generator), rows)

    responses = tokens(lengths - prompt)
    num = len(responses.values)
    return RolloutBatch(
        prompts=tokens(torch.full_like(lengths, prompt)),
        responses=responses,
        response_mask=responses.like(torch.ones(num, dtype=torch.bool)),
        rollout_log_probs=responses.like(torch.zeros(num)),
        group_id=torch.arange(len(lengths)),
        weight_version=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        advantages=responses.like(torch.randn(num, generator=generator)),
    )


def fsdp_config(arguments: argparse.Namespace, *, compiled: bool) -> FSDPConfig:
    """The sharding spec that the command line asks for."""
    return FSDPConfig(
        dp_shard=arguments.ranks,
        dp_replicate=1,
        reshard_after_forward=not arguments.keep_gathered,
        param_dtype=DType.float32 if arguments.small else DType.bfloat16,
        reduce_dtype=DType.float32,
        activation_checkpointing=arguments.checkpointing,
        accumulation=Accumulation(arguments.accumulation),
        layout=Layout.plain,
        tensor_parallel_size=1,
        columns=None,
        ulysses_size=1,
        offload=Offload.none,
        compile=compiled,
    )


def algorithm_config() -> AlgorithmConfig:
    """GRPO without a KL penalty."""
    return AlgorithmConfig(
        advantage="grpo",
        gamma=1.0,
        lam=1.0,
        pass_k=4,
        whiten_advantages=False,
        loss=LossConfig(function="ppo_clip", args={"clip_low": 0.2, "clip_high": 0.2}),
        aggregation=Aggregation.token_mean,
        rollout_correction=RolloutCorrectionConfig(
            method=CorrectionMethod.none, level=CorrectionLevel.token, low=0.5, high=2.0
        ),
        overlong=OverlongConfig(buffer_tokens=0, penalty=1.0, train_on_truncated=True),
        max_sampling_rounds=1,
        kl=KLConfig(
            placement=KLPlacement.reward,
            estimator=KLEstimator.k1,
            coef=0.0,
            target=None,
            horizon=1000,
        ),
    )


def actor_config(folder: Path, fsdp: FSDPConfig, size: Size, ranks: int) -> ActorConfig:
    """An actor with random weights, of the shape that folder/config.json describes."""
    return ActorConfig(
        worker="hybridrl.workers.actor.ActorWorker",
        model=ModelConfig(path=str(folder), init=Init.random, seed=0),
        fsdp=fsdp,
        algorithm=algorithm_config(),
        lora=None,
        total_steps=100,
        temperature=1.0,
        mini_batch_size=ranks * size.sequences,
        epochs=1,
        max_tokens_per_gpu=size.max_tokens,
        max_response_tokens=size.max_tokens - size.prompt,
        entropy_coef=0.0,
        log_prob_chunk_tokens=size.chunk_tokens,
        optim=OptimConfig(
            lr=1.0e-6,
            betas=[0.9, 0.999],
            eps=1.0e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            schedule=LRSchedule.constant,
            warmup_steps=0,
            min_lr_ratio=0.0,
        ),
    )
