"""Results of an evaluation: mean score and pass@k with confidence intervals, file and table."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from hybridrl.commands.evaluation.config import SECTIONS
from hybridrl.commands.evaluation.session import Evaluation, Totals, rule_name
from hybridrl.config.planner.machine import Machine
from hybridrl.trainer.evaluate import half_width, tag_groups
from hybridrl.trainer.tracking.provenance import plain, versions

RESULTS = "results.json"
# Name of the group of all problems.
ALL = "all"


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and half the width of its 95 % confidence interval."""

    value: float
    ci95: float


@dataclass(frozen=True)
class GroupResult:
    """Results of one rule on a group of problems.

    The score is the mean over problems and samples: with one sample eval/accuracy of training.
    `pass_at` maps k to the share of the problems solved by at least one of k samples.
    """

    problems: int
    score: Estimate
    pass_at: dict[int, Estimate]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples include at least one of c correct ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k; 1 - (1 - c / n)^k is biased.

    Raises:
        ValueError: a number is out of range.

    Source: Chen et al. 2021, section 2.1, equation 1, https://arxiv.org/abs/2107.03374
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass_at_k needs 1 <= k <= n and 0 <= c <= n; got {n=}, {c=}, {k=}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def group_results(
    scores: Sequence[Sequence[float]],
    groups: Mapping[str, Sequence[int]],
    ks: Sequence[int],
    correct_at: float,
) -> dict[str, GroupResult]:
    """Return one rule's results on all problems (`all`) and on each group of indices.

    A sample is correct from the score `correct_at` on.
    """
    everyone = {ALL: range(len(scores))}
    return {
        name: _result([scores[index] for index in members], ks, correct_at)
        for name, members in (everyone | dict(groups)).items()
    }


def _result(scores: Sequence[Sequence[float]], ks: Sequence[int], correct_at: float) -> GroupResult:
    counts = [(len(of_one), sum(s >= correct_at for s in of_one)) for of_one in scores]
    return GroupResult(
        problems=len(scores),
        score=_estimate([fmean(of_one) for of_one in scores]),
        pass_at={k: _estimate([pass_at_k(n, c, k) for n, c in counts]) for k in ks},
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), half_width(values))


# rule -> group -> result
Results = Mapping[str, Mapping[str, GroupResult]]


def results_of(evaluation: Evaluation, totals: Totals) -> Results:
    """Return the results of each rule on all problems and on each group."""
    groups = tag_groups(evaluation.asked, taken={ALL, *totals.scores})
    options = evaluation.options
    return {
        rule: group_results(scores, groups, options.ks, options.correct_at)
        for rule, scores in totals.scores.items()
    }


def write_results(
    evaluation: Evaluation, totals: Totals, results: Results, machine: Machine, started: datetime
) -> Path:
    """Write results.json; return its path."""
    config = {
        name: plain(vars(evaluation.config)[name], name) for name in (*SECTIONS, "lora", "eval")
    }
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
        "top_k": evaluation.top_k,
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
