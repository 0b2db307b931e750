"""The driver's view of the roles: one WorkerGroup per role, calls dealt as the methods say."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from hybridrl.config.schema import FSDPConfig, RunConfig
from hybridrl.controller.host import import_class
from hybridrl.controller.pool import Pool, PoolConfig
from hybridrl.workers.dispatch import Dispatch, Shardable, dispatch_of

# vLLM first: it measures its memory on an empty GPU.
BUILD_ORDER = ("rollout", "actor", "critic", "ref")


class WorkerGroup:
    """One role on all ranks of a pool.

    Args:
        pool: the processes that host it.
        role: its name there.
        config: its config; `config.worker` is the dotted path of its class.
    """

    def __init__(self, pool: Pool, role: str, config: Any) -> None:
        self.role = role
        self._pool = pool
        self._worker_class = import_class(config.worker)
        self._ranks_per_shard = self._worker_class.ranks_per_shard(config)

    @property
    def num_ranks(self) -> int:
        """Processes that host the role."""
        return self._pool.size

    @property
    def num_shards(self) -> int:
        """Parts that a SHARD_DP argument is cut into."""
        return self._pool.size // self._ranks_per_shard

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a marked method on all ranks and return what its `Dispatch` promises.

        Raises:
            AttributeError: the method is not marked with `@on_all_ranks`.
            WorkerError: a rank raised, died, or took longer than cluster.call_timeout_s.
        """
        dispatch = dispatch_of(self._worker_class, method)
        phase = f"{self.role}.{method}"
        if dispatch is Dispatch.SHARD_DP:
            whole, *others = args
            results = self._deal(method, whole, others, kwargs, phase, self._leaders())
            return whole.join([results[rank] for rank in sorted(self._leaders())])
        if dispatch is Dispatch.SHARD_DP_REDUCED:
            whole, *others = args
            return self._deal(method, whole, others, kwargs, phase, {0})[0]
        keep = {0} if dispatch is Dispatch.RANK_ZERO else set(range(self.num_ranks))
        same = ray.put((args, kwargs))
        results = self._run(method, [same] * self.num_ranks, keep, phase)
        return results[0] if dispatch is Dispatch.RANK_ZERO else results

    def _leaders(self) -> set[int]:
        """The first rank of each shard, whose result counts."""
        return set(range(0, self.num_ranks, self._ranks_per_shard))

    def _deal(
        self,
        method: str,
        whole: Shardable,
        others: list[Any],
        kwargs: dict[str, Any],
        phase: str,
        keep: set[int],
    ) -> list[Any]:
        parts = whole.shard(self.num_shards)
        assert len(parts) == self.num_shards, (len(parts), self.num_shards)
        stored = [ray.put(((part, *others), kwargs)) for part in parts]
        per_rank = [stored[rank // self._ranks_per_shard] for rank in range(self.num_ranks)]
        return self._run(method, per_rank, keep, phase)

    def _run(
        self, method: str, arguments: list[ray.ObjectRef], keep: set[int], phase: str
    ) -> list[Any]:
        calls = [(self.role, method, own, rank in keep) for rank, own in enumerate(arguments)]
        return self._pool.run("call", calls, phase)


def build_roles(pool: Pool, configs: Mapping[str, Any]) -> dict[str, WorkerGroup]:
    """Build roles in a pool's processes, in the order given, and connect them.

    Args:
        pool: where.
        configs: role -> its config, an instance of its worker's `config_class`.

    Returns:
        role -> its group.
    """
    groups = {role: build_role(pool, role, config) for role, config in configs.items()}
    pool.connect()
    return groups


def build_role(pool: Pool, role: str, config: Any) -> WorkerGroup:
    """Build one role in a pool's processes; it must still be connected to the others."""
    building = [(role, config.worker, config)] * pool.size
    pool.run("build", building, f"start: {role}")
    return WorkerGroup(pool, role, config)


def _build_run(pool: Pool, configs: Mapping[str, Any], fsdp: FSDPConfig) -> dict[str, WorkerGroup]:
    """Build the roles of a run: the rollout engine tells how the others are to be sharded."""
    groups = {"rollout": build_role(pool, "rollout", configs["rollout"])}
    spec = replace(fsdp, columns=groups["rollout"].call("columns", fsdp))
    for role, config in configs.items():
        if role not in groups:
            groups[role] = build_role(pool, role, replace(config, fsdp=spec))
    pool.connect()
    return groups


@dataclass(frozen=True)
class Workers:
    """All roles of a run and the pool they live in. A context manager that closes the pool.

    `ref` is None when no KL penalty needs a reference.
    """

    pool: Pool
    actor: WorkerGroup
    critic: WorkerGroup
    rollout: WorkerGroup
    ref: WorkerGroup | None

    def close(self) -> None:
        """End all worker processes; see `Pool.close`."""
        self.pool.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_workers(config: RunConfig, run_dir: Path) -> Workers:
    """Start one process per GPU or CPU slot and build the run's roles in it.

    To be called inside `ray_runtime`; each process logs to <run_dir>/logs/<node>_rank<k>.log.

    Raises:
        ConfigError: the cluster lacks the slots, or a worker found what the user can fix.
        WorkerError: a process failed to start, to join or to build a role.
    """
    roles = [role for role in BUILD_ORDER if role != "ref" or config.algorithm.kl.coef != 0]
    configs = {role: getattr(config, role) for role in roles}
    rollout = import_class(config.rollout.worker)
    pool = Pool(
        PoolConfig(
            cluster=config.cluster,
            accelerator=config.hardware.accelerator,
            fsdp=config.fsdp,
            ranks_per_engine=rollout.ranks_per_shard(config.rollout),
            modules=[role.worker.rpartition(".")[0] for role in configs.values()],
            log_folder=run_dir / "logs",
        )
    )
    with ExitStack() as undo:
        undo.callback(pool.close)
        groups = _build_run(pool, configs, config.fsdp)
        undo.pop_all()
    return Workers(
        pool=pool,
        actor=groups["actor"],
        critic=groups["critic"],
        rollout=groups["rollout"],
        ref=groups.get("ref"),
    )
