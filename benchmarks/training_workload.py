"""What training.py computes: the model's shape, lengths, a batch, the run's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.configs import composed
from benchmarks.shapes import TINY
from hybridrl.config.schema import ActorConfig, RunConfig
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
        max_tokens: budget of a micro-batch, for each rank that shares it.
        chunk_tokens: actor.log_prob_chunk_tokens.
        sigma: standard deviation of log(length) where lengths are log-normal.
        ulysses: ranks that share a micro-batch.
    """

    sequences: int
    length: int
    prompt: int
    max_tokens: int
    chunk_tokens: int
    sigma: float
    ulysses: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there may be: a micro-batch of its own."""
        return self.max_tokens * self.ulysses


def draw_lengths(name: str, ranks: int, size: Size) -> torch.Tensor:
    """Tokens of each sequence; both kinds have the same sum.

    Raises:
        ValueError: the lengths do not fit between a prompt's and a micro-batch's.
    """
    num, total = ranks * size.sequences, ranks * size.sequences * size.length
    equal = torch.full((num,), size.length)
    lengths = equal if name == "equal" else _log_normal(num, total, size)
    if lengths.max() > size.longest or lengths.min() <= size.prompt:
        raise ValueError(
            f"{name} lengths of {size.length} tokens on average do not fit between prompts of "
            f"{size.prompt} and micro-batches of {size.longest}: raise --max-tokens or --ulysses, "
            "lower --sigma, or measure --lengths equal alone"
        )
    return lengths


def _log_normal(num: int, total: int, size: Size) -> torch.Tensor:
    """So many lengths with this sum; those that a micro-batch cannot hold are cut to it."""
    draws = torch.randn(num, generator=torch.Generator().manual_seed(0)).mul(size.sigma).exp()
    lengths = (draws / draws.sum() * total).long()
    lengths = lengths.clamp(size.prompt + 1, size.longest)
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


def actor_config(
    folder: Path, size: Size, ranks: int, fsdp: Mapping[str, object], *, on_gpu: bool
) -> ActorConfig:
    """The actor of `run_config`."""
    return run_config(folder, size, ranks, fsdp, on_gpu=on_gpu).actor


def run_config(
    folder: Path, size: Size, ranks: int, fsdp: Mapping[str, object], *, on_gpu: bool
) -> RunConfig:
    """GRPO without a KL penalty, so that the actor alone trains; random weights on all ranks.

    Its engine sleeps while the actor is at work, and its lengths are at most a micro-batch's, so
    that the planner predicts what the actor alone takes.

    Args:
        folder: of the config.json with the model's shape.
        size: how much is computed.
        ranks: over which the weights are split.
        fsdp: keys of conf/fsdp and their values, but for what `size` says.
        on_gpu: in bfloat16 on GPUs, else in float32 on CPUs.
    """
    values: dict[str, object] = {
        "hardware": "gpu" if on_gpu else "cpu",
        "cluster.gpus_per_node": ranks,
        "model.path": folder,
        "model.init": "random",
        "algorithm": "grpo",
        "algorithm.kl.coef": 0.0,
        "algorithm.rollout_correction.method": "none",
        "rollout.sleep": "all",
        "rollout.max_prompt_tokens": size.prompt,
        "rollout.max_response_tokens": size.longest - size.prompt,
        "actor.mini_batch_size": ranks * size.sequences,
        "actor.max_tokens_per_gpu": size.max_tokens,
        "actor.log_prob_chunk_tokens": size.chunk_tokens,
        "actor.optim.lr": 1.0e-6,
        "fsdp.layout": "plain",
        "fsdp.ulysses_size": size.ulysses,
    }
    values |= {f"fsdp.{key}": value for key, value in fsdp.items()}
    return composed(values)
