"""Generation with the actor's current weights: reshard, then sample."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import FSDPConfig, RolloutConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import DriverAddress, Requests, Served
from hybridrl.distributed.columns import choose_columns
from hybridrl.distributed.experts import parameter_shapes
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.process_memory import trim_heap
from hybridrl.models.resolve import model_folder
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import Route
from hybridrl.rollout.engine import Engine, EnginePart
from hybridrl.rollout.live import serve
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.vllm.compat import MODULES
from hybridrl.rollout.vllm.engine import VLLMEngine, prepare
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.shadow import ShadowCopy

logger = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """Worker with one rank's part of a rollout engine and of the reshard.

    `tensor_parallel_size` consecutive ranks form one engine and sample one shard of the prompts.
    Between rollouts, `sleep` releases the memory selected by rollout.sleep; `reshard`, or
    `generate` if the weights stayed, allocates it again.
    """

    config_class = RolloutConfig
    config: RolloutConfig

    def __init__(self, config: RolloutConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.engine = self.build_engine()
        self.sampler = Sampler(self.engine, config)
        self.weight_version: int | None = None
        self.shadow: ShadowCopy | None = None
        self.resharder: Resharder | None = None

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Return the number of ranks of one engine."""
        return config.tensor_parallel_size

    @classmethod
    def modules_ahead(cls, config: Any, device_type: str) -> Sequence[str]:
        """Return vLLM's slow modules, after setting its environment variables."""
        prepare(device_type, enforce_eager=config.enforce_eager, exact=config.exact)
        return MODULES[device_type]

    def build_engine(self) -> Engine:
        """Build the engine, with arbitrary weights."""
        folder = model_folder(self.config.model)
        return VLLMEngine(self.config, folder, stop_token_ids(folder), self.mesh.device_type)

    @on_all_ranks(Dispatch.RANK_ZERO)
    def columns(self, fsdp: FSDPConfig) -> list[str]:
        """Return the names of the weights that actor, critic and ref shard by columns.

        A list of the user, in their sharding spec `fsdp`, takes precedence.
        """
        if fsdp.columns is not None:
            return fsdp.columns
        traces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(traces, self.engine.trace)
        engine = traces[: self.config.tensor_parallel_size]
        dtype = getattr(torch, self.config.dtype.value)
        shapes = parameter_shapes(self.engine.sources)
        columns, notes = choose_columns(fsdp, shapes, engine, dtype.itemsize)
        if dist.get_rank() == 0:
            for note in notes:
                logger.warning("%s", note)
        return columns

    def connect(self, roles: dict[str, Any]) -> None:
        """Plan the reshard from the actor to this engine, or to a shadow copy without an actor."""
        super().connect(roles)
        if "actor" not in roles:
            self.shadow = ShadowCopy(self.engine.trace, self.engine.tensors(), self.config)
            return
        self.actor = roles["actor"]
        if not self.engine.sources:  # it takes no weights
            return
        shards = self.actor.named_shards()
        known = {shard.name: shard.shape for shard in shards}
        assert parameter_shapes(self.engine.sources).items() <= known.items()
        tensors, bucket_mb = self.engine.tensors(), self.config.reshard_bucket_mb
        route = Route.colocated(self.mesh)
        self.resharder = Resharder(shards, self.engine.trace, tensors, route, bucket_mb)

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, version: int) -> dict[str, float]:
        """Move the actor's current weights, number `version`, into the engine and wake it.

        Frozen weights that the engine still holds are not moved again.

        Returns:
            Metrics of this rank: seconds in total (`total_s`) and of each part: `onload_s` (actor),
            `wake_weights_s`, `prepare_s` (shards), `wait_s` (peers), `move_s`, `verify_s`
            (fingerprints), `offload_s` (other roles), `wake_kv_s`, `reset_prefix_cache_s`. Also
            bytes received from other ranks and bytes written into the engine's parameters.

        Raises:
            ReshardError: on all ranks, if the fingerprint of a parameter differs.
        """
        timer = PartTimer(device_of(self.mesh))
        self.weight_version = None
        with timer.part("onload_s"):
            self.actor.begin()
        with timer.part("wake_weights_s"):
            self.engine.wake(EnginePart.WEIGHTS)
        metrics: dict[str, float] = {}
        if self.resharder is not None:
            verify, kept = self.config.verify_reshard, self.engine.keeps_weights
            metrics = self.resharder.sync(version, verify=verify, kept=kept)
        with timer.part("offload_s"):
            self.others_rest()
        with timer.part("wake_kv_s"):
            self.engine.wake(EnginePart.KV_CACHE)
        with timer.part("reset_prefix_cache_s"):
            self.engine.sync()
        self.weight_version = version
        return timer.seconds | metrics | {"total_s": timer.total()}

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate(self, requests: Requests) -> RolloutBatch:
        """Sample the responses that this engine is asked for, with their log-probs.

        All ranks of an engine return the same responses.

        Raises:
            RuntimeError: no reshard yet, or the weights were discarded since.
        """
        with torch.random.fork_rng(devices=[]):  # vLLM draws from it beside its requests' seeds
            return self.sampler.generate(requests, self._ready())

    @on_all_ranks(Dispatch.BROADCAST)
    def serve(self, driver: DriverAddress) -> Served:
        """Sample the requests that the driver sends, until it ends the run.

        Raises:
            ConnectionError: the driver has closed the connection.
            RuntimeError: as `generate`.
        """
        return serve(self.engine, driver, self._ready())

    @on_all_ranks(Dispatch.SHARD_DP)
    def generate_ahead(self, requests: Requests, version: int | None) -> RolloutBatch:
        """Sample as `generate`, while weights `version` arrive for `swap`; None: none arrive."""
        assert self.shadow is not None, "the engine shares its ranks with the actor"
        if version is not None:
            self.shadow.begin(version)
        return self.generate(requests)

    @on_all_ranks(Dispatch.BROADCAST)
    def swap(self, version: int) -> dict[str, float]:
        """Swap weights `version` in, which arrive from other ranks, and reset the prefix cache.

        Without a change of the version, only the prefix cache is reset.

        Returns:
            Metrics of this rank: `wait_s` (until the weights were there), `pause_s` (copy on the
            device), and those of the sync under `sync.`, such as `sync.move_s`.

        Raises:
            ReshardError: on all ranks, if the fingerprint of a parameter differs.
        """
        assert self.shadow is not None, "the engine shares its ranks with the actor"
        metrics: dict[str, float] = {}
        if version != self.weight_version:
            self.weight_version = None
            self.engine.wake(EnginePart.WEIGHTS)
            metrics = self.shadow.swap(version)
        self.engine.sync()
        self.weight_version = version
        return metrics

    @on_all_ranks(Dispatch.BROADCAST)
    def sleep(self) -> int | None:
        """Release the memory selected by rollout.sleep, and free host memory.

        Returns the version of the weights if they stay; None if `generate` needs a reshard.
        """
        self.engine.sleep()
        trim_heap()
        if EnginePart.WEIGHTS not in self.engine.awake:
            self.weight_version = None
        return self.weight_version

    def _ready(self) -> int:
        """Offload other roles and wake the KV cache; return the version of the weights."""
        if self.weight_version is None:
            raise RuntimeError("generate before reshard: the engine has no valid weights")
        self.others_rest()
        self.engine.wake(EnginePart.KV_CACHE)
        return self.weight_version
