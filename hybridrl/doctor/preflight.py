"""Checks of the machines at the start of a run (doctor=quick or full)."""

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridrl.config.choices import DoctorChecks
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import LocalProbes, NodeProbes
from hybridrl.doctor import memory, placement, ray
from hybridrl.doctor.context import CheckContext
from hybridrl.doctor.findings import Stage, Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.inputs import stage as inputs
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.report import complaints
from hybridrl.doctor.stages import Check, run_stages

logger = logging.getLogger(__name__)

# All stages but training, which is a run itself.
STAGES: tuple[tuple[Stage, Check], ...] = (
    (Stage.host, host.check),
    (Stage.network, network.check),
    (Stage.ray, lambda case: ray.examine(case.agents, case.config.cluster.nodes)),
    (Stage.placement, placement.check),
    (Stage.inputs, inputs.check),
    (Stage.memory, memory.check),
)


class MachineError(ConfigError):
    """Failures of the machines, by node, with remedies."""

    subject = "of the machines; doctor=off starts the run all the same"


def preflight(result: Examined, machine: Machine, overrides: Sequence[str]) -> None:
    """Make the checks of `doctor.checks` on every node of the run, and log the warnings.

    With RAY_ADDRESS the process must have joined that cluster. `machine` has the nodes that the
    run may use.

    Raises:
        MachineError: every failure of the first stage that has one.
    """
    checks = result.config.doctor.checks
    if checks is DoctorChecks.none:
        return
    with run_nodes() as agents:
        quick = checks is DoctorChecks.quick
        assert result.shape is not None
        context = CheckContext(
            result.config, machine, result.shape, result.reward_shape, overrides, agents, quick
        )
        reports = list(run_stages(context, STAGES))
    for text in complaints(reports, Verdict.warn):
        logger.warning("%s", text)
    if failures := complaints(reports, Verdict.fail):
        raise MachineError(*failures)


@contextmanager
def run_nodes() -> Iterator[NodeProbes]:
    """Yield the nodes of the cluster at RAY_ADDRESS, or this machine.

    Raises:
        ConfigError: on entering, if the cluster cannot be joined.
    """
    if ray_address() is None:
        yield LocalProbes(socket.gethostname())
        return
    from hybridrl.controller.ray.ray_probes import RayProbes

    with RayProbes() as agents:
        yield agents
