"""Ray for the time of a run: started here or joined, and removed without leftovers.

A Ray started here keeps its files in a temporary folder and listens on the loopback interface. It
requires a token from the environment of its processes, so that no other user can reach it. All its
processes, orphans included, inherit an environment variable that identifies them.
"""

import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError, RayError, RaySystemError

from hybridrl.config.choices import Accelerator
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import STORE_BYTES
from hybridrl.config.planner.memory import MIB
from hybridrl.config.schema import ClusterConfig
from hybridrl.controller.ray import compat
from hybridrl.controller.ray.head import connect, head_place, ray_address
from hybridrl.controller.rendezvous import is_ip
from hybridrl.controller.signals import shielded, signal_guard
from hybridrl.controller.watch.janitor import Janitor
from hybridrl.controller.watch.ray_monitor import is_local_ray_broken
from hybridrl.distributed.background import call_with_timeout, join_abandoned_calls
from hybridrl.processes import cleanup
from hybridrl.processes.process import is_secret_variable

logger = logging.getLogger(__name__)

# Variable of all processes of a Ray started here; its value is the run's folder.
MARK = "HYBRIDRL_RAY"
# Ray's sockets lie below its folder; the kernel limits their paths to 107 bytes.
MAX_TEMP_ROOT = 24
STOP_GRACE_S = 3.0
# Ray needs one second, and about five without its processes.
SHUTDOWN_LIMIT_S = 20.0
# Seconds for abandoned calls to return before a joined cluster is left.
CALLS_LIMIT_S = 3.0
# Variables for libraries in the workers, which processes on other nodes would not inherit.
PASSED_ON = (
    "CUDA_",
    "GLOO_",
    "HF_",
    "HYBRIDRL_",
    "NCCL_",
    "NVSHMEM_",
    "OMP_",
    "PYTHONPATH",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "VLLM_",
)
# The only secret that workers need: it loads gated models and data sets.
DOWNLOAD_TOKEN = "HF_TOKEN"
# Ray's defaults that do not suit a run, by variable. Others were looked at and stay: workers that
# start before they are asked for become ranks, objects beyond the store go to the run's temporary
# folder, and a raylet that is busy or suspended for less than 45 s is not given up.
OTHER_DEFAULTS = {
    # 15 in Ray: any other program on the machine would take nearly all of the cores.
    "RAY_worker_niceness": "0",
    # Ray kills ranks when 95 % of the memory are in use: of 2 TiB, 100 GiB are left.
    "RAY_min_memory_free_bytes": str(2**30),
    # Its node may look for its object store too early: it looks again after a second, 10 times.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
# Workers must see all GPUs of their node: vLLM's custom all-reduce indexes them by rank.
ALL_GPUS_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@contextmanager
def ray_runtime(cluster: ClusterConfig, accelerator: Accelerator) -> Iterator[None]:
    """Run the block, in the main thread, with Ray.

    With RAY_ADDRESS, that cluster is joined. Else Ray is started here, with cluster.gpus_per_node
    slots, and afterwards ended with all its processes in any case. SIGINT and SIGTERM become
    `Interrupted` in the block. Close a pool in the block that opens it.

    Raises:
        ConfigError: RAY_ADDRESS names no cluster that can be joined, or this process uses Ray.
        Interrupted: a signal came.
    """
    _require_no_ray()
    with signal_guard(), compat.messages_to(_log), ExitStack() as stack:
        if ray_address():
            stack.enter_context(joined_cluster(worker_environment(os.environ)))
        else:
            with shielded():  # else a signal in between leaves the folder behind
                root = tempfile.gettempdir()
                root = root if len(root) <= MAX_TEMP_ROOT else "/tmp"
                folder = Path(tempfile.mkdtemp(prefix="hybridrl-", dir=root))
                janitor = Janitor(MARK, folder)
                stack.callback(janitor.dismiss)
                stack.callback(_stop, folder)
            _start(folder, cluster, accelerator)
        yield


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the driver's environment that workers need.

    CUDA_VISIBLE_DEVICES is left out: each node has its own.
    """
    passed = {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED_ON)
        and name != "CUDA_VISIBLE_DEVICES"
        # Ray shows a job's variables to all its users.
        and (not is_secret_variable(name) or name == DOWNLOAD_TOKEN)
    }
    return passed | ALL_GPUS_VISIBLE


@contextmanager
def joined_cluster(environment: Mapping[str, str]) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS for the block, with `environment` in the workers."""
    _require_no_ray()
    try:
        _join(environment)
        yield
    finally:
        # Ray silently ends a process in which a call returns later.
        join_abandoned_calls(CALLS_LIMIT_S)
        ray.shutdown()


def _require_no_ray() -> None:
    """Raise ConfigError in a process that uses Ray: a second start would fail and end the first."""
    if ray.is_initialized():
        raise ConfigError(
            "this process uses Ray already, by ray.init or for another hybridrl.Trainer: "
            "it can use one.\nClose that trainer by its method close, or call ray.shutdown()."
        )


def _join(environment: Mapping[str, str]) -> None:
    address = os.environ["RAY_ADDRESS"]
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray client server, which cannot reach workers.\n"
            "Run on a node of the cluster and set RAY_ADDRESS=<head node>:6379, or auto."
        )
    place = head_place(compat.cluster_address() if address == "auto" else address)
    if place is not None and (problem := connect(*place).problem):
        raise _no_cluster(address, problem)
    compat.reload_authentication()
    try:
        with compat.keep_signal_handlers():
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": dict(environment)},
            )
    except AuthenticationError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: the cluster requires another token or none.\n"
            "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the head's token, perhaps that of its "
            "~/.ray/auth_token; or RAY_AUTH_MODE=disabled, if its nodes were started so."
        ) from error
    except (ConnectionError, ValueError, RuntimeError, RaySystemError) as error:
        raise _no_cluster(address, error) from error
    known = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if names := sorted(name for name in known if not is_ip(name)):
        raise ConfigError(
            f"RAY_ADDRESS={address}: the cluster knows nodes by names: {', '.join(names)}.\n"
            "Ranks are ordered by IP addresses, and each node may resolve a name in its own way.\n"
            "Restart Ray there with --node-ip-address=<its IP address>."
        )


