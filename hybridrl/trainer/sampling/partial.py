"""Partial rollouts: a step's sampling ends by a budget of tokens; what is unfinished goes on.

    admit       new prompts, until rollout.max_in_flight are in flight
    sample      all unfinished responses, until the budget is spent; with the weights of this step;
                with an environment in several calls, between which it answers
    train       the oldest prompts_per_step prompts whose responses are all finished
    keep        the others, with the log-prob and the weights' version of each token

The budget is what prompts_per_step prompts need in the mean, so that as much is sampled as trained.
Which responses are cut follows from seeds and lengths alone. No token is dropped or sampled again;
each is trained at most rollout.max_versions updates after it was sampled.

Source: Kimi Team 2025, "partial rollouts", https://arxiv.org/abs/2501.12599
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hybridrl.data.batch import CallStats, RolloutBatch
from hybridrl.data.requests import SamplingParams, total_stats
from hybridrl.trainer.episodes.base import Episodes, Grown, Until
from hybridrl.trainer.episodes.responses import Group, unfinished
from hybridrl.trainer.sampling.source import Metrics, Sampled, Source, SourceParts

# Least tokens of a further round, as a share of the mean length: few rounds, little too much.
MIN_SHARE = 0.25


@dataclass
class Step:
    """A step's sampling so far.

    Attributes:
        number: of the step.
        continued: tokens of each response that earlier steps have begun.
        calls: of the engines.
        rounds: of calls, with a budget each.
        begun: samples of a prompt that the step has taken before.
    """

    number: int
    continued: list[int]
    calls: list[CallStats] = field(default_factory=list)
    rounds: int = 0
    begun: int = 0


class GroupsInFlight(Source):
    """Source of groups whose responses may take several steps."""

    def __init__(self, parts: SourceParts) -> None:
        rollout = parts.config.rollout
        self._rollout = rollout
        self._per_step = parts.config.data.prompts_per_step
        self._next_prompts = parts.next_prompts
        self._engine = parts.generation.engine
        self._lengths = parts.generation.lengths
        self._num_engines = parts.rollout.num_shards
        self._episodes: Episodes = parts.generation.generate.episodes
        self._params = SamplingParams(rollout.temperature, rollout.top_p)
        self._groups: tuple[Group, ...] = ()  # in flight, oldest first
        self._step: Step | None = None

    def take(self, step: int, count: int) -> Sampled:
        """Take the oldest `count` finished groups out of flight, once there are as many."""
        if self._step is None:
            begun = [self._groups[g].responses[k] for g, k in unfinished(self._groups)]
            self._step = Step(step, [*map(len, begun)])
        version = self._engine.weight_version
        groups = [*self._groups, *self._admitted(self._step, version, taken=self._per_step - count)]
        # More may be due where a run is resumed with a lower rollout.max_versions.
        needed = min(count, due(groups, version, self._rollout.max_versions, self._per_step))
        grown = self._until_finished(groups, count, needed, self._step)
        groups = grown.groups
        finished = [index for index, group in enumerate(groups) if group.is_finished][:count]
        assert set(finished).issuperset(range(needed)), "an old response was not finished"
        self._groups = tuple(group for i, group in enumerate(groups) if i not in {*finished})
        chosen = [groups[index] for index in finished]
        batch = replace(
            self._episodes.batch(chosen),
            engines=total_stats(grown.calls),
            environment_s=grown.environment_s,
        )
        if not self._episodes.counts_tokens:
            episodes = batch.by_episode()
            ids = [chosen[index].prompt.prompt_id for index in episodes.group_id.tolist()]
            self._lengths.learn(ids, episodes.responses.lengths.tolist(), in_parts=True)
        return Sampled(batch, [chosen[index].prompt for index in batch.group_id.tolist()])

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return metrics of the tokens sampled and trained."""
        taken = self._ended_step()
        metrics = self._metrics(taken, batch)
        if self._episodes.counts_tokens:
            sampled = sum(engine.tokens for call in taken.calls for engine in call)
            trained = float((self._lag(batch) == 0).sum())
            metrics["partial/trained_fraction"] = trained / max(sampled, 1)
        return metrics

    def state(self) -> tuple[Group, ...]:
        """Return the groups in flight, oldest first."""
        return self._groups

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore the groups in flight of a checkpoint; there may be fewer engines now."""
        count = self._num_engines
        self._groups = tuple(replace(group, engine=group.engine % count) for group in groups)

    def _ended_step(self) -> Step:
        """Return what the step has taken, and forget it."""
        taken, self._step = self._step, None
        assert taken is not None, "a step takes groups first"
        return taken

    def _metrics(self, taken: Step, batch: RolloutBatch) -> Metrics:
        """Compute metrics of a step's sampling, of which `batch` is trained."""
        lag, tokens = self._lag(batch), float(sum(taken.continued))
        counted = {"partial/continued_tokens": tokens} if self._episodes.counts_tokens else {}
        return (
            counted
            | self._in_flight_metrics(taken.calls)
            | {
                "partial/continued_responses": float(len(taken.continued)),
                "partial/version_lag_mean": float(lag.float().mean()) if len(lag) else 0.0,
                "partial/version_lag_max": float(lag.max()) if len(lag) else 0.0,
                "partial/rounds": float(taken.rounds),
            }
        )

    def _lag(self, batch: RolloutBatch) -> Tensor:
        """Return the updates since each trained token was sampled."""
        versions = batch.versions.values[batch.response_mask.values]
        return self._engine.weight_version - versions

    def _in_flight_metrics(self, calls: Sequence[CallStats]) -> Metrics:
        """Count the responses in flight, and tokens of `calls` over keys of earlier weights."""
        total = sum(len(group.responses) for group in self._groups)
        count = len(unfinished(self._groups))
        engines = [engine for call in calls for engine in call]
        tokens = max(1, sum(engine.tokens for engine in engines))
        old = sum(engine.old_kv_tokens for engine in engines)
        old_kv = {"partial/old_kv_fraction": old / tokens} if self._rollout.keep_kv else {}
        return old_kv | {
            "partial/in_flight": float(count),
            "partial/waiting": float(total - count),
            "partial/length_mean": self._lengths.mean or 0.0,
        }

    def _admitted(self, step: Step, version: int, taken: int = 0) -> list[Group]:
        """Take new prompts; each goes to the engine with the fewest unfinished responses.

        `taken` prompts, which the step has taken out already, count as in flight until its end.
        """
        most, each = self._rollout.max_in_flight, self._rollout.responses_per_prompt
        assert most is not None, "derived"
        load = [0] * self._num_engines
        for g, _ in unfinished(self._groups):
            load[self._groups[g].engine] += 1
        # `most` may be lower than before a resume.
        prompts = self._next_prompts(max(0, most - taken - len(self._groups)))
        opened = self._episodes.open(prompts)
        admitted, begun = [], Counter[int]()  # samples of each prompt, which seeds must tell apart
        for prompt, response in zip(prompts, opened, strict=True):
            engine = load.index(min(load))
            load[engine] += each
            first, responses = step.begun + begun[prompt.prompt_id], (response,) * each
            admitted.append(Group(prompt, step.number, version, engine, responses, first))
            begun[prompt.prompt_id] += each
        step.begun += max(begun.values(), default=0)
        return admitted

    def _until_finished(
        self, groups: Sequence[Group], count: int, needed: int, step: Step
    ) -> Grown:
        """Sample until `count` groups are finished, the oldest `needed` among them."""
        calls, seconds, least = list[CallStats](), 0.0, 0.0
        while True:
            budget = self._budget(groups, lacks(groups, count), least)
            grown = self._episodes.grow(groups, Until(needed, count, budget), self._params)
            assert grown.versions <= {self._engine.weight_version}, "stale weights"
            self._learn(groups, grown.groups)
            groups, least = grown.groups, MIN_SHARE
            calls += grown.calls
            seconds += grown.environment_s
            step.rounds += bool(grown.calls)
            if not lacks(groups, count) and not lacks(groups[:needed], needed):
                step.calls += calls
                return replace(grown, calls=calls, environment_s=seconds)

    def _learn(self, before: Sequence[Group], after: Sequence[Group]) -> None:
        """Note the lengths of responses that have been finished."""
        if self._episodes.counts_tokens:
            ended = sorted({*unfinished(before)} - {*unfinished(after)})
            ids = [after[g].prompt.prompt_id for g, _ in ended]
            lengths = [len(after[g].responses[k]) for g, k in ended]
            self._lengths.learn(ids, lengths, in_parts=True)

    def _budget(
        self, groups: Sequence[Group], missing: float, least: float = 0.0, length: float = 0.0
    ) -> int:
        """Return the tokens that `missing` more prompts need in the mean.

        They are at least the share `least` of a mean length for each unfinished response. The mean
        is that of the responses that training has sampled so far, and at least `length`.
        """
        mean = self._lengths.mean or self._rollout.max_response_tokens / 2
        each = self._rollout.responses_per_prompt
        responses = max(missing * each, least * len(unfinished(groups)))
        return math.ceil(responses * max(mean, length))


def lacks(groups: Sequence[Group], wanted: int) -> int:
    """Return how many of the wanted finished groups are missing."""
    return max(0, wanted - sum(group.is_finished for group in groups))


def due(groups: Sequence[Group], version: int, max_versions: int, per_step: int) -> int:
    """Return how many of the oldest groups must be trained in the step with weights `version`.

    Then `per_step` groups in each later step are enough that no token is older than `max_versions`
    updates when it is trained. The result is at most per_step while at most
    (max_versions + 1) * per_step groups are in flight.

    Args:
        groups: oldest first.
    """
    needed = [
        index + 1 - per_step * (group.version + max_versions - version)
        for index, group in enumerate(groups)
    ]
    return max(0, *needed) if needed else 0
