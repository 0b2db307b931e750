"""Report of the doctor: a table on the console, and doctor.json."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridrl.config.command.secrets import argument_without_secret, without_secrets
from hybridrl.doctor.findings import Finding, Verdict
from hybridrl.doctor.stages import StageReport

FILE = "doctor.json"
STYLES = {
    Verdict.ok: "green",
    Verdict.warn: "yellow",
    Verdict.fail: "bold red",
    Verdict.skipped: "dim",
}
MIN_WIDTH, MAX_WIDTH = 80, 140


def write_report(
    folder: Path, reports: Sequence[StageReport], nodes: Sequence[str], overrides: Sequence[str]
) -> Path:
    """Write doctor.json and return its path."""
    content = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": list(nodes),
        "overrides": [argument_without_secret(override) for override in overrides],
        "stages": [
            {"stage": report.stage.value, "seconds": round(report.seconds, 2)} for report in reports
        ],
        "findings": [f.as_json() for report in reports for f in report.findings],
        "between_nodes": {
            title: matrix
            for report in reports
            for finding in report.findings
            for title, matrix in (finding.tables or {}).items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text(without_secrets(json.dumps(content, indent=1)) + "\n", encoding="utf-8")
    return path


def show(console: Console, reports: Sequence[StageReport]) -> None:
    """Print each finding with its remedy, and a summary."""
    width = min(MAX_WIDTH, max(MIN_WIDTH, console.width)) if console.is_terminal else MAX_WIDTH
    table = Table(box=box.SIMPLE_HEAD, width=width)
    table.add_column("check", no_wrap=True)
    table.add_column("node", overflow="fold", max_width=26)
    table.add_column("verdict", no_wrap=True)
    table.add_column("evidence, remedy", ratio=1, overflow="fold")
    for report in reports:
        for check, finding in _lines(report):
            verdict = Text(finding.verdict.value, style=STYLES[finding.verdict])
            style = "dim" if finding.verdict is Verdict.skipped else ""
            text = Text(finding.evidence, style=style)
            if finding.advice:
                text.append(f"\n-> {finding.advice}", style="cyan")
            table.add_row(check, finding.node, verdict, text)
    console.print(table, soft_wrap=not console.is_terminal)
    console.print(Text(_summary(reports)))


def complaints(reports: Sequence[StageReport], verdict: Verdict) -> list[str]:
    """Format findings of a severity: 'host.shm on node-a: evidence.', then the advice."""
    return [
        f"{finding.check} on {finding.node}: {finding.evidence}.\n{finding.advice}"
        for report in reports
        for finding in report.findings
        if finding.verdict is verdict
    ]


def _lines(report: StageReport) -> list[tuple[str, Finding]]:
    """Return findings with their first column; a stage skipped as a whole is one line."""
    findings = report.findings
    verdicts, reasons = {f.verdict for f in findings}, {f.evidence for f in findings}
    if len(findings) > 1 and verdicts == {Verdict.skipped} and len(reasons) == 1:
        return [(f"{report.stage.value}.*", findings[0])]
    return [(finding.check, finding) for finding in findings]


def _summary(reports: Sequence[StageReport]) -> str:
    counts = Counter(finding.verdict for report in reports for finding in report.findings)
    seconds = ", ".join(f"{r.stage.value} {r.seconds:.1f}" for r in reports if r.seconds >= 0.05)
    parts = ", ".join(
        f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]
    )
    return f"{parts}; {sum(r.seconds for r in reports):.1f} s ({seconds})"
