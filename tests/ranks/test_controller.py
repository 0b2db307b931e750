"""Worker groups on real Ray: dispatch, logs, and whose fault a failure is."""

import gc
import os
import re
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray

from hybridrl.config.choices import NVLinkMulticast
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.multicast import SWITCHES
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.pool import Pool
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.rendezvous import open_store, port_band
from hybridrl.controller.worker_group import Call, begin_together, build_roles, call_together
from hybridrl.data.shardable import Piece
from tests.support.controller_roles import AdderConfig, Numbers
from tests.support.controller_run import pool_config

PREFIXES = ("CUDA", "HYBRIDRL", "NCCL", "NVSHMEM", "PYTORCH", "TORCH", "VLLM")
# What the user sets: variables of libraries, and of NVLink multicast the opposite of NCCL's switch.
OF_USER = {f"{prefix}_FROM_USER": "4 2" for prefix in PREFIXES} | {"NCCL_NVLS_ENABLE": "1"}
OTHER_SWITCHES = {name: value for name, value in SWITCHES.items() if name not in OF_USER}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What the user sets reaches the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        for name in SWITCHES:
            patch.delenv(name, raising=False)
        for name, value in OF_USER.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def runtime(one_thread, tmp_path_factory):
    config = pool_config(tmp_path_factory.mktemp("runtime"))
    room_for_two_pools = replace(config.cluster, gpus_per_node=4)
    with ray_runtime(room_for_two_pools, config.accelerator):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def groups(runtime, folder):
    """Roles `single` and `second` with one rank per shard, `engine` with both ranks in one."""
    single = AdderConfig(api_key="hunter22-of-a-role")
    roles = {"single": single, "second": AdderConfig(), "engine": AdderConfig(engine=2)}
    with Pool(pool_config(folder, engine=2, multicast=NVLinkMulticast.off)).join() as pool:
        yield build_roles(pool, roles)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_sharded_results_come_back_in_order(groups, count):
    numbers = Numbers(list(range(count)))
    # Odd positions were computed by rank 1, which says so in the thousands.
    expected = [v + 30 + 1000 * (v % 2) for v in range(count)]
    assert groups["single"].call("add", numbers, 10, times=3) == Numbers(expected)


def test_an_engine_answers_through_its_first_rank(groups):
    group = groups["engine"]
    assert (group.num_ranks, group.num_shards) == (2, 1)
    assert group.call("add", Numbers([1, 2, 3]), 1) == Numbers([2, 3, 4])


def test_reduced_results_are_rank_zeros(groups):
    result = groups["single"].call("total", Numbers([1, 2, 3, 4]))
    assert result == {"total": 10, "rank": 0}


def test_roles_answer_together(groups):
    """One call, two roles, one batch; each result is put together as its method promises."""
    calls = {
        "sum": Call(groups["single"], "add", (10,), {"times": 3}),
        "total": Call(groups["second"], "total"),
        "slow": Call(groups["second"], "add_slowly", (0.2,)),
    }
    outcomes = call_together(calls, Numbers([1, 2, 3]))
    assert outcomes["sum"].value == Numbers([31, 1032, 33])
    assert outcomes["total"].value == {"total": 6, "rank": 0}
    assert outcomes["slow"].value == Numbers([1, 1002, 3])
    assert outcomes["slow"].span.seconds >= 0.2 > outcomes["sum"].span.seconds
    assert outcomes["slow"].span.name == "second.add_slowly"


def test_the_driver_is_free_while_the_workers_work(groups):
    start = time.monotonic()
    results = begin_together({"slow": Call(groups["single"], "add_slowly", (0.5,))}, Numbers([1]))
    assert time.monotonic() - start < 0.4
    assert results()["slow"].value == Numbers([1])
    assert time.monotonic() - start >= 0.5


def test_roles_of_different_shards_cannot_be_called_together(groups):
    calls = {name: Call(groups[name], "add", (1,)) for name in ("single", "engine")}
    with pytest.raises(ValueError):
        call_together(calls, Numbers([1]))


def test_a_failure_among_calls_names_its_method(groups):
    calls = {
        "sum": Call(groups["single"], "add", (10,)),
        "wrong": Call(groups["second"], "add", ("ten",)),
    }
    with pytest.raises(WorkerError, match=r"failed in second\.add: TypeError") as caught:
        call_together(calls, Numbers([1, 2]))
    assert caught.value.phase == "second.add"


