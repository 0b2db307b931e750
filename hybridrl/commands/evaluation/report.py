"""What an evaluation came to: results.json, and a table of it."""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from hybridrl.commands.evaluation.completions import rule_name
from hybridrl.commands.evaluation.session import Answers, Case
from hybridrl.commands.evaluation.statistics import ALL, Estimate, GroupResult, group_results
from hybridrl.config.planner.machine import Machine
from hybridrl.trainer.evaluate import tag_groups
from hybridrl.trainer.tracking.provenance import plain, versions

RESULTS = "results.json"
# What an evaluation reads of its config.
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


def results_of(case: Case, answers: Answers) -> Results:
    """What each rule says of all problems and of each group of them."""
    groups = tag_groups(case.asked, taken=set(answers.scores))
    options = case.options
    return {
        rule: group_results(scores, groups, options.ks, options.correct_at)
        for rule, scores in answers.scores.items()
    }


def write_results(
    case: Case, answers: Answers, results: Results, machine: Machine, started: datetime
) -> Path:
    """Write results.json; returns its path."""
    config = {name: plain(vars(case.config)[name], name) for name in SECTIONS}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    num_responses = len(case.asked) * case.options.samples
    body = {
        "name": case.subject.name,
        "model": case.config.model.path,
        "checkpoint": None if case.subject.folder is None else str(case.subject.folder.resolve()),
        "step": case.subject.step,
        "seed": case.config.seed,
        "split": case.options.split.value,
        "problems": len(case.asked),
        "samples": case.options.samples,
        "temperature": case.temperature,
        "top_p": case.top_p,
        "correct_at": case.options.correct_at,
        "results": [
            {"rule": rule_name(rule), "group": group} | _numbers(result)
            for rule, of_rule in results.items()
            for group, result in of_rule.items()
        ],
        "length_mean": answers.tokens / num_responses,
        "truncated_fraction": answers.truncated / num_responses,
        "failed": answers.failed,
        "seconds": answers.seconds,
        "tokens_per_second": answers.tokens / answers.seconds,
        "started": started.isoformat(timespec="seconds"),
        "config_hash": hashlib.sha256(text.encode()).hexdigest(),
        "config": config,
        "versions": versions(),
        "hardware": plain(machine),
    }
    path = case.output / RESULTS
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return path


def table_of(results: Results) -> Table:
    """The results on all problems by each rule, then on groups of them by training's rule."""
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
