"""`python -m hybridrl.doctor`: every check, for the run that the same overrides would start.

    python -m hybridrl.doctor +recipe=gsm8k_ppo                       this machine
    RAY_ADDRESS=10.0.0.1:6379 python -m hybridrl.doctor +recipe=gsm8k_ppo cluster.nodes=2
    python -m hybridrl.doctor --join 10.0.0.1:29600 --nodes 2 +recipe=gsm8k_ppo cluster.nodes=2
                                      on every node, before Ray; with the same HYBRIDRL_DOCTOR_KEY
Exit codes: 0 nothing that would fail, 1 warnings and --strict, 2 failures or a wrong config, 129
SIGHUP, 130 Ctrl-C, 143 SIGTERM. The report is written whatever ends it.
"""

import argparse
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rich.console import Console

from hybridrl.app.compose import composed, examined
from hybridrl.app.process import EXIT_CONFIG, import_from_here, show_problems
from hybridrl.config.checks.installation import ray_problem, ray_version
from hybridrl.config.command.command_line import CommandLine, parse_argv
from hybridrl.config.command.provenance import given_keys
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.controller.output import guard_standard_output
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import LocalProbes, NodeProbes, call_all
from hybridrl.controller.signals import Interrupted, SignalGuard
from hybridrl.doctor import training
from hybridrl.doctor.catalog import Stage
from hybridrl.doctor.joined import JoinedProbes, listens_here, serve
from hybridrl.doctor.preflight import STAGES
from hybridrl.doctor.report import show, write_report
from hybridrl.doctor.stages import Case, StageReport, exit_code, left_out, run_stages

JOIN_S = 300.0
LOOK_S = 60.0


def main(argv: Sequence[str] | None = None) -> None:
    """The command; leaves by SystemExit."""
    if argv is None:
        guard_standard_output()
    options, rest = _parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    import_from_here()
    try:
        with SignalGuard():
            if options.join is not None and not listens_here(options.join):
                serve(options.join, JOIN_S)
                sys.exit(0)
            sys.exit(_diagnose(options, rest))
    except ConfigError as error:
        show_problems(error)
        sys.exit(EXIT_CONFIG)
    except Interrupted as interrupt:
        sys.exit(128 + interrupt.signum)


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
    with _agents(options) as agents:
        case = _case(rest, agents)
        nodes = ", ".join(agents.nodes)
        console.print(f"hybridrl doctor: {len(agents.nodes)} node(s): {nodes}", soft_wrap=True)
        reports: list[StageReport] = []
        try:
            _examine(case, reports, console)
        finally:
            name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
            folder = options.output or Path("outputs", "doctor", name)
            path = write_report(folder, reports, agents.nodes, case.overrides)
            show(console, reports)
            console.print(f"report     {path}", soft_wrap=True)
    return exit_code(reports, strict=options.strict)


def _examine(case: Case, reports: list[StageReport], console: Console) -> None:
    """Append a report of every stage, also of those that something keeps from their end."""
    stages = (*STAGES, (Stage.training, training.check))
    try:
        for report in run_stages(case, stages, lambda stage: console.print(f"-- {stage.value}")):
            reports.append(report)
    except BaseException as error:
        what = str(error) if isinstance(error, Interrupted) else f"ended by {type(error).__name__}"
        reports += [left_out(stage, what) for stage, _ in stages[len(reports) :]]
        raise


@contextmanager
def _agents(options: argparse.Namespace) -> Iterator[NodeProbes]:
    """The nodes: those that call in, those of Ray's cluster, or this one alone.

    A cluster that cannot be joined, and a Ray that cannot be imported, is what the stage ray finds
    out about, from this node.
    """
    if options.join is not None:
        with JoinedProbes(options.join, options.nodes, JOIN_S) as joined:
            yield joined
        return
    if ray_address() is None or ray_problem(ray_version()):
        yield LocalProbes(socket.gethostname())
        return
    from hybridrl.controller.ray.ray_probes import RayProbes

    with ExitStack() as stack:
        agents: NodeProbes = LocalProbes(socket.gethostname())
        with suppress(ConfigError):
            agents = stack.enter_context(RayProbes())
        yield agents


def _case(overrides: list[str], agents: NodeProbes) -> Case:
    """What the overrides ask for, checked as the run would.

    Raises:
        ConfigError: every problem of the config, or an option that does not begin one run.
    """
    line = parse_argv(overrides)
    others = [option for option in line.options if not _is_config_dir(option, line)]
    if others:
        raise ConfigError(
            f"{' '.join(others)}: the doctor examines one run of hybridrl's own config.\n"
            f"Leave it out, and give the run's overrides, and --config-dir if it has one."
        )
    answers = call_all(agents, local_machine, timeout_s=LOOK_S)
    nodes = [a.value.nodes[0] for a in answers.values() if not a.error]
    found = composed(line, lambda: Machine(tuple(nodes)))
    if found.problems or found.cfg is None:
        raise ConfigError(*found.problems)
    # Nodes that are missing are for the stage ray to find; here they are like the others.
    missing = max(0, int(found.cfg.cluster.nodes) - len(nodes))
    machine = Machine((*nodes, *nodes[:1] * missing))
    result = examined(found.cfg, machine, given_keys(found.overrides, []))
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    return Case.of(
        result,
        Machine(tuple(nodes)),
        found.overrides,
        agents,
        quick=False,
        config_dir=line.args.config_dir,
    )


def _is_config_dir(option: str, line: CommandLine) -> bool:
    """Whether an option, or an option's value, names the folder of the user's own groups."""
    return option == line.args.config_dir or option.split("=")[0] in ("--config-dir", "-cd")
