"""Results of an evaluation: results.json and a table."""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from hybridrl.commands.evaluation.session import Evaluation, Totals, rule_name
from hybridrl.commands.evaluation.statistics import ALL, Estimate, GroupResult, group_results
from hybridrl.config.planner.machine import Machine
from hybridrl.trainer.evaluate import tag_groups
from hybridrl.trainer.tracking.provenance import plain, versions

RESULTS = "results.json"
# Sections of the config that an evaluation reads.
SECTIONS = (
    "seed",
    "hardware",
    "model",
    "lora",
    "data",
    "fsdp",
    "cluster",
    "placement",
    "rollout",
    "reward",
    "eval",
    "environment",
)

# rule -> group -> result
Results = Mapping[str, Mapping[str, GroupResult]]


def results_of(evaluation: Evaluation, totals: Totals) -> Results:
    """Return the results of each rule on all problems and on each group."""
    groups = tag_groups(evaluation.asked, taken=set(totals.scores))
    options = evaluation.options
    return {
        rule: group_results(scores, groups, options.ks, options.correct_at)
        for rule, scores in totals.scores.items()
    }


def write_results(
    evaluation: Evaluation, totals: Totals, results: Results, machine: Machine, started: datetime
) -> Path:
    """Write results.json; return its path."""
    config = {name: plain(vars(evaluation.config)[name], name) for name in SECTIONS}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    num_responses = len(evaluation.asked) * evaluation.options.samples
    body = {
        "name": evaluation.subject.name,
        "model": evaluation.config.model.path,
        "checkpoint": None
        if evaluation.subject.folder is None
        else str(evaluation.subject.folder.resolve()),
        "step": evaluation.subject.step,
        "seed": evaluation.config.seed,
        "split": evaluation.options.split.value,
        "problems": len(evaluation.asked),
        "samples": evaluation.options.samples,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "correct_at": evaluation.options.correct_at,
        "results": [
            {"rule": rule_name(rule), "group": group} | _numbers(result)
            for rule, of_rule in results.items()
            for group, result in of_rule.items()
        ],
        "length_mean": totals.tokens / num_responses,
        "truncated_fraction": totals.truncated / num_responses,
        "failed": totals.failed,
        "seconds": totals.seconds,
        "tokens_per_second": totals.tokens / totals.seconds,
        "started": started.isoformat(timespec="seconds"),
        "config_hash": hashlib.sha256(text.encode()).hexdigest(),
        "config": config,
        "versions": versions(),
        "hardware": plain(machine),
    }
    path = evaluation.output / RESULTS
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return path


def table_of(results: Results) -> Table:
    """Return a table: all problems by each rule, then groups by the training reward."""
    all_problems = [(rule_name(rule), of_rule[ALL]) for rule, of_rule in results.items()]
    groups = [(group, result) for group, result in results[""].items() if group != ALL]
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for heading in ("problems", "score", *(f"pass@{k}" for k in all_problems[0][1].pass_at)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in [*all_problems, *groups]:
        cells = [_cell(estimate) for estimate in (result.score, *result.pass_at.values())]
        table.add_row(name, str(result.problems), *cells, end_section=name == all_problems[-1][0])
    return table


def _numbers(result: GroupResult) -> dict[str, Any]:
    return {
        "problems": result.problems,
        "score": result.score.value,
        "score_ci95": result.score.ci95,
        "pass_at": {str(k): estimate.value for k, estimate in result.pass_at.items()},
        "pass_at_ci95": {str(k): estimate.ci95 for k, estimate in result.pass_at.items()},
    }


def _cell(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} +-{estimate.ci95:.3f}"
