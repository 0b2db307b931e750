"""Sync: each step samples all of its responses, from their first to their last token."""

from dataclasses import replace

from hybridrl.data.batch import RolloutBatch
from hybridrl.trainer.sampling.generation import request_of
from hybridrl.trainer.sampling.source import Metrics, Sampled, Source, SourceParts


class WholeGroups(Source):
    """Source of groups that are sampled within their step; none is in flight between steps."""

    def __init__(self, parts: SourceParts) -> None:
        self._rollout = parts.config.rollout
        self._next_prompts = parts.next_prompts
        self._generation = parts.generation
        self._samples = 0  # of a prompt that the step has taken before

    def take(self, step: int, count: int) -> Sampled:
        """Sample responses to `count` prompts; a prompt that returns within a step gets others."""
        rollout, each = self._rollout, self._rollout.responses_per_prompt
        prompts = self._next_prompts(count)
        request = request_of(
            prompts,
            step,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            samples=each,
            first_sample=self._samples,
        )
        self._samples += each
        batch = self._generation(replace(request, returns_experts=True))
        episodes = range(len(batch)) if batch.episode is None else batch.episode.tolist()
        return Sampled(batch, [prompts[episode // each] for episode in episodes])

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return no metrics."""
        self._samples = 0
        return {}
