"""Worker groups: the driver's handle of a role, with calls dispatched to all ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.config.choices import SleepMode
from hybridrl.config.estimators import is_supervised, trains_reward_model, uses_critic
from hybridrl.config.planner.world import engine_ranks, slots_on_nodes
from hybridrl.config.policy_losses import uses_reference
from hybridrl.config.schema import (
    RoleConfig,
    RunConfig,
    SaverConfig,
    SenderConfig,
    ShardedConfig,
)
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.files import module_of
from hybridrl.controller.calls import RoleCall, TimedResult
from hybridrl.controller.placement import Host, warn_of_straddling
from hybridrl.controller.pool import Pool, PoolConfig
from hybridrl.data.shardable import Shardable
from hybridrl.distributed.background import import_in_background
from hybridrl.workers.base import Dispatch, dispatch_of

# vLLM first: it measures free memory on an empty GPU.
BUILD_ORDER = ("rollout", "actor", "critic", "ref", "reward_model", "teacher")
# Saves the state of the roles built before it.
# In the critic's place, of runs that train a reward model.
REWARD_TRAINER = "hybridrl.workers.reward_model.RewardTrainer"
SAVER = "hybridrl.workers.saver.SaverWorker"
# Sends the actor's weights to ranks that only sample.
SENDER = "hybridrl.workers.sender.SenderWorker"
SHARDED = (Dispatch.SHARD_DP, Dispatch.SHARD_DP_REDUCED)


class WorkerGroup:
    """One role on consecutive ranks of a pool, all by default; `config.worker` names its class."""

    def __init__(
        self, pool: Pool, role: str, config: RoleConfig, ranks: range | None = None
    ) -> None:
        self.role = role
        self.pool = pool
        self.ranks = range(pool.size) if ranks is None else ranks
        self.worker_class = locate(f"{role}.worker", config.worker)
        self.ranks_per_shard = self.worker_class.ranks_per_shard(config)

    @property
    def num_ranks(self) -> int:
        """Number of processes that host the role."""
        return len(self.ranks)

    @property
    def num_shards(self) -> int:
        """Number of parts of a SHARD_DP argument."""
        return len(self.ranks) // self.ranks_per_shard

    @property
    def hosts(self) -> list[Host]:
        """Processes that host the role."""
        return self.pool.hosts[self.ranks.start : self.ranks.stop]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a marked method on all ranks; return as its `Dispatch` defines.

        Raises:
            AttributeError: the method is not marked with `@on_all_ranks`.
            WorkerError: a rank raised or died, or none made progress for cluster.stall_timeout_s.
        """
        return self.begin(method, *args, **kwargs)()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Begin a `call`; return a function that waits for its result."""
        is_sharded = dispatch_of(self.worker_class, method) in SHARDED
        whole, others = (args[0], args[1:]) if is_sharded else (None, args)
        call = Call(self, method, others, kwargs)
        wait = begin_together({method: call}, whole)
        return lambda: wait()[method].value


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

    @property
    def name(self) -> str:
        """Name in messages: "actor.update"."""
        return f"{self.group.role}.{self.method}"

    def on_rank(self, rank: int) -> RoleCall:
        """Return the message to a rank."""
        return RoleCall(self.name, self.args, dict(self.kwargs), rank in self.answering())

    def answering(self) -> range:
        """Return the ranks whose results are used: all, the first of each shard, or rank 0."""
        if self.dispatch is Dispatch.BROADCAST:
            return range(self.group.num_ranks)
        if self.dispatch is Dispatch.SHARD_DP:
            return range(0, self.group.num_ranks, self.group.ranks_per_shard)
        return range(1)


def call_together(calls: Mapping[str, Call], whole: Shardable) -> dict[str, TimedResult]:
    """Run methods of several roles and wait for their results; see `begin_together`."""
    return begin_together(calls, whole)()


def begin_together(
    calls: Mapping[str, Call], whole: Shardable | None
) -> Callable[[], dict[str, TimedResult]]:
    """Run methods of several roles, one after the other in every process, on one batch.

    Args:
        calls: calls by any name, of roles on the same ranks with the same number of shards.
        whole: the first argument of the methods, which are marked SHARD_DP or SHARD_DP_REDUCED.
            Pieces already sent are not sent again. None: the methods have neither mark.

    Returns:
        A function that waits: for each call the result that its `Dispatch` defines, and the span
        of the slowest rank. It raises WorkerError as `WorkerGroup.call` does. Further calls of the
        same ranks run afterwards.

    Raises:
        AttributeError: a method is not marked with `@on_all_ranks`.
    """
    if not calls:
        return dict
    groups = [call.group for call in calls.values()]
    ((pool, ranks, num_shards),) = {(group.pool, group.ranks, group.num_shards) for group in groups}
    assert all((c.dispatch in SHARDED) == (whole is not None) for c in calls.values()), list(calls)
    assemble = None
    stored: list[list[Any]] = [[]] * num_shards
    if whole is not None:
        assemble = whole.assemble
        stored = [[pool.store.reference(p) for p in part] for part in whole.pieces(num_shards)]
    assert len(stored) == num_shards, (len(stored), num_shards)
    arguments = [
        (
            [call.on_rank(rank) for call in calls.values()],
            assemble,
            *stored[rank * num_shards // len(ranks)],
        )
        for rank in range(len(ranks))
    ]
    phase = ", ".join(call.name for call in calls.values())
    wait = pool.begin("call", arguments, phase, groups[0].hosts)

    def results() -> dict[str, TimedResult]:
        per_rank = wait()
        spans = [[outcome.span for outcome in of_rank] for of_rank in per_rank]
        pool.spans.note(spans, ranks.start)
        of_calls = zip(calls.items(), zip(*per_rank, strict=True), strict=True)
        return {name: _outcome(call, whole, results) for (name, call), results in of_calls}

    return results


def _outcome(call: Call, whole: Shardable | None, ranks: Sequence[TimedResult]) -> TimedResult:
    """Join the results of a call over the ranks."""
    value: Any = [ranks[rank].value for rank in call.answering()]
    if call.dispatch is Dispatch.SHARD_DP and whole is not None:
        value = whole.join(value)
    elif call.dispatch is not Dispatch.BROADCAST:
        value = value[0]
    return TimedResult(value, max((o.span for o in ranks), key=lambda span: span.seconds))


def build_roles(
    pool: Pool, configs: Mapping[str, RoleConfig], ranks: range | None = None
) -> dict[str, WorkerGroup]:
    """Build roles on some ranks, in the order given, and connect all roles of the pool.

    Each config is an instance of its worker's `config_class`. None: on all ranks.
    """
    groups = {role: _build_role(pool, role, config, ranks) for role, config in configs.items()}
    pool.connect()
    return groups


def _build_role(pool: Pool, role: str, config: RoleConfig, ranks: range | None) -> WorkerGroup:
    group = WorkerGroup(pool, role, config, ranks)
    arguments = [(role, config.worker, config)] * group.num_ranks
    pool.begin("build", arguments, f"start: {role}", group.hosts)()
    pool.start_times.mark(role)
    return group


@dataclass(frozen=True)
class Workers:
    """Worker groups of a run and their pool, which the caller closes.

    `critic` is None if the advantage estimator uses no values, `ref` without KL penalty. `sender`
    is None if every rank trains and samples.
    """

    pool: Pool
    actor: WorkerGroup
    rollout: WorkerGroup
    saver: WorkerGroup
    critic: WorkerGroup | None = None
    ref: WorkerGroup | None = None
    reward_model: WorkerGroup | None = None
    teacher: WorkerGroup | None = None
    sender: WorkerGroup | None = None


def role_configs(config: RunConfig) -> dict[str, RoleConfig]:
    """Return the configs of a run's roles by name, for `open_pool` and `build_workers`."""
    uses = {
        "critic": uses_critic(config),
        "ref": uses_reference(config),
        "reward_model": config.reward_model is not None,
        "teacher": config.teacher is not None,
    }
    configs: dict[str, RoleConfig] = {
        role: vars(config)[role] for role in BUILD_ORDER if uses.get(role, True)
    }
    if is_supervised(config):  # trains the distribution itself; rollouts only evaluate
        for role in {"actor", "ref"} & configs.keys():
            configs[role] = replace(vars(config)[role], temperature=1.0)
        if trains_reward_model(config):
            configs["critic"] = replace(config.critic, worker=REWARD_TRAINER)
        configs["rollout"] = replace(config.rollout, top_p=1.0)  # nothing is recorded
    configs["saver"] = SaverConfig(worker=SAVER, prepares=config.checkpoint.every_steps > 0)
    return configs


