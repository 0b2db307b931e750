"""Generation of whole responses with the actor's weights, partitioned over the engines."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.base import Generator
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine


@dataclass(frozen=True)
class Generation:
    """Generation of responses with the actor's weights; engines are balanced by known lengths."""

    generate: Generator
    engine: HybridEngine
    lengths: ResponseLengths

    def __call__(self, prompts: PromptBatch) -> RolloutBatch:
        """Generate responses to the prompts."""
        batch = self.generate(self.lengths.expect(prompts))
        assert (batch.weight_version == self.engine.weight_version).all(), "stale weights"
        self.lengths.learn(batch.group_id.tolist(), batch.responses.lengths.tolist())
        return batch


def request_of(
    prompts: Sequence[Prompt],
    step: int,
    *,
    temperature: float,
    top_p: float,
    top_k: int | None = None,
    samples: int = 1,
    first_sample: int = 0,
) -> PromptBatch:
    """Build a request for `samples` responses to each prompt.

    Seeds derive from `first_sample`, the number of samples of each prompt that exist already.
    """
    return PromptBatch(
        prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts], torch.int32),
        prompt_id=torch.tensor([prompt.prompt_id for prompt in prompts]),
        step=step,
        responses_per_prompt=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        first_sample=torch.full((len(prompts),), first_sample),
    )