def _no_cluster(address: str, why: object) -> ConfigError:
    return ConfigError(
        f"RAY_ADDRESS={address}: no Ray cluster answers there ({why}).\n"
        "Start it with `ray start --head`, or unset RAY_ADDRESS to use this machine alone."
    )


def _start(folder: Path, cluster: ClusterConfig, accelerator: Accelerator) -> None:
    slots = cluster.gpus_per_node
    assert slots is not None, "cluster.gpus_per_node is resolved before Ray starts"
    # The batches of a few steps.
    free = shutil.disk_usage(cleanup.SHARED_MEMORY).free
    store_bytes = max(80 * MIB, min(STORE_BYTES[accelerator], free // 2))
    start = time.perf_counter()
    # ray.init may swallow an exception of a signal; it takes a few seconds.
    with (
        shielded(),
        _environment(folder, cluster.start_timeout_s),
        compat.loopback_only(),
        compat.keep_signal_handlers(),
        compat.own_process_groups(),
        compat.essential_processes(),
        compat.prompt_registration(),
    ):
        try:
            ray.init(
                address="local",
                num_cpus=slots,
                num_gpus=slots if accelerator is Accelerator.gpu else 0,
                object_store_memory=store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(folder / "r"),
            )
        except Exception as error:  # Ray raises this class itself
            raise _not_started(error, time.perf_counter() - start) from error
    logger.debug("Ray started in %.1f s", time.perf_counter() - start)


def _not_started(error: Exception, seconds: float) -> ConfigError:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return ConfigError(
        f"Ray did not start ({seconds:.0f} s): {str(error).strip() or type(error).__name__}\n"
        f"Load of this machine: {load}. If other programs keep its cores or its disk busy, wait "
        f"for them and try again. Else `hybridrl doctor` finds limits that Ray needs."
    )


def _stop(folder: Path) -> None:
    """Shut Ray down, wait for the end of all its processes, and delete its folder."""
    with shielded():
        start = time.perf_counter()
        started = cleanup.marked_processes(MARK, folder)
        if not is_local_ray_broken():
            ray.shutdown()
        else:  # it would wait for dead or stopped processes
            cleanup.wait_or_kill(started, 0.0)
            try:
                call_with_timeout(SHUTDOWN_LIMIT_S, ray.shutdown)
            except TimeoutError:
                logger.error("Ray did not shut down within %g s", SHUTDOWN_LIMIT_S)
            except RayError as error:
                logger.error("Ray did not shut down cleanly: %s", error)
        cleanup.wait_or_kill(started, STOP_GRACE_S)
        # Processes started during the shutdown.
        cleanup.wait_or_kill(cleanup.marked_processes(MARK, folder), 0.0)
        shutil.rmtree(folder, ignore_errors=True)
        logger.debug("Ray stopped in %.1f s", time.perf_counter() - start)


@contextmanager
def _environment(folder: Path, start_timeout_s: float) -> Iterator[None]:
    """Set the environment that Ray's processes inherit; restore this process's afterwards."""
    new = ALL_GPUS_VISIBLE | {MARK: str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    # A slow disk takes longer than Ray's 60 s to import Ray.
    others = OTHER_DEFAULTS | {"RAY_worker_register_timeout_seconds": f"{start_timeout_s:.0f}"}
    new |= {name: value for name, value in others.items() if name not in os.environ}
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        # Sockets between ranks of a vLLM engine, which else stay behind in the temporary folder.
        new |= {"VLLM_RPC_BASE_PATH": str(folder)}
    if "RAY_AUTH_MODE" not in os.environ:
        new |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    compat.reload_authentication()
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log(line: str) -> None:
    """Log a line of Ray's; the pool's own error describes the death of a worker better."""
    level = logging.DEBUG if "worker died or was killed" in line else logging.WARNING
    logger.log(level, "Ray: %s", line)
