"""The doctor's processes on all hosts of a bench, called from the tests."""

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.namespaces import Host

JOIN_PORT = 19400


class Driver:
    """The doctor's processes on all hosts, called from the tests; the first host is the head."""

    def __init__(self, hosts: list[Host]) -> None:
        head, *others = hosts
        place = f"{head.address}:{JOIN_PORT}"
        code = "import sys; from tests.support.namespace_agents import {0}; {0}(*sys.argv[1:])"
        command = [sys.executable, "-c"]
        key = {"HYBRIDRL_DOCTOR_KEY": secrets.token_hex(32)}
        self._head = head.start(
            *command,
            code.format("drive"),
            place,
            str(len(hosts)),
            env=key,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._others = [
            host.start(*command, code.format("join"), place, env=key, stdin=subprocess.DEVNULL)
            for host in others
        ]

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """`function(agents, *arguments, **named)` in the head's process."""
        pickle.dump((function, arguments, named), self._head.stdin)
        self._head.stdin.flush()
        value, error = pickle.load(self._head.stdout)
        assert not error, error
        return value

    def close(self) -> None:
        """End the processes."""
        self._head.stdin.close()
        for process in (self._head, *self._others):
            process.wait(timeout=30)
        self._head.stdout.close()


@contextlib.contextmanager
def driver(hosts: list[Host]) -> Iterator[Driver]:
    """The doctor's processes on these hosts for the time of the block."""
    made = Driver(hosts)
    try:
        yield made
    finally:
        made.close()


def drive(place: str, nodes: str) -> None:
    """The head's process: calls come on stdin and are answered on stdout, pickled."""
    from hybridrl.doctor.joined import joined_probes

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with joined_probes(place, int(nodes), timeout_s=30) as agents:
        while True:
            try:
                function, arguments, named = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = function(agents, *arguments, **named), ""
            except Exception as error:  # told to the test that asked
                answer = None, f"{type(error).__name__}: {error}"
            pickle.dump(answer, answers)
            answers.flush()


def join(place: str) -> None:
    """The process of every other host."""
    from hybridrl.doctor.joined import serve

    serve(place, timeout_s=30)


def set_environment(values: dict[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_environments(agents: Any, values: dict[str, dict[str, str | None]]) -> None:
    """Set variables of the processes on some nodes, by node."""
    answers = agents.call_each(set_environment, {n: (v,) for n, v in values.items()}, 5.0)
    assert not any(answer.error for answer in answers.values()), answers


def only(findings: list[Any], check: str, node: str | None = None) -> Any:
    """The one finding of a check (on a node)."""
    (found,) = [f for f in findings if f.check == check and node in (None, f.node)]
    return found


def summed(agents: Any) -> list[Any]:
    """The findings of the all-reduce alone, whatever else is wrong."""
    from hybridrl.controller.ray.node_probes import call_all
    from hybridrl.doctor.network import ranks
    from hybridrl.doctor.network.nodes import look

    views = {node: answer.value for node, answer in call_all(agents, look, "").items()}
    return ranks.check(agents, views, agents.addresses, on_gpu=False)


def network_over_ray(ports: list[int]) -> list[Any]:
    """The quick findings of the stage network for the nodes of the cluster at RAY_ADDRESS."""
    from hybridrl.controller.ray.ray_probes import RayProbes
    from hybridrl.doctor.network.stage import examine

    with RayProbes() as agents:
        return examine(agents, ports, on_gpu=False, quick=True)


def stage_of_two(agents: Any, unfit: tuple[str, ...], *, quick: bool) -> list[Any]:
    """The findings of the stage network for a run on two of the nodes, none of them `unfit`."""
    from hybridrl.config.planner.model_shape import model_shape
    from hybridrl.doctor.findings import Stage
    from hybridrl.doctor.network import stage as network
    from hybridrl.doctor.stages import CheckContext, run_stages
    from tests.support.model_shapes import TINY
    from tests.support.run_configs import MACHINE, run_config

    config = run_config()
    config.cluster.nodes, config.cluster.rendezvous_ports = 2, [29500, 29503]
    shape = model_shape(TINY)
    case = CheckContext(config, MACHINE, shape, (), (), agents, quick, unfit=frozenset(unfit))
    (report,) = run_stages(case, [(Stage.network, network.check)])
    return report.findings
