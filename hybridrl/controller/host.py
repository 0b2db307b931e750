"""Process of one rank: joins the process group, builds the roles and runs their methods.

torch and other slow modules are imported in `preload`, on all ranks at the same time, after the
number of threads is set.
"""

import gc
import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import ray

from hybridrl.config.choices import Accelerator, Init, NVLinkMulticast
from hybridrl.config.command.secrets import secret_values
from hybridrl.config.planner.machine import torch_threads
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.schema import FSDPConfig, ModelConfig
from hybridrl.controller import rendezvous
from hybridrl.controller.background import import_all, import_in_background
from hybridrl.controller.calls import RoleCall, TimedResult
from hybridrl.controller.errors import errors_as_text
from hybridrl.controller.output import guard_logging, redirect_output, rotate_log
from hybridrl.controller.placement import Slot, visible_index
from hybridrl.controller.processes import shared_memory_of
from hybridrl.controller.rendezvous import Joined, Rendezvous
from hybridrl.controller.spans import Stopwatch
from hybridrl.controller.watch import flight_recorder
from hybridrl.distributed import position

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore
    from torch.distributed.device_mesh import DeviceMesh

    from hybridrl.controller.profiler import RankProfiler
    from hybridrl.workers.base import Worker

logger = logging.getLogger(__name__)

# Seconds by which the store's timeout exceeds the controller's, whose error is more detailed.
TIMEOUT_MARGIN_S = 30.0


class HostInfo(NamedTuple):
    """Identity of a new process."""

    slot: Slot
    pid: int
    node_name: str


@dataclass(frozen=True)
class HostConfig:
    """Start parameters of every process.

    Attributes:
        accelerator: device of the roles.
        slots_on_node: processes that share the node.
        log_folder: folder of its log file.
        import_path: the driver's sys.path, for the user's modules.
        omp_threads: OMP_NUM_THREADS as set by the user; None: as `torch_threads` computes it.
        start_timeout_s: seconds allowed for the rendezvous.
        nvlink_multicast: permission for libraries to use it.
    """

    accelerator: Accelerator
    slots_on_node: int
    log_folder: str
    import_path: tuple[str, ...]
    omp_threads: str | None
    start_timeout_s: float
    nvlink_multicast: NVLinkMulticast


@contextmanager
def _step(name: str) -> Iterator[None]:
    """Publish a step of the start as the position, and convert its errors to text."""
    with errors_as_text():
        position.enter(f"start: {name}")
        yield
        position.leave()


