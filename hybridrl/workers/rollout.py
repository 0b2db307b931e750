"""Generation with the actor's current weights: reshard, then sample."""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import FSDPConfig, RolloutConfig
from hybridrl.data.batch import EngineStats, PromptBatch, Rollout, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.columns import choose_columns
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.process_memory import trim_heap
from hybridrl.distributed.regions import Trace
from hybridrl.distributed.weights import checkpoint_shapes
from hybridrl.models.resolve import model_folder
from hybridrl.reshard.executor import Destination
from hybridrl.reshard.resharder import Resharder
from hybridrl.rollout.engine import EnginePart, Generated, RolloutEngine
from hybridrl.rollout.sampling import stop_token_ids
from hybridrl.rollout.vllm_compat import MODULES
from hybridrl.rollout.vllm_engine import VLLMEngine, prepare
from hybridrl.workers.base import Worker
from hybridrl.workers.dispatch import Dispatch, on_all_ranks

logger = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """One rank's part of a rollout engine, and of moving the actor's weights into it.

    `tensor_parallel_size` consecutive ranks form one engine and answer one shard of the prompts.
    Between rollouts `sleep` gives training the memory that rollout.sleep names; `reshard` takes it
    back, and so does `generate` where the weights have stayed.
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

    @classmethod
    def modules_ahead(cls, config: Any, device_type: str) -> Sequence[str]:
        """vLLM."""
        prepare(config, device_type)
        return MODULES[device_type]

    def build_engine(self) -> RolloutEngine:
        """The engine, with weights that mean nothing yet."""
        folder = model_folder(self.config.model)
        return VLLMEngine(self.config, folder, stop_token_ids(folder), self.mesh.device_type)

    @cached_property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model's checkpoint by name, adapters left out."""
        return checkpoint_shapes(self.config.model)

    @cached_property
    def trace(self) -> Trace:
        """What the engine's loader does with the checkpoint's tensors on this rank."""
        return self.engine.trace(list(self.sources.items()))

    @on_all_ranks(Dispatch.RANK_ZERO)
    def columns(self, fsdp: FSDPConfig) -> list[str]:
        """Names of the weights that actor, critic and ref are to cut by columns.

        Args:
            fsdp: their sharding spec; a list given there by hand stands.
        """
        if fsdp.columns is not None:
            return fsdp.columns
        traces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(traces, self.trace)
        engine = traces[: self.config.tensor_parallel_size]
        dtype = getattr(torch, self.config.dtype.value)
        choice = choose_columns(fsdp, self.sources, engine, dtype.itemsize)
        if dist.get_rank() == 0:
            for note in choice.notes:
                logger.warning("%s", note)
        return choice.columns

    def connect(self, roles: dict[str, Any]) -> None:
        """Plan how the actor's shards reach this engine."""
        self.actor = roles["actor"]
        self.others = [role for role in roles.values() if role is not self]
        shards = self.actor.named_shards()
        assert self.sources.items() <= {shard.name: shard.shape for shard in shards}.items()
        dtype = getattr(torch, self.config.dtype.value)
        destination = Destination(self.trace, self.engine.tensors(), self.engine.load, dtype)
        self.resharder = Resharder(
            shards, destination, self.mesh, bucket_mb=self.config.reshard_bucket_mb
        )

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, version: int) -> dict[str, float]:
        """Give the engine the actor's current weights under a version number, and wake it.

        Returns:
            On this rank: seconds in all (`total_s`) and by parts, in their order: `onload_s` of
            the actor, `wake_weights_s`, `prepare_s` of finding the shards, `wait_s` for the ranks
            that it exchanges with, `move_s`, `verify_s` of comparing fingerprints, `offload_s` of
            the other roles, `wake_kv_s` and `reset_prefix_cache_s`; and the bytes received from
            other ranks and written into the engine's parameters. Frozen weights that the engine
            still holds are not moved again.

        Raises:
            ReshardError: on all ranks, if a parameter did not arrive as it was sent.
        """
        timer = PartTimer(device_of(self.mesh))
        self.weight_version = None
        with timer.part("onload_s"):
            self.actor.begin()
        with timer.part("wake_weights_s"):
            self.engine.wake(EnginePart.WEIGHTS)
        self.engine.check()
        metrics = self.resharder.sync(
            version, verify=self.config.verify_reshard, kept=self.engine.keeps_weights
        )
        with timer.part("offload_s"):
            self._others_rest()
        with timer.part("wake_kv_s"):
            self.engine.wake(EnginePart.KV_CACHE)
        with timer.part("reset_prefix_cache_s"):
            self.engine.reset_prefix_cache()
        self.weight_version = version
        return timer.seconds | metrics | {"total_s": timer.total()}

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, prompts: PromptBatch) -> Rollout:
        """Sample responses to this engine's prompts.

        Returns:
            Responses with what vLLM reported of them, those of each prompt together, and how long
            this engine took. All ranks of an engine return the same responses.

        Raises:
            RuntimeError: there was no reshard yet, or the weights were discarded since.
        """
        if self.weight_version is None:
            raise RuntimeError("generate before reshard: the rollout weights mean nothing yet")
        self._others_rest()
        self.engine.wake(EnginePart.KV_CACHE)
        generated = self.engine.generate(prompts)
        stats = EngineStats(
            tokens=len(generated.responses.values),
            seconds=generated.seconds,
            first_token_s=generated.first_token_s,
        )
        return Rollout(self._batch(prompts, generated), (stats,))

    @on_all_ranks(Dispatch.BROADCAST)
    def sleep(self) -> int | None:
        """Let training have the memory that rollout.sleep names, and the machine what is free.

        Returns:
            The version of the weights that stay; None if they are gone until the next reshard.
        """
        self.engine.sleep()
        trim_heap()
        if EnginePart.WEIGHTS not in self.engine.awake:
            self.weight_version = None
        return self.weight_version

    def _others_rest(self) -> None:
        """What fsdp.offload lets leave the device makes room; nothing where it has left."""
        for role in self.others:
            role.rest()

    def _batch(self, prompts: PromptBatch, generated: Generated) -> RolloutBatch:
        assert self.weight_version is not None
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
