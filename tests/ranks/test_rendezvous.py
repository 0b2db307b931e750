"""The port on which the ranks meet: where it lies, that it is held, and what is said if not.

Also who has met whom: a rank that joined another store than rank 0's is found out.
"""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, FileStore, TCPStore

from hybridrl.config.errors import ConfigError
from hybridrl.controller.rendezvous import (
    Rendezvous,
    given_port,
    join_store,
    listen,
    open_file_store,
    open_store,
    port_band,
)

LOOPBACK = "127.0.0.1"
NOBODY, REFUSED = 65534, 13


@pytest.fixture
def ephemeral(tmp_path):
    def write(low, high):
        file = tmp_path / "ip_local_port_range"
        file.write_text(f"{low}\t{high}\n")
        return file

    return write


def free_ports(count):
    """Ports that were free a moment ago, in rising order."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return sorted(listener.getsockname()[1] for listener in listeners)


def is_listening(address, port):
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (32768, 60999, range(29500, 29600)),
        (1024, 29499, range(29500, 29600)),
        (20000, 60999, range(19900, 20000)),
        (29599, 60999, range(29499, 29599)),
        (10000, 29500, range(9900, 10000)),
        (1124, 60999, range(1024, 1124)),
        # No room below: a port of the ephemeral range is better than none.
        (1123, 60999, range(29500, 29600)),
    ],
)
def test_the_band_lies_outside_the_ephemeral_ports(low, high, expected, ephemeral):
    assert port_band(29500, 29599, ephemeral(low, high)) == expected


def test_ports_in_use_are_passed_over_and_ranks_meet_on_the_next():
    first, second, third = free_ports(3)
    with socket.create_server((LOOPBACK, first)), socket.create_server((LOOPBACK, second)):
        store, where = open_store(LOOPBACK, [first, second, third], 1, 20.0)
        assert where[:3] == (LOOPBACK, third, 1)
        join_store(where, 10.0).set("key", "value")
        assert store.get("key") == b"value"


def test_the_port_is_held_and_given_back():
    (port,) = free_ports(1)
    store, where = open_store(LOOPBACK, [port], 1, 20.0)
    with pytest.raises(
        ConfigError, match=f"port {port} is in use on rank 0's node(?s:.*)MASTER_PORT"
    ):
        open_store(LOOPBACK, [port], 1, 20.0)
    del store
    assert open_store(LOOPBACK, [port], 1, 20.0)[1] == where


def test_without_a_free_port_the_band_is_named():
    first, second = free_ports(2)
    with (
        socket.create_server((LOOPBACK, first)),
        socket.create_server((LOOPBACK, second)),
        pytest.raises(ConfigError, match=f"ports {first} to {second} are(?s:.*)rendezvous_ports"),
    ):
        open_store(LOOPBACK, [first, second], 1, 20.0)


@pytest.fixture
def meeting_file():
    """Rank 0's store in a file, and where it is."""
    store, where = open_file_store(2, 20.0)
    yield store, where
    Path(where.address).unlink()


def test_ranks_of_one_node_meet_in_a_file(meeting_file):
    store, where = meeting_file
    other = join_store(where, 10.0)
    other.set("key", "value")
    assert store.get("key") == b"value"
    stranger = FileStore(f"{where.address}.stranger")
    with pytest.raises(RuntimeError) as caught:
        join_store(where._replace(address=stranger.path), 10.0)
    Path(stranger.path).unlink()
    told = f"rendezvous {stranger.path} should be of {where.holder}, and is of no rank 0"
    assert told in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_node_cannot_join(meeting_file):
    _, where = meeting_file
    child = os.fork()
    if child == 0:  # what follows may end in no test of its own
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            join_store(where, 1.0).set("key", "of nobody")
        except DistStoreError as error:
            os._exit(REFUSED if "Permission denied" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == REFUSED


def test_on_loopback_nobody_else_can_connect():
    (port,) = free_ports(1)
    store, _ = open_store(LOOPBACK, [port], 1, 20.0)
    assert is_listening(LOOPBACK, port)
    # All of 127.0.0.0/8 is this machine.
    assert not is_listening("127.0.0.2", port)
    del store


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_an_address_that_only_others_know_is_no_error(address):
    """MASTER_ADDR may name this node as others see it: then all of its own addresses listen."""
    (port,) = free_ports(1)
    with listen(address, [port]):
        assert is_listening(LOOPBACK, port)
        assert is_listening("127.0.0.2", port)


def test_a_name_listens_on_all_addresses():
    """Debian's /etc/hosts gives a node's own name the address 127.0.1.1; others know another."""
    (port,) = free_ports(1)
    with listen(socket.gethostname(), [port]):
        assert is_listening(LOOPBACK, port)
        assert is_listening("127.0.0.2", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_ipv6_addresses_listen_on_themselves_alone():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        port = probe.getsockname()[1]
    with listen("::1", [port]):
        assert not is_listening(LOOPBACK, port)


@pytest.mark.parametrize("text", ["abc", "0", "65536", "-1"])
def test_a_master_port_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(ConfigError, match="MASTER_PORT="):
        given_port()
    monkeypatch.setenv("MASTER_PORT", "")
    assert given_port() is None


@pytest.fixture
def meeting():
    """Rank 0's store for two ranks, and where it is."""
    return open_store(LOOPBACK, [0], 2, 20.0)


def test_ranks_that_have_joined_rank_zeros_store_agree(meeting):
    store, where = meeting
    join_store(where, 10.0).set("key", "value")
    assert store.get("key") == b"value"


def test_a_rank_that_has_joined_another_run_is_named(meeting):
    _, where = meeting
    with pytest.raises(RuntimeError) as caught:
        join_store(where._replace(holder="another-host pid 7"), 10.0)
    told = f"{LOOPBACK}:{where.port} should be of another-host pid 7, and is of {where.holder}."
    assert told in str(caught.value)


def test_a_rank_that_meets_a_stranger_at_the_same_address_is_named():
    """Where MASTER_ADDR is localhost, every node has a port of that number of its own."""
    stranger = TCPStore(LOOPBACK, 0, 1, is_master=True, wait_for_workers=False)
    where = Rendezvous(LOOPBACK, stranger.port, 2, "another-host pid 7")
    told = f"{LOOPBACK}:{where.port} should be of another-host pid 7, and is of no rank 0"
    with pytest.raises(RuntimeError, match=told):
        join_store(where, 10.0)
