"""Worker groups: the driver's handle of a role, with calls dispatched to all ranks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.config.estimators import uses_critic
from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.config.schema import FSDPConfig, RunConfig, SaverConfig
from hybridrl.controller.background import import_in_background
from hybridrl.controller.calls import RoleCall, TimedResult
from hybridrl.controller.host import import_class
from hybridrl.controller.pool import Pool
from hybridrl.controller.spawning import PoolConfig
from hybridrl.data.shardable import Shardable
from hybridrl.workers.base import Dispatch, dispatch_of

# vLLM first: it measures free memory on an empty GPU.
BUILD_ORDER = ("rollout", "actor", "critic", "ref", "reward_model")
# Saves the state of the roles built before it.
SAVER = "hybridrl.workers.saver.SaverWorker"
SHARDED = (Dispatch.SHARD_DP, Dispatch.SHARD_DP_REDUCED)


class WorkerGroup:
    """One role on all ranks of a pool.

    Args:
        pool: processes that host the role.
        role: name of the role.
        config: config of the role; `config.worker` is the dotted path of its class.
    """

    def __init__(self, pool: Pool, role: str, config: Any) -> None:
        self.role = role
        self.pool = pool
        self.worker_class = import_class(config.worker)
        self.ranks_per_shard = self.worker_class.ranks_per_shard(config)

    @property
    def num_ranks(self) -> int:
        """Number of processes that host the role."""
        return self.pool.size

    @property
    def num_shards(self) -> int:
        """Number of parts of a SHARD_DP argument."""
        return self.pool.size // self.ranks_per_shard

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a marked method on all ranks; return as its `Dispatch` defines.

        Raises:
            AttributeError: the method is not marked with `@on_all_ranks`.
            WorkerError: a rank raised or died, or none made progress for cluster.stall_timeout_s.
        """
        dispatch = dispatch_of(self.worker_class, method)
        if dispatch in SHARDED:
            whole, *others = args
            call = Call(self, method, tuple(others), kwargs)
            return call_together({method: call}, whole)[method].value
        call = Call(self, method, args, kwargs)
        arguments = [([call.on_rank(rank)], None) for rank in range(self.num_ranks)]
        per_rank = self.pool.run("call", arguments, f"{self.role}.{method}")
        self.pool.spans.note([[outcome.span for outcome in ranks] for ranks in per_rank])
        values = [outcome.value for (outcome,) in per_rank]
        return values[0] if dispatch is Dispatch.RANK_ZERO else values


@dataclass(frozen=True)
class Call:
    """Call of a marked method of a role, without the sharded batch."""

    group: WorkerGroup
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dispatch(self) -> Dispatch:
        """Dispatch mode of the method."""
        return dispatch_of(self.group.worker_class, self.method)

    def on_rank(self, rank: int) -> RoleCall:
        """Return the message to a rank."""
        keep = self.dispatch is Dispatch.BROADCAST or rank in self.answering()
        return RoleCall(self.group.role, self.method, self.args, dict(self.kwargs), keep)

    def answering(self) -> list[int]:
        """Return the ranks whose results are used: the first of each shard, or rank 0."""
        if self.dispatch is Dispatch.SHARD_DP:
            return list(range(0, self.group.num_ranks, self.group.ranks_per_shard))
        return [0]


def call_together(calls: Mapping[str, Call], whole: Shardable) -> dict[str, TimedResult]:
    """Run methods of several roles and wait for their results; see `begin_together`."""
    return begin_together(calls, whole)()