class Counted:
    """Counts how often it is sent."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return (int, (5,))


class Kept(Numbers):
    """Numbers in pieces that are kept: the same number on all ranks, and one to add to it."""

    def __init__(self, first: Piece, more: list[Piece]) -> None:
        super().__init__([0, 0])
        object.__setattr__(self, "cut", [[first, *more]] * 2)

    def pieces(self, num_shards):
        return self.cut

    @staticmethod
    def assemble(contents):
        return Numbers([sum(contents)])


def test_what_was_sent_is_not_sent_again(groups):
    first, second = Counted(), Counted()

    def base():
        return first

    assert groups["single"].call("add", Kept(base, []), 1).values == [6, 1006]
    more = Kept(base, [lambda: second])
    assert groups["single"].call("add", more, 1).values == [11, 1011]
    assert groups["second"].call("add", more, 1).values == [11, 1011]
    assert (first.times, second.times) == (1, 1)


def test_what_was_sent_is_let_go_with_its_piece(groups):
    stored = groups["single"].pool.store._stored
    before = len(stored)
    piece = partial(Counted)
    groups["single"].call("add", Kept(piece, []), 1)
    assert len(stored) == before + 1
    del piece
    gc.collect()
    assert len(stored) == before


def test_broadcast_lists_ranks_and_rank_zero_answers_alone(groups):
    about = groups["single"].call("about")
    assert [(entry["RANK"], entry["LOCAL_RANK"]) for entry in about] == [("0", "0"), ("1", "1")]
    assert groups["single"].call("who") == 0


def test_workers_have_the_drivers_priority(groups):
    """Ray's default of 15 leaves them nothing beside a busy program."""
    found = [psutil.Process(host.pid).nice() for host in groups["single"].hosts]
    assert found == [psutil.Process().nice()] * 2


def test_process_environment(groups):
    first, second = groups["single"].call("about")
    assert first["pid"] != second["pid"]
    for entry in (first, second):
        assert entry["WORLD_SIZE"] == "2"
        assert (OF_USER | OTHER_SWITCHES).items() <= entry["environment"].items()
        assert (entry["OMP_NUM_THREADS"], entry["threads"]) == ("1", 1)
        assert entry["mesh"] == (1, 2)
        assert entry["others"] == ["engine", "second", "single"]
        assert entry["main_thread"]
        assert entry["imported_by"].startswith("import ahead")


def test_on_one_node_the_ranks_meet_in_a_file_of_the_user_and_at_no_port(groups, folder):
    texts = [log.read_text() for log in sorted((folder / "logs").glob("*_rank?.log"))]
    places = {
        re.search(r"Rendezvous\(address='(.*?)', port=(\d+)", text).groups() for text in texts
    }
    ((path, port),) = places
    assert (port, Path(path).stat().st_mode & 0o777) == ("0", 0o600)
    ours = [psutil.Process(entry["pid"]) for entry in groups["single"].call("about")]
    heard = [c.laddr.port for p in ours for c in p.net_connections() if c.status == "LISTEN"]
    assert not {*heard} & {*port_band(29500, 29599)}


def test_two_kinds_of_ranks_work_at_the_same_time_and_a_failure_of_one_ends_the_others_call(
    runtime, tmp_path
):
    """Each is rank 0 of a group of its own, and messages number all ranks."""
    config = pool_config(tmp_path)
    fsdp = replace(config.fsdp, dp_shard=1)
    with Pool(replace(config, fsdp=fsdp, engine_ranks=1)).join() as pool:
        assert pool.parts == [range(1), range(1, 2)]
        second = build_roles(pool, {"second": AdderConfig()}, pool.parts[1])["second"]
        first = build_roles(pool, {"first": AdderConfig()}, pool.parts[0])["first"]
        wait = second.begin("add", Numbers([1, 2]), 10)
        assert first.call("who") == 0
        assert wait() == Numbers([11, 12])
        second.begin("complain", 0)
        since = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 on .* failed in second\.complain"):
            first.call("add_slowly", Numbers([1]), 30.0)
        assert time.monotonic() - since < 15.0


def test_what_cannot_be_imported_ahead_is_told_when_a_role_is_built(runtime, tmp_path):
    config = replace(pool_config(tmp_path), ahead=[AdderConfig(ahead="not_there")])
    with (
        Pool(config).join() as pool,
        pytest.raises(WorkerError, match="No module named 'not_there'"),
    ):
        build_roles(pool, {"adder": AdderConfig()})


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_second_ray_is_refused_and_the_first_stays(runtime, tmp_path, monkeypatch, address):
    """As of two trainers in a notebook."""
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = pool_config(tmp_path)
    with (
        pytest.raises(ConfigError, match="this process uses Ray already"),
        ray_runtime(config.cluster, config.accelerator),
    ):
        pass
    assert ray.is_initialized()


