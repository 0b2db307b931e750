"""`python -m hybridrl.doctor`: every check for the run with the same overrides.

    python -m hybridrl.doctor +recipe=gsm8k_ppo                       this machine
    RAY_ADDRESS=10.0.0.1:6379 python -m hybridrl.doctor +recipe=gsm8k_ppo cluster.nodes=2
    python -m hybridrl.doctor --join 10.0.0.1:29600 --nodes 2 +recipe=gsm8k_ppo cluster.nodes=2
                                      on every node, before Ray; with the same HYBRIDRL_DOCTOR_KEY

Exit codes: 0 no failure, 1 warnings and --strict, 2 failures or a wrong config, 129
SIGHUP, 130 Ctrl-C, 143 SIGTERM. The report is always written.
"""

import argparse
import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from omegaconf import IntegerNode
from rich.console import Console

from hybridrl.app.compose import composed, examine_config
from hybridrl.app.process import exit_codes, import_from_here
from hybridrl.config.checks.installation import ray_problem, ray_version
from hybridrl.config.choices import DoctorChecks
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined, early_value
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.controller.output import guard_standard_output
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import LocalProbes, NodeProbes, call_all
from hybridrl.controller.signals import Interrupted
from hybridrl.doctor import inputs, ray, room, training
from hybridrl.doctor.findings import Stage, Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.joined import joined_probes, listens_here, serve
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.report import complaints, show, write_report
from hybridrl.doctor.stages import Check, CheckContext, StageReport, exit_code, left_out, run_stages

logger = logging.getLogger(__name__)

# All stages but training, which is a run itself.
STAGES: tuple[tuple[Stage, Check], ...] = (
    (Stage.host, host.check),
    (Stage.network, network.check),
    (Stage.ray, lambda case: ray.examine(case.agents, case.config.cluster.nodes)),
    (Stage.placement, room.check_placement),
    (Stage.inputs, inputs.check),
    (Stage.memory, room.check_memory),
)


JOIN_S = 300.0
LOOK_S = 60.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; raises SystemExit."""
    if argv is None:
        guard_standard_output()
    parser = _parser()
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if options.nodes < 1 or (options.nodes > 1 and options.join is None):
        parser.error("--nodes: expected a number of nodes, with --join")
    with exit_codes():
        import_from_here()
        if options.join is not None and not listens_here(options.join):
            serve(options.join, JOIN_S)
            sys.exit(0)
        sys.exit(_diagnose(options, rest))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Everything else is as in python -m hybridrl.main: +recipe=, groups, key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--join", metavar="HEAD:PORT", help="meet on this address, without Ray")
    parser.add_argument("--nodes", type=int, default=1, help="with --join: how many nodes meet")
    parser.add_argument("--strict", action="store_true", help="exit code 1 on warnings")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where doctor.json goes")
    return parser


def _diagnose(options: argparse.Namespace, rest: list[str]) -> int:
    console = Console(highlight=False)
    stages = (*STAGES, (Stage.training, training.check))
    with _agents(options) as agents:
        context = _context(rest, agents)
        nodes = ", ".join(agents.nodes)
        console.print(f"hybridrl doctor: {len(agents.nodes)} node(s): {nodes}", soft_wrap=True)
        reports: list[StageReport] = []
        running = run_stages(context, stages, lambda stage: console.print(f"-- {stage.value}"))
        why = ""
        try:
            for report in running:
                reports.append(report)  # also those before an error
        except BaseException as error:
            known = isinstance(error, Interrupted)
            why = str(error) if known else f"ended by {type(error).__name__}"
            raise
        finally:  # the report is written after an interrupt or an error, too
            reports += [left_out(stage, why) for stage, _ in stages[len(reports) :]]
            name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
            folder = options.output or Path("outputs", "doctor", name)
            show(console, reports)
            lacks_report = False
            try:
                path = write_report(folder, reports, agents.nodes, context.overrides)
                console.print(f"report     {path}", soft_wrap=True)
            except OSError as error:
                lacks_report = True
                sys.stderr.write(f"the report {folder} cannot be written: {error.strerror}\n")
    return exit_code(reports, strict=options.strict) or int(lacks_report)


@contextmanager
def _agents(options: argparse.Namespace) -> Iterator[NodeProbes]:
    """Yield the nodes that joined, those of Ray's cluster, or this node alone.

    If the cluster cannot be joined or Ray cannot be imported, the stage ray reports it.
    """
    with ExitStack() as stack:
        agents: NodeProbes = LocalProbes(socket.gethostname())
        if options.join is not None:
            agents = stack.enter_context(joined_probes(options.join, options.nodes, JOIN_S))
        elif not ray_problem(ray_version()):
            with suppress(ConfigError):
                agents = stack.enter_context(run_nodes())
        yield agents


def _context(overrides: list[str], agents: NodeProbes) -> CheckContext:
    """Compose and check the config as the run would.

    Raises:
        ConfigError: every problem of the config, or an option that starts several runs.
    """
    line = parse_argv(overrides)
    own = ("--config-dir", "-cd", line.args.config_dir)
    others = [option for option in line.options if not {option, option.split("=")[0]} & {*own}]
    if others:
        raise ConfigError(
            f"{' '.join(others)}: the doctor examines one run of hybridrl's own config.\n"
            "Leave it out; give the overrides of the run, and its --config-dir."
        )
    answers = call_all(agents, local_machine, timeout_s=LOOK_S)
    nodes = [a.value.nodes[0] for a in answers.values() if not a.error]
    run = composed(line, lambda: Machine(tuple(nodes)))
    if run.problems or run.cfg is None:
        raise ConfigError(*run.problems)
    # The stage ray reports missing nodes; here they count as copies of the first.
    wanted = early_value(run.cfg, "cluster.nodes", IntegerNode) or 0
    missing = max(0, wanted - len(nodes))
    machine = Machine((*nodes, *nodes[:1] * missing))
    result = examine_config(run.cfg, machine, provenance_of(run.overrides, []))
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    assert result.shape is not None
    return CheckContext(
        result.config,
        Machine(tuple(nodes)),
        result.shape,
        result.frozen,
        run.overrides,
        agents,
        quick=False,
        config_dir=line.args.config_dir,
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
            result.config, machine, result.shape, result.frozen, overrides, agents, quick
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
