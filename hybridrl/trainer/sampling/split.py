"""Split: some ranks sample for later steps while the others train.

    trainers   | step n: forward, update -> weights n | send | step n + 1 ...
    engines    | sample with weights n - 1, until the budget is spent | swap | sample with weights n

A step trains the oldest prompts_per_step prompts whose responses are all finished. Before its
update the engines begin a call: they continue all unfinished responses, up to a budget of tokens
that is fixed then; with an environment, several calls share it. Weights arrive in a shadow copy
meanwhile, and are swapped in afterwards. So it follows from seeds and lengths alone which weights
sample a token, and which step trains it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain, repeat
from typing import Any

from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.distributed.background import MAY_BLOCK, run_in_background
from hybridrl.trainer.sampling.base import CallStats, Sampled, total_stats
from hybridrl.trainer.sampling.hybrid_engine import SplitEngine
from hybridrl.trainer.sampling.in_flight import Group, due
from hybridrl.trainer.sampling.partial import PartialSampling
from hybridrl.trainer.timing.engines import engine_metrics

# Finished prompts beyond those of the next step to which calls lead, as a share of a step's: so
# that few steps wait for their last response.
SPARE = 0.5
# Share of the distance to that number which a call makes up for. The rest of its budget is what a
# step trains in the mean, so that calls take equally long.
GAIN = 0.5
# Begins a call of the engines, with the version of weights that arrive meanwhile.
BeginAhead = Callable[[Any, int | None], Callable[[], RolloutBatch]]


class SplitSampling(PartialSampling):
    """Sampling for the next step beside training. `begin_ahead` begins a call of the engines.

    `trains_policy` returns true if a step trains the policy. `parts` are those of
    `PartialSampling`.
    """

    _engine: SplitEngine

    def __init__(
        self, begin_ahead: BeginAhead, trains_policy: Callable[[int], bool], *parts: Any
    ) -> None:
        super().__init__(*parts)
        self._begin_ahead = begin_ahead
        self._trains_policy = trains_policy
        # Groups in flight after the sampling beside the training, and the calls for them.
        self._ahead: Future[tuple[list[Group], list[CallStats]]] | None = None
        self._environment_s = 0.0

    def sample(self, step: int) -> Sampled:
        """Return the step's responses, most of them sampled before; begin to sample for the next.

        With rollout.max_versions=0 nothing is sampled ahead.
        """
        sampled = super().sample(step)
        self._environment_s = sampled.batch.environment_s
        if self._config.rollout.max_versions:
            length = float(sampled.batch.responses.lengths.float().mean())
            self._ahead = self._begin(step, length)
        return sampled

    def finish_ahead(self, step: int) -> dict[str, float]:
        """After the update: send the weights, wait for the engines, swap; return metrics."""
        if self._ahead is None:
            return {}
        sent = self._engine.send() if self._trains_policy(step) else None
        groups, calls = self._ahead.result()
        self._ahead = None
        metrics = self._engine.swap(sent)
        self._state.in_flight = tuple(groups)
        stats = total_stats([*self._calls, *calls])
        seconds = max((engine.seconds for engine in stats), default=0.0)
        metrics |= engine_metrics(stats, seconds) if seconds else {}
        if waited := self._turns.take_seconds():
            metrics["environment/seconds"] = self._environment_s + waited
        sampled = float(sum(engine.tokens for engine in stats))
        in_flight = self.in_flight_metrics([stats])
        return metrics | in_flight | {"split/sampled_tokens": sampled}

    def _sample_step(self, step: int) -> Sampled:
        """Take finished groups; sample before only as far as they are missing."""
        sampled = super()._sample_step(step)
        del sampled.metrics["partial/trained_fraction"]  # most is trained in later steps
        return sampled

    def _begin(self, step: int, length: float) -> Future[tuple[list[Group], list[CallStats]]]:
        """Begin to sample what the next step trains, and some more, in a thread.

        `length` is the mean of this step's responses: lengths may grow during training.
        """
        wanted, version = self._config.data.prompts_per_step, self._engine.weight_version
        groups = [*self._state.in_flight, *self._admitted(step, version)]
        # The next step trains after this step's update.
        needed = due(groups, version + 1, self._config.rollout.max_versions, wanted)
        finished = sum(group.is_finished for group in groups)
        missing = (1 - GAIN) * wanted + GAIN * ((1 + SPARE) * wanted - finished)
        budget = self._budget(groups, max(missing, 0.0), length=length)
        # The first call also begins to receive the weights that arrive.
        arriving = chain([version + 1 if self._trains_policy(step) else None], repeat(None))

        def call(request: PromptBatch) -> RolloutBatch:
            return self._begin_ahead(request, next(arriving))()

        return run_in_background(
            self._sampled, groups, needed, budget, version, call, name=MAY_BLOCK
        )
