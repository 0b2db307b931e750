"""Process of one rank: joins the process group, builds the roles and runs their methods.

torch and other slow modules are imported in `preload`, on all ranks at the same time, after the
number of threads is set.
"""

import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from hybridrl.config.choices import Accelerator, Init, NVLinkMulticast
from hybridrl.config.command.secrets import secret_values
from hybridrl.config.planner.machine import torch_threads
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.schema import ClusterConfig, FSDPConfig, ModelConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.controller import rendezvous
from hybridrl.controller.calls import RoleCall, Stopwatch, TimedResult
from hybridrl.controller.errors import errors_as_text
from hybridrl.controller.output import guard_logging, redirect_output, rotate_log
from hybridrl.controller.placement import Slot, visible_index
from hybridrl.controller.rendezvous import Rendezvous
from hybridrl.controller.watch import flight_recorder
from hybridrl.distributed import position
from hybridrl.distributed.background import import_all, import_in_background
from hybridrl.processes.cleanup import shared_memory_of

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore
    from torch.distributed.device_mesh import DeviceMesh
    from torch.profiler import profile

    from hybridrl.workers.base import Worker

logger = logging.getLogger(__name__)

# Seconds by which the store's timeout exceeds the controller's, whose error is more detailed.
TIMEOUT_MARGIN_S = 30.0


@contextmanager
def _step(name: str) -> Iterator[None]:
    """Publish a step of the start as the position, and convert its errors to text."""
    with errors_as_text():
        position.enter(f"start: {name}")
        yield
        position.leave()


def early_log(folder: Path, node: str, pid: int) -> Path:
    """Return the log file of a process that has no rank yet."""
    return folder / f"{node}_pid{pid}.log"


def rank_log(early: Path, node: str, rank: int) -> Path:
    """Return the name that `early_log` gets once the process has a rank."""
    return early.with_name(f"{node}_rank{rank}.log")


