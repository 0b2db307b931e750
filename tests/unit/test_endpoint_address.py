"""Addresses of the endpoint, checked before engines start."""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from hybridrl.commands import serve
from hybridrl.config.errors import ConfigError
from hybridrl.trainer.factory import open_environment
from tests.support.run_configs import run_config


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another server listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_run_on_a_taken_port_does_not_start(taken):
    config = run_config("algorithm=grpo", "environment=calculator_agent", f"agent.port={taken}")
    with ExitStack() as stack:
        with pytest.raises(ConfigError, match=f"agent.port = {taken}.*Address already in use"):
            open_environment(config, stack)
        config.agent = replace(config.agent, host="::1", port=0)
        with pytest.raises(ConfigError, match=r"agent\.host = ::1, agent\.port = 0, but"):
            open_environment(config, stack)


def test_serve_does_not_start_on_an_address_that_it_cannot_use(taken, monkeypatch, capsys):
    for host, port in (("127.0.0.1", taken), ("::1", 0), ("127.0.0.1", 70000)):
        arguments = ["embedded", "--host", host, "--port", str(port), "hardware=cpu"]
        monkeypatch.setattr(sys, "argv", ["hybridrl", *arguments])
        with pytest.raises(SystemExit) as end:
            serve.main()
        assert end.value.code == 2
        assert f"- --host {host} --port {port}, but" in capsys.readouterr().err


def test_serve_refuses_a_wrong_option(monkeypatch, capsys):
    """The endpoint reads what follows a dot in a key as another part."""
    for option, value, message in (
        ("--key", "my.key", "--key has other characters than letters"),
        ("--other-sampling", "none", "invalid choice: 'none'"),
    ):
        monkeypatch.setattr(sys, "argv", ["hybridrl", "embedded", option, value])
        with pytest.raises(SystemExit) as end:
            serve.main()
        told = capsys.readouterr().err
        assert end.value.code == 2 and message in told and "OtherSampling" not in told