def begin_together(
    calls: Mapping[str, Call], whole: Shardable
) -> Callable[[], dict[str, TimedResult]]:
    """Run methods of several roles, one after the other in every process, on one batch.

    Args:
        calls: calls by any name, marked SHARD_DP or SHARD_DP_REDUCED. Their roles are in one
            pool and have the same number of shards.
        whole: the first argument of the methods. Pieces already sent are not sent again.

    Returns:
        A function that waits: for each call the result that its `Dispatch` defines, and the span
        of the slowest rank. The pool accepts no other calls before it returns. It raises
        WorkerError as `WorkerGroup.call` does.

    Raises:
        AttributeError: a method is not marked with `@on_all_ranks`.
    """
    ((pool, num_shards),) = {(call.group.pool, call.group.num_shards) for call in calls.values()}
    assert all(call.dispatch in SHARDED for call in calls.values()), list(calls)
    stored = [[pool.store.reference(p) for p in part] for part in whole.pieces(num_shards)]
    assert len(stored) == num_shards, (len(stored), num_shards)
    arguments = [
        (
            [c.on_rank(rank) for c in calls.values()],
            whole.assemble,
            *stored[rank * num_shards // pool.size],
        )
        for rank in range(pool.size)
    ]
    phase = ", ".join(f"{call.group.role}.{call.method}" for call in calls.values())
    wait = pool.begin("call", arguments, phase)

    def results() -> dict[str, TimedResult]:
        per_rank = wait()
        pool.spans.note([[outcome.span for outcome in ranks] for ranks in per_rank])
        return _outcomes(calls, whole, per_rank)

    return results


def _outcomes(
    calls: Mapping[str, Call], whole: Shardable, per_rank: Sequence[Sequence[TimedResult]]
) -> dict[str, TimedResult]:
    """Join the results of each call over the ranks."""
    outcomes = {}
    for (name, call), ranks in zip(calls.items(), zip(*per_rank, strict=True), strict=True):
        values = [ranks[rank].value for rank in call.answering()]
        value = whole.join(values) if call.dispatch is Dispatch.SHARD_DP else values[0]
        outcomes[name] = TimedResult(value, max((o.span for o in ranks), key=lambda s: s.seconds))
    return outcomes


def build_roles(pool: Pool, configs: Mapping[str, Any]) -> dict[str, WorkerGroup]:
    """Build roles in a pool's processes, in the order given, and connect all roles of the pool.

    Args:
        pool: the processes.
        configs: config by role, an instance of its worker's `config_class`.

    Returns:
        Worker group by role.
    """
    groups = {role: build_role(pool, role, config) for role, config in configs.items()}
    pool.connect()
    return groups


def build_role(pool: Pool, role: str, config: Any) -> WorkerGroup:
    """Build one role in a pool's processes, without connecting it to the others."""
    building = [(role, config.worker, config)] * pool.size
    with pool.start_times.part(role):
        pool.run("build", building, f"start: {role}")
    return WorkerGroup(pool, role, config)


def _build_run(
    pool: Pool, configs: Mapping[str, Any], fsdp: FSDPConfig, imported: Future[None]
) -> dict[str, WorkerGroup]:
    """Build the roles of a run; the rollout engine determines the sharding of the others.

    Args:
        pool: the processes.
        configs: configs by role.
        fsdp: the sharding spec as configured.
        imported: import of the roles' modules; awaited after the rollout engine is built.
    """
    pool.read_ahead(configs["actor"].model)
    rollout = build_role(pool, "rollout", configs["rollout"])
    imported.result()
    spec = replace(fsdp, columns=rollout.call("columns", fsdp))
    others = {
        role: own if isinstance(own, SaverConfig) else replace(own, fsdp=spec)
        for role, own in configs.items()
        if role != "rollout"
    }
    return {"rollout": rollout, **build_roles(pool, others)}


@dataclass(frozen=True)
class Workers:
    """Worker groups of a run and their pool; a context manager that closes the pool.

    `critic` is None if the advantage estimator uses no values, `ref` without KL penalty,
    `reward_model` if the run has none.
    """

    pool: Pool
    actor: WorkerGroup
    critic: WorkerGroup | None
    rollout: WorkerGroup
    ref: WorkerGroup | None
    reward_model: WorkerGroup | None
    saver: WorkerGroup

    def close(self) -> None:
        """End all worker processes; see `Pool.close`."""
        self.pool.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_workers(config: RunConfig, run_dir: Path) -> Workers:
    """Start one process per GPU or CPU slot and build the run's roles in it.

    Call it inside `ray_runtime`. Each process logs to <run_dir>/logs/<node>_rank<k>.log.

    Raises:
        ConfigError: the cluster lacks slots, or a worker raised a ConfigError.
        WorkerError: a process failed to start, to join or to build a role.
    """
    idle = {
        *([] if uses_critic(config) else ["critic"]),
        *([] if config.algorithm.kl.coef != 0 else ["ref"]),
        *([] if config.reward_model is not None else ["reward_model"]),
    }
    configs = {role: getattr(config, role) for role in BUILD_ORDER if role not in idle}
    configs["saver"] = SaverConfig(worker=SAVER, prepares=config.checkpoint.every_steps > 0)
    pool, groups = start_roles(config, configs, run_dir)
    return Workers(
        pool=pool,
        actor=groups["actor"],
        critic=groups.get("critic"),
        rollout=groups["rollout"],
        ref=groups.get("ref"),
        reward_model=groups.get("reward_model"),
        saver=groups["saver"],
    )


def start_roles(
    config: RunConfig, configs: Mapping[str, Any], run_dir: Path
) -> tuple[Pool, dict[str, WorkerGroup]]:
    """Start one process per GPU or CPU slot and build roles in it; see `start_workers`.

    Args:
        config: config of the run.
        configs: configs by role; must include rollout, which is built first, and actor.
        run_dir: folder for logs.

    Returns:
        The pool, which the caller closes, and the worker group of each role.
    """
    rollout = import_class(config.rollout.worker)
    modules = [role.worker.rpartition(".")[0] for role in configs.values()]
    pool_config = PoolConfig(
        cluster=config.cluster,
        slots_on_nodes=slots_on_nodes(config),
        allow_straddle=config.placement.allow_straddle,
        accelerator=config.hardware.accelerator,
        fsdp=config.fsdp,
        ranks_per_engine=rollout.ranks_per_shard(config.rollout),
        modules=modules,
        ahead=[config.rollout],
        log_folder=run_dir / "logs",
    )
    # Calls need the roles' classes; importing them here would delay the processes.
    imported = import_in_background(modules)
    with ExitStack() as undo:
        pool = Pool(pool_config)
        undo.callback(pool.close)
        groups = _build_run(pool, configs, config.fsdp, imported)
        undo.pop_all()
    return pool, groups