def open_pool(config: RunConfig, configs: Mapping[str, RoleConfig], run_dir: Path) -> Pool:
    """Start one process per GPU or CPU slot, which begins to import the modules of roles.

    Call it inside `ray_runtime`. Each process logs to <run_dir>/logs/<node>_rank<k>.log.

    Raises:
        ConfigError: the cluster lacks slots.
        WorkerError: a process failed to start.
    """
    pool_config = PoolConfig(
        cluster=config.cluster,
        slots_on_nodes=slots_on_nodes(config),
        accelerator=config.hardware.accelerator,
        fsdp=config.fsdp,
        modules=_modules(configs),
        ahead=[config.rollout],
        log_folder=run_dir / "logs",
        engine_ranks=engine_ranks(config),
    )
    return Pool(pool_config)


def _modules(configs: Mapping[str, RoleConfig]) -> list[str]:
    return [module_of(role.worker) for role in configs.values()]


def build_workers(
    config: RunConfig, configs: Mapping[str, RoleConfig], pool: Pool
) -> dict[str, WorkerGroup]:
    """Join the processes of a new pool and build roles in them; a failure closes the pool.

    Configs by role include rollout and actor. The rollout engine is built first and determines the
    sharding of the other roles. With placement.rollout_gpus, the engine is on other ranks, and
    `sender` is one more role.

    Raises:
        ConfigError: a worker raised a ConfigError.
        WorkerError: a process failed to join or to build a role.
    """
    if config.placement.rollout_gpus:
        never_sleeps = replace(config.rollout, sleep=SleepMode.none)
        sender = SenderConfig(worker=SENDER, rollout=never_sleeps)
        configs = {"sender": sender, **configs, "rollout": never_sleeps}
    # Calls need the roles' classes.
    imported = import_in_background(_modules(configs))
    with ExitStack() as undo:
        undo.enter_context(pool)
        pool.join()
        pool.read_ahead(config.model)
        imported.result()
        rollout = _build_role(pool, "rollout", configs["rollout"], pool.parts[-1])
        slots = [host.slot for host in rollout.hosts]
        warn_of_straddling(slots, rollout.ranks_per_shard, rollout.ranks.start)
        fsdp = replace(config.fsdp, columns=rollout.call("columns", config.fsdp))
        others = {
            role: replace(own, fsdp=fsdp) if isinstance(own, ShardedConfig) else own
            for role, own in configs.items()
            if role != "rollout"
        }
        groups = {"rollout": rollout, **build_roles(pool, others, pool.parts[0])}
        undo.pop_all()
    return groups