class WorkerHost:
    """Host of all roles of one rank: a Ray actor whose methods the pool calls in order.

    All exceptions are `RemoteError`.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        if config.nvlink_multicast is NVLinkMulticast.off:
            turn_off_multicast()
        self._info = HostInfo(self._slot(), os.getpid(), socket.gethostname())
        self._log_file = Path(config.log_folder) / f"{self._info.node_name}_pid{os.getpid()}.log"
        redirect_output(self._log_file)
        flight_recorder.write_on_signal(Path(config.log_folder))
        position.publish()
        sys.path.extend(path for path in config.import_path if path not in sys.path)
        threads = torch_threads(
            on_gpu=config.accelerator is Accelerator.gpu, processes=config.slots_on_node
        )
        os.environ["OMP_NUM_THREADS"] = config.omp_threads or str(threads)
        self._rank = -1
        self._store: TCPStore | FileStore | None = None
        self._mesh: DeviceMesh | None = None
        self._importing: Future[None] | None = None
        self._roles: dict[str, Worker] = {}
        self._secrets: set[str] = set()
        self._profiler: RankProfiler | None = None

    @_step("info")
    def info(self) -> HostInfo:
        """Return slot, process id and node of this process."""
        return self._info

    @_step("preload")
    def preload(self, modules: list[str]) -> None:
        """Import torch and the modules of the roles."""
        import_all(["torch.distributed", "hybridrl.distributed.mesh", *modules])
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

    @_step("import_ahead")
    def import_ahead(self, configs: list[Any]) -> None:
        """Begin to import the modules that building these roles needs; return at once."""
        device_type = "cuda" if self._config.accelerator is Accelerator.gpu else "cpu"
        modules: list[str] = []
        for config in configs:
            modules += import_class(config.worker).modules_ahead(config, device_type)
        self._importing = import_in_background(modules)

    @_step("open_rendezvous")
    def open_rendezvous(
        self, address: str | None, port: int | None, band: tuple[int, int], world_size: int
    ) -> Rendezvous:
        """Create the store, on rank 0.

        Args:
            address: address to listen on; None: use a file.
            port: port; None: a free one of the band.
            band: first and last port.
            world_size: number of ranks.
        """
        timeout_s = self._config.start_timeout_s
        if address is None:
            self._store, where = rendezvous.open_file_store(world_size, timeout_s)
            return where
        ports = rendezvous.port_band(*band) if port is None else [port]
        self._store, where = rendezvous.open_store(address, ports, world_size, timeout_s)
        return where

    @_step("join_rendezvous")
    def join_rendezvous(self, where: Rendezvous, rank: int, slot: Slot) -> Joined:
        """Become `rank`, connect to the store of rank 0 and report the connection."""
        self._rank = rank
        self._info = self._info._replace(slot=slot)
        log_file = self._log_file.with_name(f"{self._info.node_name}_rank{rank}.log")
        rotate_log(log_file)
        self._log_file = self._log_file.rename(log_file)
        os.environ.update(
            rendezvous.environment_of(where),
            RANK=str(rank),
            LOCAL_RANK=str(slot.local_rank),
            LOCAL_WORLD_SIZE=str(self._config.slots_on_node),
        )
        interface = rendezvous.interface_of(slot.node_ip)
        if interface is not None:  # else gloo resolves the host name, perhaps to 127.0.1.1
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self._store is None:
            timeout_s = self._config.start_timeout_s + TIMEOUT_MARGIN_S
            self._store = rendezvous.join_store(where, timeout_s)
        logger.info("rank %d of %d, rendezvous %s", rank, where.world_size, where)
        return rendezvous.joined(self._store)

    @_step("init_process_group")
    def init_process_group(self, fsdp: FSDPConfig) -> None:
        """Create the process group of all ranks and the training mesh; a collective."""
        import torch
        from torch import distributed as dist

        from hybridrl.distributed.mesh import NO_LIMIT, build_mesh
        from hybridrl.distributed.torch_compat import set_timeouts

        on_gpu = self._config.accelerator is Accelerator.gpu
        device = torch.device("cuda", self._info.slot.local_rank) if on_gpu else None
        if device is not None:
            torch.cuda.set_device(device)
        assert self._store is not None, "join_rendezvous comes first"
        self._store.set_timeout(NO_LIMIT)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=NO_LIMIT,
            device_id=device,
        )
        self._mesh = build_mesh(fsdp, "cuda" if on_gpu else "cpu")
        set_timeouts(NO_LIMIT)

    @_step("read_ahead")
    def read_ahead(self, model: ModelConfig) -> None:
        """Prefetch the model's checkpoint into the page cache, in the background."""
        from hybridrl.models.read_ahead import read_ahead
        from hybridrl.models.resolve import model_folder

        if model.init is Init.pretrained:
            read_ahead(model_folder(model))

    def build(self, role: str, worker: str, config: Any) -> None:
        """Build a role of the class at the dotted path `worker`; a collective."""
        from hybridrl.distributed.mesh import NO_LIMIT
        from hybridrl.distributed.torch_compat import set_timeouts

        start = time.perf_counter()
        self._secrets |= {*secret_values(asdict(config))}
        guard_logging(self._secrets)
        with _step(role):
            if self._importing is not None:
                self._importing.result()
            self._roles[role] = import_class(worker)(config, self._mesh)
            set_timeouts(NO_LIMIT)
        logger.info("built %s (%s) in %.1f s", role, worker, time.perf_counter() - start)

    @_step("connect")
    def connect(self) -> list[str]:
        """Connect the roles to each other; return the shared memory files of the process."""
        for role in self._roles.values():
            role.connect(self._roles)
        return shared_memory_of(psutil.Process())

    def call(
        self,
        calls: Sequence[RoleCall],
        assemble: Callable[[Sequence[Any]], Any] | None,
        *contents: Any,
    ) -> list[TimedResult]:
        """Run methods of roles, one after the other; a value that is not kept is None.

        Args:
            calls: the methods.
            assemble: builds this rank's part of a batch from `contents`; the part is the first
                argument of each call. None: there is no batch.
            contents: the part's pieces; Ray resolves their references.
        """
        part: tuple[Any, ...] = ()
        if assemble is not None:
            with errors_as_text(calls[0].name):
                position.enter(calls[0].name)
                part = (assemble(contents),)
        outcomes = []
        for call in calls:
            with errors_as_text(call.name), self._working(call.name) as watch:
                value = getattr(self._roles[call.role], call.method)(
                    *part, *call.args, **call.kwargs
                )
            outcomes.append(TimedResult(value if call.keep else None, watch.span))
        return outcomes

    @errors_as_text()
    def start_profile(self) -> None:
        """Start torch's profiler."""
        from hybridrl.controller.profiler import RankProfiler

        self._profiler = RankProfiler(self._config.accelerator is Accelerator.gpu)

    @errors_as_text()
    def write_profile(self, path: str) -> None:
        """Stop the profiler and write a Chrome trace."""
        assert self._profiler is not None, "no profile was started"
        self._profiler.write(Path(path))
        self._profiler = None

    @errors_as_text()
    def close(self) -> None:
        """Close the roles, last built first, and destroy the process group."""
        from torch import distributed as dist

        for name in reversed(list(self._roles)):
            self._roles.pop(name).close()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    @contextmanager
    def _working(self, name: str) -> Iterator[Stopwatch]:
        """Time a role's method, up to the end of its stream, and name it in a profile.

        Copies on other streams continue.
        """
        import torch

        with torch.profiler.record_function(name), Stopwatch(name) as watch:
            position.enter(name)
            yield watch
            if self._config.accelerator is Accelerator.gpu:
                position.at("device work")
                torch.cuda.current_stream().synchronize()
            position.leave()

    def _slot(self) -> Slot:
        context = ray.get_runtime_context()
        local_rank = 0
        if self._config.accelerator is Accelerator.gpu:
            (gpu,) = context.get_accelerator_ids()["GPU"]
            local_rank = visible_index(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Slot(context.get_node_id(), ray.util.get_node_ip_address(), local_rank)


def import_class(path: str) -> type[Any]:
    """Return the class at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
