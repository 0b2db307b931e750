"""Split: some ranks sample for later steps while the others train.

    trainers   | step n: forward, update -> weights n | send | step n + 1 ...
    engines    | sample with weights n - 1, until the budget is spent | swap | sample with weights n

A step trains the oldest prompts_per_step prompts whose responses are all finished. Before its
update the engines begin a call, which continues all unfinished responses, up to a budget of tokens
that is fixed then. With an environment, several calls share it. Weights arrive in a shadow copy
meanwhile, and are swapped in afterwards. So it follows from seeds and lengths alone which weights
sample a token, and which step trains it.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, repeat

from hybridrl.data.batch import CallStats, RolloutBatch
from hybridrl.data.requests import Requests, total_stats
from hybridrl.distributed.background import MAY_BLOCK, run_in_background
from hybridrl.trainer.episodes.base import Grown, Until
from hybridrl.trainer.episodes.responses import Group
from hybridrl.trainer.episodes.turns import TurnEpisodes
from hybridrl.trainer.sampling.hybrid_engine import SplitEngine
from hybridrl.trainer.sampling.partial import GroupsInFlight, Step, due
from hybridrl.trainer.sampling.source import Metrics, SourceParts
from hybridrl.trainer.timing.engines import engine_metrics

# Finished prompts beyond those of the next step to which calls lead, as a share of a step's: so
# that few steps wait for their last response.
SPARE = 0.5
# Share of the distance to that number which a call makes up for. The rest of its budget is what a
# step trains in the mean, so that calls take equally long.
GAIN = 0.5


class GroupsAhead(GroupsInFlight):
    """Source of groups most of which were sampled beside the training of earlier steps.

    With rollout.max_versions=0 nothing is sampled ahead.
    """

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        assert isinstance(self._engine, SplitEngine), "engines have ranks of their own"
        assert isinstance(self._episodes, TurnEpisodes), "calls of the engines sample turns"
        self._split_engine, self._turn_episodes = self._engine, self._episodes
        self._begin_call = parts.rollout.begin
        self._trains_policy = parts.trains_policy
        self._section = parts.section
        # Groups in flight before the sampling beside the training, and after it.
        self._ahead: tuple[Sequence[Group], Future[Grown]] | None = None
        # Of the step: calls before its training, and seconds in which they waited.
        self._calls: list[CallStats] = []
        self._environment_s = 0.0

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Begin to sample for the next step; return metrics of what this one took."""
        taken = self._ended_step()
        metrics = self._metrics(taken, batch)
        self._calls, self._environment_s = taken.calls, batch.environment_s
        if self._rollout.max_versions:
            length = float(batch.responses.lengths.float().mean())
            self._ahead = self._begin(taken, length)
        return metrics

    def after_update(self, step: int) -> Metrics:
        """Send the weights, wait for the engines, swap; return metrics."""
        if self._ahead is None:
            return {}
        with self._section("swap"):
            before, ahead = self._ahead
            self._ahead = None
            sent = self._split_engine.send() if self._trains_policy(step) else None
            grown = ahead.result()
            metrics = self._split_engine.swap(sent)
        self._learn(before, grown.groups)
        self._groups = tuple(grown.groups)
        stats = total_stats([*self._calls, *grown.calls])
        seconds = max((engine.seconds for engine in stats), default=0.0)
        metrics |= engine_metrics(stats, seconds) if seconds else {}
        if grown.environment_s:
            metrics["environment/seconds"] = self._environment_s + grown.environment_s
        sampled = float(sum(engine.tokens for engine in stats))
        return metrics | self._in_flight_metrics([stats]) | {"split/sampled_tokens": sampled}

    def _begin(self, step: Step, length: float) -> tuple[Sequence[Group], Future[Grown]]:
        """Begin to sample what the next step trains, and some more, in a thread.

        `length` is the mean of this step's responses: lengths may grow during training.
        """
        wanted, version = self._per_step, self._engine.weight_version
        groups = [*self._groups, *self._admitted(step, version)]
        # The next step trains after this step's update.
        needed = due(groups, version + 1, self._rollout.max_versions, wanted)
        finished = sum(group.is_finished for group in groups)
        missing = (1 - GAIN) * wanted + GAIN * ((1 + SPARE) * wanted - finished)
        budget = self._budget(groups, max(missing, 0.0), length=length)
        # The first call also begins to receive the weights that arrive.
        arriving = chain([version + 1 if self._trains_policy(step.number) else None], repeat(None))

        def generate(requests: Requests) -> RolloutBatch:
            batch: RolloutBatch = self._begin_call("generate_ahead", requests, next(arriving))()
            assert (batch.weight_version == version).all(), "stale weights"
            return batch

        grow, until = (
            replace(self._turn_episodes, generate=generate).grow,
            Until(needed, wanted, budget),
        )
        return groups, run_in_background(grow, groups, until, self._params, name=MAY_BLOCK)
