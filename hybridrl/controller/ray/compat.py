"""Everything that depends on private names of Ray: patches, process ids, state of the head.

`PRIVATE_NAMES` lists the names; tests/unit/test_compat.py looks them up in the installed Ray.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ray._private import ray_constants, services, state, utils, worker
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient
from ray.actor import ActorHandle

# (module, attribute)
PRIVATE_NAMES = (
    ("ray._private.node", "Node.start_api_server"),
    ("ray._private.node", "Node.start_log_monitor"),
    ("ray._private.node", "Node.start_monitor"),
    ("ray._private.ray_constants", "ENABLE_RAY_CLUSTER"),
    ("ray._private.ray_constants", "PROCESS_TYPE_GCS_SERVER"),
    ("ray._private.ray_constants", "PROCESS_TYPE_RAYLET"),
    ("ray._private.services", "ConsolePopen"),
    ("ray._private.services", "canonicalize_bootstrap_address"),
    ("ray._private.services", "get_node"),
    ("ray._private.state", "actors"),
    ("ray._private.state", "available_resources_per_node"),
    ("ray._private.utils", "get_dashboard_dependency_error"),
    ("ray._private.utils", "set_sigterm_handler"),
    ("ray._private.worker", "_global_node"),
    ("ray._private.worker", "print_to_stdstream"),
    ("ray._raylet", "AuthenticationTokenLoader.instance"),
    ("ray._raylet", "AuthenticationTokenLoader.reset_cache"),
    ("ray._raylet", "Config.initialize"),
    ("ray._raylet", "GcsClient"),
    ("ray._raylet", "InnerGcsClient.get_all_node_info"),
    ("ray._raylet", "InnerGcsClient.internal_kv_get"),
    ("ray.actor", "ActorHandle._actor_id"),
)
# Seconds that a node may need to start, before Ray waits for it in its own way.
REGISTRATION_S = 10.0
_PROCESS_TYPES = {
    "GCS": ray_constants.PROCESS_TYPE_GCS_SERVER,
    "raylet": ray_constants.PROCESS_TYPE_RAYLET,
}


def local_processes() -> dict[str, int]:
    """Return the ids of the GCS and the raylet that this process has started, by name."""
    node = worker._global_node
    started = {} if node is None else node.all_processes
    return {
        name: started[kind][0].process.pid
        for name, kind in _PROCESS_TYPES.items()
        if kind in started
    }


def cluster_address() -> str:
    """Return the address of the cluster that RAY_ADDRESS=auto finds; empty if there is none."""
    try:
        return services.canonicalize_bootstrap_address("auto") or ""
    except ConnectionError:
        return ""


def local_folder() -> Path:
    """Return the folder of the Ray that this process has started."""
    return Path(worker._global_node.temp_dir)


def free_resources() -> dict[str, dict[str, float]]:
    """Return the resources of each node that no task, actor or placement group holds, by NodeID."""
    return state.available_resources_per_node()


def actor_state(actor: ActorHandle) -> Mapping[str, Any]:
    """Return the head's record of an actor."""
    return state.actors(actor._actor_id.hex())


def head_client(address: str) -> GcsClient:
    """Connect to the head at HOST:PORT without joining its cluster."""
    return GcsClient(address=address)


def reload_authentication() -> None:
    """Read mode and token again, which Ray's C++ side caches for the life of the process."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def keep_signal_handlers() -> AbstractContextManager[None]:
    """Keep ray.init from replacing the handler of SIGTERM; it has no option for that."""
    return _replaced(utils, "set_sigterm_handler", lambda handler: None)


def own_process_groups() -> AbstractContextManager[None]:
    """Start Ray's processes, and thereby workers, out of reach of Ctrl-C in the terminal."""
    return _replaced(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0))


def loopback_only() -> AbstractContextManager[None]:
    """Listen on 127.0.0.1, which Ray does only where it cannot form clusters."""
    return _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextmanager
def essential_processes() -> Iterator[None]:
    """Start neither autoscaler, dashboard nor forwarding of logs, which a run does not use.

    The dashboard's part in each node is then that of an installation without the dashboard. On two
    cores all this is a third of Ray's start; ray.init has no option for it.
    """
    unused = ImportError("the dashboard is not used")
    with ExitStack() as stack:
        for start in ("start_monitor", "start_api_server", "start_log_monitor"):
            stack.enter_context(_replaced(Node, start, lambda self, **_: None))
        stack.enter_context(_replaced(utils, "get_dashboard_dependency_error", lambda: unused))
        yield


def prompt_registration() -> AbstractContextManager[None]:
    """Find the node as soon as it has started; ray.init looks for it once a second."""
    look = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        client, end = head_client(gcs_address), time.monotonic() + REGISTRATION_S
        while time.monotonic() < end:
            if any(node.hex() == node_id for node in client.get_all_node_info()):
                break
            time.sleep(0.02)
        return look(gcs_address, node_id)

    return _replaced(services, "get_node", get_node)


def messages_to(log: Callable[[str], None]) -> AbstractContextManager[None]:
    """Send each line that Ray would print about its processes to `log`."""

    def print_lines(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            log(line)

    return _replaced(worker, "print_to_stdstream", print_lines)


@contextmanager
def _replaced(owner: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)
