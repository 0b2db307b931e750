"""What a run checks of its machines by itself, before it starts anything (doctor=quick)."""

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
from hybridrl.doctor import memory, placement
from hybridrl.doctor.catalog import Stage
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.inputs import stage as inputs
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.ray import services as ray_services
from hybridrl.doctor.report import complaints
from hybridrl.doctor.stages import Case, Check, run_stages

logger = logging.getLogger(__name__)

# All stages but the last, which is a run itself.
STAGES: tuple[tuple[Stage, Check], ...] = (
    (Stage.host, host.check),
    (Stage.network, network.check),
    (Stage.ray, ray_services.check),
    (Stage.placement, placement.check),
    (Stage.inputs, inputs.check),
    (Stage.memory, memory.check),
)


class MachineError(ConfigError):
    """What a run would fail at, on which node, and what to type."""

    subject = "of the machines; doctor=off starts the run all the same"


def preflight(result: Examined, machine: Machine, overrides: Sequence[str]) -> None:
    """Make the checks that `doctor` asks for, on every node of the run; log the warnings.

    With RAY_ADDRESS the process must have joined that cluster.

    Args:
        result: the run's config, checked.
        machine: what the run may use.
        overrides: as composed.

    Raises:
        MachineError: every failure of the first stage that has one.
    """
    checks = result.config.doctor.checks
    if checks is DoctorChecks.none:
        return
    with _nodes() as agents:
        quick = checks is DoctorChecks.quick
        case = Case.of(result, machine, overrides, agents, quick=quick)
        reports = list(run_stages(case, STAGES))
    for text in complaints(reports, Verdict.warn):
        logger.warning("%s", text)
    if failures := complaints(reports, Verdict.fail):
        raise MachineError(*failures)


@contextmanager
def _nodes() -> Iterator[NodeProbes]:
    if ray_address() is None:
        yield LocalProbes(socket.gethostname())
        return
    from hybridrl.controller.ray.ray_probes import RayProbes

    with RayProbes() as agents:
        yield agents
