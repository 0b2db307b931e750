"""Starting Ray for a run, or joining a cluster, and leaving nothing behind.

Ray is told to keep its files in a folder of ours, to listen on the loopback interface, and to use
a token that lives in the environment of its processes: nobody else on the machine can reach it,
and nothing is written to the home directory. All its processes are known by an environment
variable that they inherit, orphans included.
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
from hybridrl.config.command.secrets import is_secret_variable
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ClusterConfig
from hybridrl.controller import processes
from hybridrl.controller.ray import compat
from hybridrl.controller.ray.head import connect, head_place, ray_address
from hybridrl.controller.signals import SignalGuard, shielded
from hybridrl.controller.watch.janitor import Janitor
from hybridrl.controller.watch.ray_monitor import is_local_ray_broken
from hybridrl.controller.watch.waiting import call_with_timeout, join_abandoned_calls

logger = logging.getLogger(__name__)

# Marks every process that descends from a Ray started here; its value is the run's folder.
MARK = "HYBRIDRL_RAY"
# Sockets lie below Ray's folder, and the kernel limits their paths to 107 bytes.
MAX_TEMP_ROOT = 24
STOP_GRACE_S = 3.0
# Ray takes a second, and about five where its processes are gone.
SHUTDOWN_LIMIT_S = 20.0
# Seconds that calls into a joined cluster get to come back before it is left.
CALLS_LIMIT_S = 3.0
# Set by users for libraries in the workers; processes on other nodes would not inherit it.
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
# The secret that workers need: to load a model or data set that not everybody may have.
DOWNLOAD_TOKEN = "HF_TOKEN"
# Workers must see all GPUs of their node: vLLM's custom all-reduce indexes them by rank.
ALL_GPUS_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
MIB = 2**20


@contextmanager
def ray_runtime(cluster: ClusterConfig, accelerator: Accelerator) -> Iterator[None]:
    """Ray for the time of the block, which is to run in the main thread.

    RAY_ADDRESS joins that cluster; else Ray is started here and ended afterwards with everything
    it started, whether the block succeeds, fails or is interrupted. SIGINT and SIGTERM become
    `Interrupted` in the block; a pool started in it is to be closed in it.

    Args:
        cluster: what to start: gpus_per_node slots; joined clusters have their own size.
        accelerator: whether slots are GPUs or CPU slots.

    Raises:
        ConfigError: RAY_ADDRESS does not name a cluster that can be joined.
        Interrupted: a signal came.
    """
    with SignalGuard(), compat.messages_to(_log), ExitStack() as stack:
        if ray_address():
            stack.callback(_leave)
            _join(worker_environment(os.environ))
        else:
            with shielded():  # a signal in between would leave the folder behind
                folder = _make_folder()
                janitor = Janitor(MARK, folder)
                stack.callback(janitor.dismiss)
                stack.callback(_stop, folder)
            _start(folder, cluster, accelerator)
        yield


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers on any node need of the driver's environment.

    CUDA_VISIBLE_DEVICES is not passed on: each node has its own.
    """
    passed = {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED_ON)
        and name != "CUDA_VISIBLE_DEVICES"
        # Ray shows a job's variables to all who may ask it.
        and (not is_secret_variable(name) or name == DOWNLOAD_TOKEN)
    }
    return passed | ALL_GPUS_VISIBLE


@contextmanager
def joined_cluster(environment: Mapping[str, str]) -> Iterator[None]:
    """The cluster at RAY_ADDRESS joined for the time of the block, by `environment` in workers.

    Raises:
        ConfigError: the cluster cannot be joined.
    """
    with ExitStack() as stack:
        stack.callback(_leave)
        _join(environment)
        yield


def _leave() -> None:
    """Leave a cluster that was joined.

    Ray ends a process to which a call comes back afterwards, without a word: calls that were given
    up get a moment to come back before.
    """
    join_abandoned_calls(CALLS_LIMIT_S)
    ray.shutdown()


def _join(environment: Mapping[str, str]) -> None:
    address = os.environ["RAY_ADDRESS"]
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address} names a Ray client server; workers could not be reached.\n"
            "Run on a node of the cluster and set RAY_ADDRESS=<head node>:6379, or auto."
        )
    place = head_place(address)
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
            f"RAY_ADDRESS={address}: the cluster asks for another token or none.\n"
            "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the head's, which may have taken one "
            "from its ~/.ray/auth_token; or RAY_AUTH_MODE=disabled, if its nodes were started so."
        ) from error
    except (ConnectionError, ValueError, RuntimeError, RaySystemError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, why: object) -> ConfigError:
    return ConfigError(
        f"RAY_ADDRESS={address}: no Ray cluster answers there ({why}).\n"
        "Start it with `ray start --head`, or unset RAY_ADDRESS to use this machine alone."
    )


def _make_folder() -> Path:
    root = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="hybridrl-", dir=root if len(root) <= MAX_TEMP_ROOT else "/tmp")
    )


def _start(folder: Path, cluster: ClusterConfig, accelerator: Accelerator) -> None:
    slots = cluster.gpus_per_node
    assert slots is not None, "cluster.gpus_per_node is resolved before Ray starts"
    start = time.perf_counter()
    # An exception in the middle of ray.init may get lost there; a few seconds can be waited for.
    with (
        shielded(),
        _environment(folder),
        compat.loopback_only(),
        compat.keep_signal_handlers(),
        compat.own_process_groups(),
    ):
        ray.init(
            address="local",
            num_cpus=slots,
            num_gpus=slots if accelerator is Accelerator.gpu else 0,
            object_store_memory=_object_store_bytes(accelerator),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder / "r"),
        )
    logger.debug("Ray started in %.1f s", time.perf_counter() - start)


def _stop(folder: Path) -> None:
    """Shut Ray down, wait until every process it started is gone, and delete its folder."""
    with shielded():
        start = time.perf_counter()
        started = processes.ray_processes(MARK, folder)
        if not is_local_ray_broken():
            ray.shutdown()
        else:  # it would wait for what is dead or stopped
            processes.wait_or_kill(started, 0.0)
            try:
                call_with_timeout(SHUTDOWN_LIMIT_S, ray.shutdown)
            except TimeoutError:
                logger.error("Ray did not shut down within %g s", SHUTDOWN_LIMIT_S)
            except RayError as error:
                logger.error("Ray did not shut down in order: %s", error)
        left = processes.wait_or_kill(started, STOP_GRACE_S)
        # Those that were born while the others were asked to end.
        left += processes.wait_or_kill(processes.ray_processes(MARK, folder), 0.0)
        shutil.rmtree(folder, ignore_errors=True)
        if left:
            logger.error("still running after SIGKILL: %s", ", ".join(map(str, left)))
        logger.debug("Ray stopped in %.1f s", time.perf_counter() - start)


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """The environment Ray's processes are born with, taken back in this one afterwards."""
    new = ALL_GPUS_VISIBLE | {MARK: str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        # Sockets between the ranks of a vLLM engine; among the temporary files they would stay.
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


def _object_store_bytes(accelerator: Accelerator) -> int:
    """A store for a few steps' batches, at most half of what /dev/shm has free."""
    wanted = processes.STORE_BYTES[accelerator]
    free = shutil.disk_usage(processes.SHARED_MEMORY).free
    return max(80 * MIB, min(wanted, free // 2))