def test_processes_that_are_not_needed_leave_nothing(runtime, tmp_path):
    """The driver refuses the run while they import."""
    with Pool(pool_config(tmp_path)) as pool:
        pids = [host.pid for host in pool.hosts]
        # Messages name the logs that are there, before ranks have theirs.
        assert {*(tmp_path / "logs").iterdir()} == {host.log_file for host in pool.hosts}
        start = time.monotonic()
    assert time.monotonic() - start < 5.0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_ranks_meet_where_the_user_says(runtime, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    monkeypatch.setenv("MASTER_PORT", port)
    with Pool(pool_config(tmp_path)).join() as pool:
        about = build_roles(pool, {"adder": AdderConfig()})["adder"].call("about")
        told = {(r["environment"]["MASTER_ADDR"], r["environment"]["MASTER_PORT"]) for r in about}
        with socket.create_connection(("127.0.0.2", int(port)), 1.0):
            assert told == {("127.0.0.2", port)}


class WithRankOneElsewhere(Pool):
    """The address of rank 0's store leads rank 1 to one of this process."""

    def _start_step(self, hosts, method, arguments):
        if method == "join_rendezvous":
            self.store, elsewhere = open_store("127.0.0.3", [0], 2, 60.0)
            first, (where, *rest) = arguments
            arguments = [first, (elsewhere._replace(holder=where.holder), *rest)]
        return super()._start_step(hosts, method, arguments)


def test_a_rank_that_joined_another_rendezvous_is_named(runtime, tmp_path):
    told = rf"rank 1 .*127\.0\.0\.3:\d+ should be of .* and is of .*{os.getpid()}"
    with pytest.raises(WorkerError, match=told):
        WithRankOneElsewhere(pool_config(tmp_path)).join()


def test_unmarked_method_is_refused_before_anything_is_sent(groups):
    with pytest.raises(AttributeError, match=r"Adder\.unmarked is not marked"):
        groups["single"].call("unmarked")


def test_output_goes_to_one_log_file_per_rank(groups, folder):
    logs = sorted((folder / "logs").iterdir())
    assert [re.sub(".*_", "", log.name) for log in logs] == ["rank0.log", "rank1.log"]
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert f"printed by rank {rank}" in text
        assert "written below Python" in text
        assert "built single (tests.support.controller_roles.Adder)" in text
        assert f"printed by rank {rank} with the key ***" in text
        assert "logged with the key ***" in text and "hunter22" not in text


def test_unpicklable_exception_arrives_with_its_root(groups, folder):
    with pytest.raises(WorkerError) as caught:
        groups["engine"].call("complain", 1)
    message = str(caught.value)
    assert (caught.value.ranks, caught.value.phase) == ([1], "engine.complain")
    assert message.startswith("rank 1 on ")
    assert "UnpicklableError: no way back" in message
    assert "KeyError: 'the root'" in message
    assert str(folder / "logs") in message


def test_config_error_of_a_worker_stays_one(groups):
    with pytest.raises(ConfigError, match="float8: not on this device"):
        groups["single"].call("refuse")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "ValueError: the first domino"),
        ("die", "its process died"),
        ("exit", "SystemExit: 3"),
        pytest.param(
            "hang",
            "no rank made progress in adder.fail_in_collective for cluster.stall_timeout_s=5 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rank_at_fault_is_named(runtime, tmp_path, how, says):
    """The others wait for it in a barrier; their complaints are not the story."""
    memory = f"/dev/shm/hybridrl_test_{os.getpid()}_{how}"
    with Pool(pool_config(tmp_path, stall_s=5.0)).join() as pool:
        group = build_roles(pool, {"adder": AdderConfig(shared_memory=memory)})["adder"]
        pids = [host.pid for host in pool.hosts]
        for entry in group.call("about"):
            assert OF_USER.items() <= entry["environment"].items()
            assert not OTHER_SWITCHES.keys() & entry["environment"].keys()
        assert Path(f"{memory}_1").exists()
        start = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            group.call("fail_in_collective", 1, how)
        failing = time.monotonic() - start
        start = time.monotonic()
    closing = time.monotonic() - start
    message = str(caught.value)
    assert says in message
    assert caught.value.phase == "adder.fail_in_collective"
    log = next((tmp_path / "logs").glob("*_rank1.log"))
    assert str(log) in message
    if how == "hang":
        assert caught.value.ranks == [0, 1]
        assert "sleep_at_this_place" in log.read_text()
    else:
        assert caught.value.ranks == [1]
        assert failing < 5.0
    assert closing < 10.0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not list(Path("/dev/shm").glob(f"{Path(memory).name}*"))
