"""The driver's view of the roles: one WorkerGroup per role, calls dealt as the methods say."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.config.checks.sizes import slots_on_nodes
from hybridrl.config.estimators import uses_critic
from hybridrl.config.schema import FSDPConfig, RunConfig, SaverConfig
from hybridrl.controller.background import import_in_background
from hybridrl.controller.calls import RoleCall, TimedResult
from hybridrl.controller.host import import_class
from hybridrl.controller.pool import Pool
from hybridrl.controller.spawning import PoolConfig
from hybridrl.data.shardable import Shardable
from hybridrl.workers.dispatch import Dispatch, dispatch_of

# vLLM first: it measures its memory on an empty GPU.
BUILD_ORDER = ("rollout", "actor", "critic", "ref", "reward_model")
# Keeps the state of the roles built before it.
SAVER = "hybridrl.workers.saver.SaverWorker"
SHARDED = (Dispatch.SHARD_DP, Dispatch.SHARD_DP_REDUCED)


class WorkerGroup:
    """One role on all ranks of a pool.

    Args:
        pool: the processes that host it.
        role: its name there.
        config: its config; `config.worker` is the dotted path of its class.
    """

    def __init__(self, pool: Pool, role: str, config: Any) -> None:
        self.role = role
        self.pool = pool
        self.worker_class = import_class(config.worker)
        self.ranks_per_shard = self.worker_class.ranks_per_shard(config)

    @property
    def num_ranks(self) -> int:
        """Processes that host the role."""
        return self.pool.size

    @property
    def num_shards(self) -> int:
        """Parts that a SHARD_DP argument is cut into."""
        return self.pool.size // self.ranks_per_shard

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a marked method on all ranks and return what its `Dispatch` promises.

        Raises:
            AttributeError: the method is not marked with `@on_all_ranks`.
            WorkerError: a rank raised or died, or no rank got further for cluster.stall_timeout_s.
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
    """A marked method of a role and its arguments, without the batch that is dealt."""

    group: WorkerGroup
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dispatch(self) -> Dispatch:
        """How the method is marked."""
        return dispatch_of(self.group.worker_class, self.method)

    def on_rank(self, rank: int) -> RoleCall:
        """What a rank is told."""
        keep = self.dispatch is Dispatch.BROADCAST or rank in self.answering()
        return RoleCall(self.group.role, self.method, self.args, dict(self.kwargs), keep)

    def answering(self) -> list[int]:
        """The ranks whose results count: of each shard the first, of equal results rank 0's."""
        if self.dispatch is Dispatch.SHARD_DP:
            return list(range(0, self.group.num_ranks, self.group.ranks_per_shard))
        return [0]


def call_together(calls: Mapping[str, Call], whole: Shardable) -> dict[str, TimedResult]:
    """Run methods of several roles and wait for what they return; see `begin_together`."""
    return begin_together(calls, whole)()


def begin_together(
    calls: Mapping[str, Call], whole: Shardable
) -> Callable[[], dict[str, TimedResult]]:
    """Run methods of several roles, one after the other in every process, on one batch.

    Args:
        calls: by any name; marked SHARD_DP or SHARD_DP_REDUCED, of roles that live in one pool
            and cut batches into equally many shards.
        whole: the methods' first argument. What earlier calls have sent of it is not sent again.

    Returns:
        What waits for the results: for each call what its `Dispatch` promises, and when the slowest
        rank was at work. Until it has been called the pool takes no other calls. It may raise a
        WorkerError, as in `WorkerGroup.call`, whose message names the method.

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
    """Each call's result, put together over the ranks."""
    outcomes = {}
    for (name, call), ranks in zip(calls.items(), zip(*per_rank, strict=True), strict=True):
        values = [ranks[rank].value for rank in call.answering()]
        value = whole.join(values) if call.dispatch is Dispatch.SHARD_DP else values[0]
        outcomes[name] = TimedResult(value, max((o.span for o in ranks), key=lambda s: s.seconds))
    return outcomes


def build_roles(pool: Pool, configs: Mapping[str, Any]) -> dict[str, WorkerGroup]:
    """Build roles in a pool's processes, in the order given, and connect all that are there.

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
    with pool.start_times.part(role):
        pool.run("build", building, f"start: {role}")
    return WorkerGroup(pool, role, config)


def _build_run(
    pool: Pool, configs: Mapping[str, Any], fsdp: FSDPConfig, imported: Future[None]
) -> dict[str, WorkerGroup]:
    """Build the roles of a run: the rollout engine tells how the others are to be sharded.

    Args:
        pool: where.
        configs: of the roles.
        fsdp: the sharding spec as configured.
        imported: done when the roles' modules are; awaited once the rollout engine stands.
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
    """All roles of a run and the pool they live in. A context manager that closes the pool.

    `critic` is None when the advantage estimator takes no values, `ref` when no KL penalty needs a
    reference, `reward_model` when the run has none.
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
        config: says where.
        configs: of the roles, by name; rollout, which is built first, and actor are among them.
        run_dir: for the processes' logs.

    Returns:
        The pool, which the caller closes, and each role's group.
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
    # Calls look at the roles' classes, whose imports would hold up the processes.
    imported = import_in_background(modules)
    with ExitStack() as undo:
        pool = Pool(pool_config)
        undo.callback(pool.close)
        groups = _build_run(pool, configs, config.fsdp, imported)
        undo.pop_all()
    return pool, groups
