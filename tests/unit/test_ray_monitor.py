"""Ray monitor of a joined cluster, without Ray."""

import socket
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.watch import ray_monitor


def test_a_head_that_was_found_by_itself_is_watched(monkeypatch):
    """With RAY_ADDRESS=auto, too, where Ray ends a program a minute after the loss."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    context = SimpleNamespace(gcs_address=address)
    monkeypatch.setattr(ray_monitor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_monitor, "local_processes", dict)
    monkeypatch.setattr(ray_monitor, "HEAD_EVERY_S", 0.01)
    with closing(ray_monitor.RayMonitor(0.0)) as monitor:
        deadline = time.monotonic() + 10.0
        while not monitor.is_head_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(WorkerError, match=f"Ray's head at {address} does not answer"):
            monitor.check("actor.update")
