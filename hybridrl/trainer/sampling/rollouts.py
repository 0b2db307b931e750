"""Phases reshard and rollout: the actor's weights in vLLM, and the responses of a step."""

from dataclasses import dataclass

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.trainer.episodes.base import GenerateWhole
from hybridrl.trainer.record import Row
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine
from hybridrl.trainer.sampling.source import Sampled, StepSource
from hybridrl.trainer.timing.engines import rollout_metrics, straddling
from hybridrl.trainer.timing.phases import Phases


@dataclass(frozen=True)
class Rollouts:
    """Sampling of the responses that a step trains on; `generate` samples any others."""

    source: StepSource
    generate: GenerateWhole
    engine: HybridEngine
    rollout: WorkerGroup
    phases: Phases

    @property
    def weight_version(self) -> int:
        """Updates of the actor so far."""
        return self.engine.weight_version

    def reshard(self) -> Row:
        """Copy the actor's weights to vLLM, unless it holds them; return metrics."""
        if self.engine.is_current:
            return {}
        with self.phases.section("reshard"):
            return {**self.engine.reshard()}

    def take(self, step: int) -> tuple[Sampled, Row]:
        """Sample a step's responses, then put vLLM to sleep; return them and metrics."""
        with self.phases.section("rollout"):
            sampled = self.source.take(step)
            self.engine.sleep()
        seconds, switch_s = self.phases.seconds("rollout"), self.phases.switch_s
        metrics = sampled.metrics | rollout_metrics(sampled.batch, seconds, switch_s)
        return sampled, metrics | {"rollout/straddling_engines": straddling(self.rollout)}
