"""Stages end at the first that fails; verdicts decide the exit code; the report tells it all."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from threading import Timer

import pytest
from rich.console import Console

from hybridrl.doctor import main, training
from hybridrl.doctor.findings import (
    CHECKS,
    Finding,
    Stage,
    Verdict,
    fail,
    ok,
    skipped,
    stage_of,
    warn,
)
from hybridrl.doctor.report import complaints, show, write_report
from hybridrl.doctor.stages import StageReport, exit_code, run_stages
from tests.support.host_cases import case

pytestmark = pytest.mark.full

CASE = case()
FINE = ok("host.shm", "node-a", "/dev/shm has 20 GiB free")
TIGHT = warn("host.limits", "node-b", "1024 open files", "ulimit -n 65536")
BROKEN = fail("network.ports", "node-a -> node-b", "port 29500: refused", "open the port")


def stages(*findings_of_stages):
    """A stage each, in the catalog's order, and who was asked."""
    asked = []

    def check(stage, findings):
        return lambda case: asked.append(stage) or findings

    given = zip(Stage, findings_of_stages, strict=False)
    return [(stage, check(stage, findings)) for stage, findings in given], asked


def test_the_ids_of_the_checks_are_what_docs_and_users_know():
    ids = """
    host.shm host.limits host.cgroup host.gpus host.visible_devices host.variables host.allocator
    host.versions host.communication_variables host.clock host.temporary host.terminal
    network.address network.interfaces network.ports network.rendezvous network.bandwidth
    network.collective network.infiniband
    ray.version ray.reachable ray.loopback ray.port ray.token ray.nodes
    placement.slots placement.engines
    inputs.cache inputs.cache_contents inputs.model inputs.tokenizer inputs.data inputs.reward
    inputs.run_directory
    memory.gpu memory.host
    training.steps
    """
    assert ids.split() == list(CHECKS)


def test_what_follows_a_failed_stage_is_skipped_by_name_and_not_run():
    order, asked = stages([FINE, TIGHT], [BROKEN], [], [])
    reports = list(run_stages(CASE, order))
    assert asked == [Stage.host, Stage.network]
    left_out = {finding.check for report in reports[2:] for finding in report.findings}
    assert left_out == {
        check for check in CHECKS if stage_of(check) in (Stage.ray, Stage.placement)
    }
    assert {f.evidence for report in reports[2:] for f in report.findings} == {
        "stage network failed"
    }


def test_a_stage_may_not_speak_for_another():
    order, _ = stages([BROKEN])
    with pytest.raises(AssertionError, match="another stage's check"):
        list(run_stages(CASE, order))


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ([FINE], True, 0),
        ([FINE, TIGHT], False, 0),
        ([FINE, TIGHT], True, 1),
        ([TIGHT, BROKEN], False, 2),
        ([skipped("host.gpus", "node-a", "hardware = cpu")], True, 0),
    ],
)
def test_exit_codes(findings, strict, code):
    assert exit_code([StageReport(Stage.host, findings, 0.0)], strict=strict) == code


@pytest.mark.parametrize(
    ("check", "verdict", "advice"),
    [
        ("host.nothing", Verdict.ok, ""),
        ("host.shm", Verdict.fail, ""),
        ("host.shm", Verdict.warn, ""),
        ("host.shm", Verdict.ok, "buy more"),
    ],
)
def test_a_finding_is_of_the_catalog_and_asks_for_something_only_where_it_is_wrong(
    check, verdict, advice
):
    with pytest.raises(AssertionError):
        Finding(check, "node-a", verdict, "seen", advice)


def test_the_table_has_evidence_and_advice_and_one_line_for_a_stage_left_out():
    order, _ = stages([FINE, TIGHT], [BROKEN], [])
    reports = list(run_stages(CASE, order))
    console = Console(width=120, file=io.StringIO(), record=True)
    show(console, reports)
    text = console.export_text()
    assert "-> ulimit -n 65536" in text and "-> open the port" in text
    assert [line.split()[0] for line in text.splitlines() if "stage network failed" in line] == [
        "ray.*"
    ]
    assert "1 ok, 1 warn, 1 fail" in text


def test_doctor_json_holds_every_finding(tmp_path):
    report = StageReport(Stage.host, [FINE, TIGHT], 1.234)
    path = write_report(tmp_path / "new", [report], ["node-a", "node-b"], ["+recipe=x"])
    content = json.loads(path.read_text())
    assert content["stages"] == [{"stage": "host", "seconds": 1.23}]
    assert content["nodes"] == ["node-a", "node-b"] and content["overrides"] == ["+recipe=x"]
    assert content["findings"][1] == {
        "check": "host.limits",
        "node": "node-b",
        "verdict": "warn",
        "evidence": "1024 open files",
        "advice": "ulimit -n 65536",
    }


def test_the_speeds_of_pairs_are_in_doctor_json(tmp_path):
    measured = {"bytes_per_s": 941e6, "round_trip_s": 1.2e-4}
    matrix = {"node-a": {"node-b": measured}, "node-b": {"node-a": {"bytes_per_s": 2e9}}}
    finding = replace(ok("network.bandwidth", "all", "fine"), tables={"one TCP stream": matrix})
    reports = [StageReport(Stage.network, [finding], 0.5)]
    content = json.loads(write_report(tmp_path, reports, [], []).read_text())
    assert content["between_nodes"] == {"one TCP stream": matrix}


def test_complaints_name_check_and_node_and_what_to_type():
    (text,) = complaints([StageReport(Stage.host, [FINE, TIGHT], 0.0)], Verdict.warn)
    assert text == "host.limits on node-b: 1024 open files.\nulimit -n 65536"


def test_every_stage_of_the_catalog_is_run():
    assert [stage for stage, _ in main.STAGES] == list(Stage)[:-1]


def test_a_second_ctrl_c_kills_the_training_run_instead_of_leaving_it():
    """It would write into a folder that is gone by then."""
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); "
    command = [sys.executable, "-c", stubborn + "signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as running:
        assert running.stdout is not None and running.stdout.readline()
        again = Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
        again.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                training._end(running)
            assert running.poll() == -signal.SIGKILL
        finally:
            again.join()
            running.kill()
