"""Generation with the actor's current weights: reshard, then sample."""

import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.models.resolve import resolve_model
from hybridrl.reshard.engine import Destination, Resharder
from hybridrl.rollout.engine import EnginePart, RolloutEngine
from hybridrl.rollout.sampling import stop_token_ids
from hybridrl.rollout.vllm_engine import VLLMEngine
from hybridrl.workers.base import Worker
from hybridrl.workers.dispatch import Dispatch, on_all_ranks


class RolloutWorker(Worker):
    """One rank's part of a rollout engine, and of moving the actor's weights into it.

    `tensor_parallel_size` consecutive ranks form one engine and answer one shard of the prompts.
    The engine sleeps between rollouts: `reshard` wakes it, `sleep` gives its memory to training.
    """

    config_class = RolloutConfig
    config: RolloutConfig

    def __init__(self, config: RolloutConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.engine = self.build_engine()
        self.weight_version: int | None = None

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Ranks of one engine."""
        return config.tensor_parallel_size

    def build_engine(self) -> RolloutEngine:
        """The engine, asleep and with weights that mean nothing yet."""
        folder = resolve_model(self.config.model.path)
        return VLLMEngine(self.config, folder, stop_token_ids(folder), self.mesh.device_type)

    def connect(self, roles: dict[str, Any]) -> None:
        """Plan how the actor's shards reach this engine."""
        self.actor = roles["actor"]
        self.others = [role for role in roles.values() if role is not self]
        shards = self.actor.named_shards()
        trace = self.engine.trace([(shard.name, shard.shape) for shard in shards])
        dtype = getattr(torch, self.config.dtype.value)
        destination = Destination(trace, self.engine.tensors(), self.engine.load, dtype)
        self.resharder = Resharder(
            shards, destination, self.mesh, bucket_mb=self.config.reshard_bucket_mb
        )

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, version: int) -> dict[str, float]:
        """Give the engine the actor's current weights under a version number, and wake it.

        Returns:
            On this rank: seconds in all (`total_s`), of moving (`move_s`) and of comparing
            fingerprints (`verify_s`), and the bytes received from other ranks.

        Raises:
            ReshardError: on all ranks, if a parameter did not arrive as it was sent.
        """
        start = time.perf_counter()
        self.weight_version = None
        self.actor.begin()
        self.engine.wake(EnginePart.WEIGHTS)
        self.engine.check()
        metrics = self.resharder.move()
        if self.config.verify_reshard:
            metrics |= self.resharder.verify(version)
        for role in self.others:
            role.rest()
        self.engine.wake(EnginePart.KV_CACHE)
        self.weight_version = version
        return metrics | {"total_s": time.perf_counter() - start}

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, prompts: PromptBatch) -> RolloutBatch:
        """Sample responses to this engine's prompts.

        Returns:
            Responses with what vLLM reported of them, those of each prompt together. All ranks
            of an engine return the same.

        Raises:
            RuntimeError: there was no reshard yet, or the engine sleeps.
        """
        if self.weight_version is None:
            raise RuntimeError("generate before reshard: the rollout weights mean nothing yet")
        generated = self.engine.generate(prompts)
        each = [i for i in range(len(prompts)) for _ in range(prompts.responses_per_prompt)]
        responses = generated.responses
        return RolloutBatch(
            prompts=prompts.prompts.select(each),
            responses=responses,
            response_mask=Ragged(torch.ones_like(responses.values).bool(), responses.lengths),
            rollout_log_probs=generated.log_probs,
            group_id=prompts.prompt_id[each],
            weight_version=torch.full((len(each),), self.weight_version),
            truncated=generated.truncated,
        )

    @on_all_ranks(Dispatch.BROADCAST)
    def sleep(self) -> None:
        """Let training have the engine's memory; the weights are gone until the next reshard."""
        self.weight_version = None
        self.engine.sleep()
