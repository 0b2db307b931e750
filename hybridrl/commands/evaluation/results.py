"""Results of an evaluation: mean score and pass@k with confidence intervals, file and table."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import comb
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from rich import box
from rich.table import Table

from hybridrl.commands.evaluation.session import Evaluation, Totals, rule_name
from hybridrl.commands.evaluation.subject import SECTIONS
from hybridrl.config.planner.machine import Machine
from hybridrl.trainer.evaluate import half_width, tag_groups
from hybridrl.trainer.tracking.provenance import plain, versions

RESULTS = "results.json"
# Name of the group of all problems.
ALL = "all"


class GroupResult(TypedDict):
    """Results of one rule on a group of problems, as in results.json.

    The score is the mean over problems and samples: with one sample eval/accuracy of training.
    `pass_at` maps k to the share of the problems solved by at least one of k samples. Numbers
    named ..._ci95 are half the width of a mean's 95 % confidence interval over problems.
    """

    rule: str
    group: str
    problems: int
    score: float
    score_ci95: float
    pass_at: dict[str, float]
    pass_at_ci95: dict[str, float]


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


def group_result(
    rule: str, group: str, scores: Sequence[Sequence[float]], ks: Sequence[int], correct_at: float
) -> GroupResult:
    """Return a rule's results on problems; scores of at least `correct_at` are correct."""
    counts = [(len(of_one), sum(s >= correct_at for s in of_one)) for of_one in scores]
    means = [fmean(of_one) for of_one in scores]
    solved = {str(k): [pass_at_k(n, c, k) for n, c in counts] for k in ks}
    return {
        "rule": rule_name(rule),
        "group": group,
        "problems": len(scores),
        "score": fmean(means),
        "score_ci95": half_width(means),
        "pass_at": {k: fmean(shares) for k, shares in solved.items()},
        "pass_at_ci95": {k: half_width(shares) for k, shares in solved.items()},
    }


def results_of(
    evaluation: Evaluation, scores: Mapping[str, Sequence[Sequence[float]]]
) -> list[GroupResult]:
    """Return the results of each rule on all problems and on each group."""
    asked, ks = evaluation.asked, evaluation.ks
    groups = {ALL: [*range(len(asked))], **tag_groups(asked, taken={ALL, *scores})}
    return [
        group_result(rule, group, [of_rule[k] for k in members], ks, evaluation.correct_at)
        for rule, of_rule in scores.items()
        for group, members in groups.items()
    ]


def write_results(
    evaluation: Evaluation,
    totals: Totals,
    results: list[GroupResult],
    machine: Machine,
    started: datetime,
) -> Path:
    """Write results.json; return its path."""
    subject, sections = evaluation.subject, vars(evaluation.config)
    config = {name: plain(sections[name], name) for name in (*SECTIONS, "lora", "eval")}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    num_responses = len(evaluation.asked) * evaluation.samples
    body = {
        "name": subject.name,
        "model": evaluation.config.model.path,
        "checkpoint": None if subject.folder is None else str(subject.folder.resolve()),
        "step": subject.step,
        "seed": evaluation.config.seed,
        "split": evaluation.split.value,
        "problems": len(evaluation.asked),
        "samples": evaluation.samples,
        **evaluation.sampling,
        "correct_at": evaluation.correct_at,
        "results": results,
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


def table_of(results: list[GroupResult]) -> Table:
    """Return a table: all problems by each rule, then groups by the training reward."""
    whole = [(row["rule"], row) for row in results if row["group"] == ALL]
    first = whole[0][0]
    groups = [(r["group"], r) for r in results if r["rule"] == first and r["group"] != ALL]
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for heading in ("problems", "score", *(f"pass@{k}" for k in results[0]["pass_at"])):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (name, row) in enumerate([*whole, *groups]):
        numbers = [(row["score"], row["score_ci95"])]
        numbers += zip(row["pass_at"].values(), row["pass_at_ci95"].values(), strict=True)
        cells = [f"{value:.3f} +-{ci95:.3f}" for value, ci95 in numbers]
        table.add_row(name, str(row["problems"]), *cells, end_section=index == len(whole) - 1)
    return table