class WorkerHost:
    """Host of all roles of one rank: a Ray actor whose methods the pool calls in order.

    All exceptions are `RemoteError`.

    `import_path` is the driver's sys.path, for the user's modules; `omp_threads` is OMP_NUM_THREADS
    as set by the user.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        accelerator: Accelerator,
        slots_on_node: int,
        log_folder: str,
        import_path: Sequence[str],
        omp_threads: str | None,
    ) -> None:
        self._start_timeout_s = cluster.start_timeout_s
        self._on_gpu = accelerator is Accelerator.gpu
        if cluster.nvlink_multicast is NVLinkMulticast.off:
            turn_off_multicast()
        self._slot, self._node_name = self._place(), socket.gethostname()
        self._log_file = early_log(Path(log_folder), self._node_name, os.getpid())
        redirect_output(self._log_file)
        flight_recorder.write_on_signal(Path(log_folder))
        position.publish()
        sys.path.extend(path for path in import_path if path not in sys.path)
        threads = torch_threads(on_gpu=self._on_gpu, processes=slots_on_node)
        os.environ["OMP_NUM_THREADS"] = omp_threads or str(threads)
        os.environ["LOCAL_WORLD_SIZE"] = str(slots_on_node)
        self._rank = -1
        self._store: TCPStore | FileStore | None = None
        self._mesh: DeviceMesh | None = None
        self._ahead: list[str] = []
        self._importing: Future[None] | None = None
        self._roles: dict[str, Worker] = {}
        self._secrets: set[str] = set()
        self._profile: profile | None = None

    @_step("info")
    def info(self) -> tuple[Slot, int, str]:
        """Return slot, process id and node name of this process."""
        return self._slot, os.getpid(), self._node_name

    @_step("preload")
    def preload(self, modules: Sequence[str], ahead: Sequence[Any]) -> None:
        """Import torch and roles' modules; note those that building `ahead` needs."""
        import_all(["torch.distributed", "hybridrl.distributed.mesh", *modules])
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
        device_type = "cuda" if self._on_gpu else "cpu"
        for config in ahead:
            self._ahead += locate("worker", config.worker).modules_ahead(config, device_type)

    @_step("open_rendezvous")
    def open_rendezvous(
        self, address: str | None, port: int | None, band: tuple[int, int], world_size: int
    ) -> Rendezvous:
        """Create the store, on rank 0: in a file without an address; without a port on a free one.

        The band is the first and the last port of those.
        """
        timeout_s = self._start_timeout_s
        if address is None:
            self._store, where = rendezvous.open_file_store(world_size, timeout_s)
        else:
            ports = rendezvous.port_band(*band) if port is None else [port]
            self._store, where = rendezvous.open_store(address, ports, world_size, timeout_s)
        return where

    @_step("join_rendezvous")
    def join_rendezvous(self, where: Rendezvous, rank: int, slot: Slot) -> None:
        """Become `rank`, and connect to the store of rank 0."""
        self._rank = rank
        self._slot = slot
        log_file = rank_log(self._log_file, self._node_name, rank)
        rotate_log(log_file)
        self._log_file = self._log_file.rename(log_file)
        os.environ.update(
            rendezvous.environment_of(where),
            RANK=str(rank),
            LOCAL_RANK=str(slot.local_rank),
        )
        interface = rendezvous.interface_of(slot.node_ip)
        if interface is not None:  # else gloo resolves the host name, perhaps to 127.0.1.1
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or interface
        if self._store is None:
            self._store = rendezvous.join_store(where, self._start_timeout_s + TIMEOUT_MARGIN_S)
        logger.info("rank %d of %d, rendezvous %s", rank, where.world_size, where)

    @_step("init_process_group")
    def init_process_group(self, fsdp: FSDPConfig, parts: Sequence[range]) -> None:
        """Create the process groups (`mesh.init_groups`) and this part's mesh; a collective.

        Then begin the imports noted by `preload`. vLLM's set environment variables, which must not
        happen while gloo reads them in another thread: a segmentation fault in rare starts.
        """
        import torch

        from hybridrl.distributed.mesh import NO_LIMIT, build_mesh, init_groups
        from hybridrl.distributed.torch_compat import set_timeouts

        device = None
        if self._on_gpu:
            device = torch.device("cuda", self._slot.local_rank)
            torch.cuda.set_device(device)
        assert self._store is not None, "join_rendezvous comes first"
        self._store.set_timeout(NO_LIMIT)
        own = next(part for part in parts if self._rank in part)
        os.environ.update(RANK=str(self._rank - own.start), WORLD_SIZE=str(len(own)))
        init_groups(self._store, self._rank, parts, device)
        self._mesh = build_mesh(fsdp, "cuda" if self._on_gpu else "cpu")
        set_timeouts(NO_LIMIT)
        self._importing = import_in_background(self._ahead)

    @_step("read_ahead")
    def read_ahead(self, model: ModelConfig) -> None:
        """Prefetch the model's checkpoint into the page cache, in the background."""
        from hybridrl.models.resolve import model_folder
        from hybridrl.models.weight_files import read_ahead

        if model.init is Init.pretrained:
            read_ahead(model_folder(model))

    def build(self, role: str, worker: str, config: Any) -> None:
        """Build a role of the class that `worker` names; a collective."""
        from hybridrl.distributed.mesh import NO_LIMIT
        from hybridrl.distributed.torch_compat import set_timeouts

        start = time.perf_counter()
        self._secrets |= {*secret_values(asdict(config))}
        guard_logging(self._secrets)
        with _step(role):
            if self._importing is not None:
                self._importing.result()
            self._roles[role] = locate(f"{role}.worker", worker)(config, self._mesh)
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

        `assemble` builds this rank's part of a batch from `contents`, pieces whose references Ray
        resolves. The part is the first argument of each call.
        """
        part: tuple[Any, ...] = ()
        if assemble is not None:
            with errors_as_text(calls[0].name):
                position.enter(calls[0].name)
                part = (assemble(contents),)
        outcomes = []
        for call in calls:
            with errors_as_text(call.name), self._working(call.name) as watch:
                role, _, method = call.name.partition(".")
                value = getattr(self._roles[role], method)(*part, *call.args, **call.kwargs)
            outcomes.append(TimedResult(value if call.keep else None, watch.span))
        return outcomes

    @errors_as_text()
    def start_profile(self) -> None:
        """Start torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    @errors_as_text()
    def write_profile(self, path: str) -> None:
        """Stop the profiler and write a Chrome trace, gzipped for .gz; a failed write is logged."""
        assert self._profile is not None, "no profile was started"
        self._profile.stop()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(path)
            logger.info("wrote %s", path)
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)
        self._profile = None

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
            if self._on_gpu:
                position.at("device work")
                torch.cuda.current_stream().synchronize()
            position.leave()

    def _place(self) -> Slot:
        context = ray.get_runtime_context()
        local_rank = 0
        if self._on_gpu:
            (gpu,) = context.get_accelerator_ids()["GPU"]
            local_rank = visible_index(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Slot(context.get_node_id(), ray.util.get_node_ip_address(), local_rank)
