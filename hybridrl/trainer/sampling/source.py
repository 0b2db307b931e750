"""Sources of a step's finished groups: the seam between sampling and training.

    sync       below         all responses are sampled within their step
    partial    partial.py    responses may take several steps
    split      split.py      other ranks sample for later steps meanwhile

Dynamic sampling (dynamic.py) is a source around any of them. `factory.open_source` has their table.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from hybridrl.config.estimators import estimator_of
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.requests import SamplingParams
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.base import Generator, Wanted
from hybridrl.trainer.episodes.responses import Group
from hybridrl.trainer.rewarding import Rewarded, RewardSource
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine

Metrics = dict[str, float]


@dataclass(frozen=True)
class Sampled:
    """Responses of a step.

    Attributes:
        batch: responses to train on, those of each prompt together.
        prompts: [B] the prompt of each response.
        rewarded: their rewards, if sampling needed them.
        greedy: one greedy response to each prompt, if the advantage estimator needs them.
    """

    batch: RolloutBatch
    prompts: list[Prompt]
    rewarded: Rewarded | None = None
    metrics: Metrics = field(default_factory=dict)
    greedy: RolloutBatch | None = None


class Source(Protocol):
    """Source of finished groups, which are all responses to a prompt each."""

    @abstractmethod
    def take(self, step: int, count: int) -> Sampled:
        """Return `count` finished groups, while vLLM is awake; dynamic sampling takes repeatedly.

        It takes the number of a step's groups first, then as many as it replaces.
        """

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return metrics of all that the step took, of which it trains on `batch`."""
        return {}

    def after_update(self, step: int) -> Metrics:
        """Give the new weights to engines that have sampled meanwhile; return metrics."""
        return {}

    def state(self) -> tuple[Group, ...]:
        """Return the groups in flight, oldest first, for a checkpoint."""
        return ()

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore the groups in flight of a checkpoint."""
        assert not groups, "a resume drops them without such a schedule"


@dataclass(frozen=True)
class Generation:
    """Generation with the actor's weights; engines are balanced by the source or known lengths."""

    generate: Generator
    engine: HybridEngine
    lengths: ResponseLengths

    def __call__(self, wanted: Wanted) -> RolloutBatch:
        """Generate responses to the prompts."""
        wanted = wanted if wanted.expected_tokens else wanted.balanced(self.lengths)
        batch = self.generate(wanted)
        assert (batch.weight_version == self.engine.weight_version).all(), "stale weights"
        self.lengths.learn(batch.group_id.tolist(), batch.responses.lengths.tolist())
        return batch


@dataclass(frozen=True)
class SourceParts:
    """Parts of a run that sources are made of.

    Attributes:
        next_prompts: takes the next n training prompts.
        generation: of whole responses.
        rollout: the engines.
        trains_policy: true for steps that train the policy.
        section: times what is done in it as a phase of the step.
    """

    config: RunConfig
    next_prompts: Callable[[int], list[Prompt]]
    generation: Generation
    rewards: RewardSource
    rollout: WorkerGroup
    trains_policy: Callable[[int], bool]
    section: Callable[[str], AbstractContextManager[object]]


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
        params = SamplingParams(rollout.temperature, rollout.top_p)
        wanted = Wanted(prompts, step, params, each, self._samples, returns_recorded=True)
        self._samples += each
        batch = self._generation(wanted)
        episodes = batch.episode_index.tolist()
        return Sampled(batch, [prompts[episode // each] for episode in episodes])

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return no metrics."""
        self._samples = 0
        return {}


class StepSource:
    """A step's responses: groups of `source`, with what the algorithm wants of them.

    It sets the loss mask, which whitening, selected tokens and the loss share.
    """

    def __init__(self, source: Source, parts: SourceParts) -> None:
        self._source = source
        self._config = parts.config
        self._generation = parts.generation

    def take(self, step: int) -> Sampled:
        """Return responses to data.prompts_per_step prompts, while vLLM is awake."""
        algorithm, each = self._config.algorithm, self._config.rollout.responses_per_prompt
        sampled = self._source.take(step, self._config.data.prompts_per_step)
        if not algorithm.overlong.train_on_truncated:
            # Overlong filtering: Yu et al. 2025 (DAPO), section 3.4.
            sampled = without_loss(sampled, sampled.batch.truncated)
        if estimator_of(algorithm.advantage).needs_greedy_responses:
            wanted = Wanted(sampled.prompts[::each], step, SamplingParams(temperature=0.0))
            sampled = replace(sampled, greedy=self._generation(wanted))
        metrics = self._source.begin_update(step, sampled.batch)
        return replace(sampled, metrics=sampled.metrics | metrics)

    def after_update(self, step: int) -> Metrics:
        """Give the new weights to engines that have sampled meanwhile; return metrics."""
        return self._source.after_update(step)

    def state(self) -> tuple[Group, ...]:
        """Return the groups in flight, oldest first, for a checkpoint."""
        return self._source.state()

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore the groups in flight of a checkpoint."""
        self._source.restore(groups)


def without_loss(sampled: Sampled, rows: Tensor) -> Sampled:
    """Exclude responses, `rows` [B] bool, from the policy loss, too."""
    batch = sampled.batch
    mask = batch.counted.values & ~batch.responses.spread(rows)
    return replace(sampled, batch=batch.adding(loss_mask=batch.responses.like(mask)))
