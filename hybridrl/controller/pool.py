"""Pool: the worker processes of a run, one per rank, started, called and closed together."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.world import part_mesh
from hybridrl.config.schema import ClusterConfig, FSDPConfig, ModelConfig
from hybridrl.controller.calls import SetupTimes, SpanLog
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.host import WorkerHost, early_log, rank_log
from hybridrl.controller.node_tasks import NodeTasks, ObjectStore
from hybridrl.controller.placement import (
    Host,
    Slot,
    by_node,
    number_cpu_slots,
    rank_order,
    reserve,
)
from hybridrl.controller.rendezvous import given_port
from hybridrl.controller.signals import shielded
from hybridrl.controller.watch.ray_monitor import (
    RayMonitor,
    is_local_ray_broken,
    register_shared_memory,
)
from hybridrl.controller.watch.waiting import StallDetector, wait_for_all
from hybridrl.distributed.background import call_with_timeout
from hybridrl.distributed.position import PositionReader, open_position
from hybridrl.processes import cleanup

logger = logging.getLogger(__name__)

# Seconds for idle hosts to close their roles before they are killed.
CLOSE_TIMEOUT_S = 5.0
END_GRACE_S = 2.0
CONTROL_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class PoolConfig:
    """Config of a pool.

    Attributes:
        slots_on_nodes: number of processes on each node.
        modules: modules that every process imports first.
        ahead: configs of roles; their slow modules are imported once the process group exists.
        log_folder: folder of the logs, one file per process.
        engine_ranks: number of ranks, the last ones, that only sample, while the others only train;
            0: each rank does both.
    """

    cluster: ClusterConfig
    slots_on_nodes: Sequence[int]
    accelerator: Accelerator
    fsdp: FSDPConfig
    modules: Sequence[str]
    ahead: Sequence[Any]
    log_folder: Path
    engine_ranks: int = 0


class Pool(AbstractContextManager["Pool"]):
    """Worker processes in the order of their ranks; `join` connects them in process groups.

    They begin to import their modules at once, so the caller can do other work before `join`.
    Create it inside `ray_runtime` and close it there; also a context manager.

    Raises:
        ConfigError: the cluster lacks slots.
        WorkerError: a process failed to start.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._config, self._port, self._nodes = config, given_port(), NodeTasks()
        self._readers: dict[int, PositionReader] = {}
        self._reservation: PlacementGroup | None = None
        self._running: dict[ObjectRef, tuple[Host, str]] = {}
        self._busy: Sequence[ObjectRef] = []
        self._shared_memory: dict[str, list[str]] = {}
        self._ray_monitor = RayMonitor(config.cluster.stall_timeout_s)
        self.hosts: list[Host] = []
        self.store = ObjectStore(partial(self._ray_monitor.guarded, "sending a batch"))
        self._joins = False
        with ExitStack() as undo:
            undo.callback(self.close)
            with self._ray_monitor.guarded("start: slots"):
                check = partial(self._ray_monitor.check, "start: slots")
                on_gpu = config.accelerator is Accelerator.gpu
                timeout_s = config.cluster.start_timeout_s
                self._reservation = reserve(config.slots_on_nodes, on_gpu, timeout_s, check)
            self._identify(self._spawn(self._reservation))
            engines = self.parts[-1]
            ahead = [config.ahead if rank in engines else [] for rank in range(self.size)]
            imports = [(config.modules, each) for each in ahead]
            self._imported = self._begin_step(self.hosts, "preload", imports)
            undo.pop_all()
        self.spans = SpanLog(self.size)

    def join(self) -> "Pool":
        """Join the processes in process groups once their imports are done; return the pool.

        After a failure the pool is closed.

        Raises:
            ConfigError: no port is free for the rendezvous.
            WorkerError: a process failed to import its modules or to join.
        """
        self._joins, self.start_times = True, SetupTimes(time.time())
        with ExitStack() as undo:
            undo.callback(self.close)
            self._imported()
            self.start_times.mark("imports")
            self._join_rendezvous()
            meshes = [part_mesh(self._config.fsdp, part) for part in self.parts for _ in part]
            arguments = [(mesh, self.parts) for mesh in meshes]
            self._start_step(self.hosts, "init_process_group", arguments)
            self.start_times.mark("rendezvous")
            undo.pop_all()
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def driver_address(self) -> str:
        """Address of this process's node, as the ranks reach it."""
        nodes = {host.slot.node_id for host in self.hosts}
        return "127.0.0.1" if nodes == {self._nodes.driver} else ray.util.get_node_ip_address()

    @property
    def parts(self) -> list[range]:
        """Ranks that share a default group: all, or those that train and those that sample."""
        trainers = self.size - self._config.engine_ranks
        parts = range(trainers), range(trainers, self.size)
        return [part for part in parts if len(part)]

    def run(self, method: str, arguments: Sequence[tuple], phase: str) -> list[Any]:
        """Call a method of WorkerHost on every rank and wait; return results by rank."""
        return self.begin(method, arguments, phase)()

    def begin(
        self,
        method: str,
        arguments: Sequence[tuple],
        phase: str,
        hosts: Sequence[Host] | None = None,
        *,
        is_step: bool = False,
    ) -> Callable[[], list[Any]]:
        """Call a host method on every rank, or on `hosts`; return a function that waits, as `run`.

        The phase is the name for messages, "actor.update". Calls of a host run in the order in
        which they began. The function raises as `wait_for_all` does; a failure ends the calls of
        all hosts. `is_step`: a step of the start (`StallDetector`).
        """
        called = self.hosts if hosts is None else hosts
        of_hosts = zip(called, arguments, strict=True)
        with self._ray_monitor.guarded(phase):
            refs = [getattr(host.handle, method).remote(*own) for host, own in of_hosts]
        self._running |= {ref: (host, phase) for ref, host in zip(refs, called, strict=True)}
        self._busy = [*self._running]

        def results() -> list[Any]:
            watched = self._config.cluster, self._readers, self._nodes, self._ray_monitor
            detector = StallDetector(*watched, phase, len(called), is_step=is_step)
            try:
                with self._ray_monitor.guarded(phase):
                    values = wait_for_all(refs, self._running, phase, detector)
            except WorkerError:
                self._ray_monitor.check_after_failure(phase)
                raise
            finally:
                for ref in refs:
                    del self._running[ref]
            self._busy = [*self._running]
            return values

        return results

    def read_ahead(self, model: ModelConfig) -> None:
        """Begin to prefetch the model's checkpoint if all ranks are on one node; return at once.

        With several nodes, each node needs only part of it.
        """
        if len({host.slot.node_id for host in self.hosts}) == 1:
            self._start_step(self.hosts[:1], "read_ahead", [(model,)])

    def connect(self) -> None:
        """Connect the roles in each process to each other, once all are built."""
        files = self.run("connect", [()] * self.size, "start: connect")
        self.start_times.mark("connect")
        for host, paths in zip(self.hosts, files, strict=True):
            self._register_shared_memory(host, paths)

    def close(self) -> None:
        """End roles and processes, unlink their shared memory, release the reservation.

        Takes at most about ten seconds, even during a call or without Ray; half a minute if nodes
        do not answer.
        """
        with shielded():
            self._ray_monitor.close()
            self._nodes.submits_tasks = not self._ray_monitor.is_head_lost
            if self._nodes.submits_tasks and not is_local_ray_broken():
                with suppress(RayError):
                    self._close_idle()
            # Shared memory is also recorded at the start: ranks may have died since.
            pids = {node: ([h.pid for h in there],) for node, there in by_node(self.hosts).items()}
            footprints = self._nodes.run_each(cleanup.footprint, pids)
            left = {node: footprints.get(node, cleanup.Footprint([], [])) for node in pids}
            grace_s = END_GRACE_S if self._release_within_timeout() else 0.0
            early = self._shared_memory
            arguments = {node: (left[node], early.get(node, []), grace_s) for node in left}
            self._nodes.run_each(cleanup.end, arguments)
            for reader in self._readers.values():
                reader.close()
            if not self._joins:
                self._remove_logs()
            self._readers, self.hosts = {}, []
            self._reservation = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_logs(self) -> None:
        """Remove the logs of processes that were not needed: the driver refused the run."""
        for host in self.hosts:
            host.log_file.unlink(missing_ok=True)
        with suppress(OSError):  # logs of an earlier start
            self._config.log_folder.rmdir()

    def _release_within_timeout(self) -> bool:
        """End processes and reservation through Ray, which else reports crashes."""

        def release() -> None:
            endings = [partial(ray.kill, host.handle) for host in self.hosts]
            if self._reservation is not None:
                endings.append(partial(remove_placement_group, self._reservation))
            for end in endings:
                with suppress(RayError):
                    end()

        if ray.is_initialized():
            with suppress(TimeoutError):
                call_with_timeout(CONTROL_TIMEOUT_S, release)
                return True
        logger.warning("Ray does not answer: the worker processes are killed directly")
        return False

    def _spawn(self, reservation: PlacementGroup) -> list[ActorHandle]:
        """Create one process per slot; they start in the background."""
        config, actor = self._config, ray.remote(WorkerHost)
        import_path, omp_threads = tuple(sys.path), os.environ.get("OMP_NUM_THREADS")
        folder = str(config.log_folder.resolve())
        bundles = zip(reservation.bundle_specs, config.slots_on_nodes, strict=True)
        return [
            actor.options(
                num_cpus=bundle["CPU"] / slots,
                num_gpus=1 if "GPU" in bundle else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(reservation, index),
            ).remote(config.cluster, config.accelerator, slots, folder, import_path, omp_threads)
            for index, (bundle, slots) in enumerate(bundles)
            for _ in range(slots)
        ]

    def _identify(self, handles: Sequence[ActorHandle]) -> None:
        """Assign ranks to new processes by their places."""
        folder = self._config.log_folder.resolve()
        # Hosts without a rank are numbered in the order of creation.
        unknown = Slot("?", "0.0.0.0", 0)
        anonymous = [
            Host(k, handle, unknown, 0, "an unknown node", folder)
            for k, handle in enumerate(handles)
        ]
        infos = self._start_step(anonymous, "info", [()] * len(handles))
        slots = [slot for slot, _, _ in infos]
        if self._config.accelerator is Accelerator.cpu:
            slots = number_cpu_slots(slots)
        for rank, k in enumerate(rank_order(slots)):
            _, pid, name = infos[k]
            log_file = early_log(folder, name, pid)
            self.hosts.append(Host(rank, handles[k], slots[k], pid, name, log_file))
        near = [host for host in self.hosts if host.slot.node_id == self._nodes.driver]
        readers = {host.rank: open_position(host.pid) for host in near}
        self._readers = {rank: reader for rank, reader in readers.items() if reader is not None}

    def _join_rendezvous(self) -> None:
        """Agree on one rendezvous; the user's MASTER_ADDR and MASTER_PORT take precedence.

        Ranks of one node use a file, which no other user can open.
        """
        first = self.hosts[0]
        address = os.environ.get("MASTER_ADDR") or None  # an empty value counts as unset
        if address is None and (self._port is not None or len(by_node(self.hosts)) > 1):
            address = first.slot.node_ip
        band = self._config.cluster.rendezvous_ports
        request = (address, self._port, (band[0], band[1]), self.size)
        (where,) = self._start_step([first], "open_rendezvous", [request])
        if where.is_file:
            self._register_shared_memory(first, [where.address])
        self.hosts = [
            host._replace(log_file=rank_log(host.log_file, host.node_name, host.rank))
            for host in self.hosts
        ]
        arguments = [(where, host.rank, host.slot) for host in self.hosts]
        self._start_step(self.hosts, "join_rendezvous", arguments)

    def _register_shared_memory(self, host: Host, paths: Sequence[str]) -> None:
        """Register files of a rank's node for removal at the end of the pool or the run."""
        self._shared_memory.setdefault(host.slot.node_id, []).extend(paths)
        if host.slot.node_id == self._nodes.driver:
            register_shared_memory(paths)

    def _start_step(
        self, hosts: Sequence[Host], method: str, arguments: Sequence[tuple]
    ) -> list[Any]:
        return self._begin_step(hosts, method, arguments)()

    def _begin_step(
        self, hosts: Sequence[Host], method: str, arguments: Sequence[tuple]
    ) -> Callable[[], list[Any]]:
        return self.begin(method, arguments, f"start: {method}", hosts, is_step=True)

    def _close_idle(self) -> None:
        """Close roles in order, unless a call is in flight: then ranks wait for others."""
        if not self.hosts or not ray.is_initialized():
            return
        busy = list(self._busy)
        if busy and ray.wait(busy, num_returns=len(busy), timeout=0)[1]:
            return
        closing = [host.handle.close.remote() for host in self.hosts]
        _, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        if late:
            logger.warning("%d worker(s) did not close within %g s", len(late), CLOSE_TIMEOUT_S)
