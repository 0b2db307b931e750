"""Findings of health checks: what is found at a step, and its line in health.jsonl."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.config.schema import RunConfig
from hybridrl.health.checks import CHECKS
from hybridrl.health.judges import Seen
from hybridrl.trainer.record import Row

HEALTH_FILE = "health.jsonl"
# Steps in a row after which a warning is repeated.
REPEATS = (10, 100, 1000)
# Metric of a check, 1 in steps in which the run is ill.
METRIC = "health/{}"

# Additions to the evidence of checks, by id; called if one warns.
Details = Mapping[str, Callable[[], str]]


@dataclass(frozen=True)
class Finding:
    """A check that found the run ill, as a line of health.jsonl.

    Attributes:
        step: None before the first one.
        check: its id; its threshold is health.<check>.
        kind: "failure" for what warns at each ill step, else "warning".
        times: ill steps in a row, this one included.
        values: the metrics that decided, and the threshold as `limit`.
        evidence: a sentence.
        remedy: what to try.
    """

    step: int | None
    check: str
    kind: str
    times: int
    values: dict[str, float]
    evidence: str
    remedy: str

    @property
    def text(self) -> str:
        """The warning."""
        when = "" if self.step is None else f"step {self.step}, "
        since = f" for {self.times} steps now" if self.times in REPEATS else ""
        return f"{when}health.{self.check}{since}: {self.evidence}\n{self.remedy}"


class Health:
    """Health checks over the steps of a run.

    A check warns at its first ill step and again after REPEATS ill steps in a row. One on a count
    of failures warns at each ill step. A threshold of null turns a check off.

    Args:
        config: of the run.
        rows: metrics of the steps so far; it grows.
        warned: checks that have warned before; None: those with a metric in `rows`.
    """

    def __init__(
        self, config: RunConfig, rows: Sequence[Row], warned: Collection[str] | None = None
    ) -> None:
        self._config, self._rows = config, rows
        scorer = "environment" if config.environment else "reward function"
        self._scorer = "program" if config.agent else scorer
        if warned is None:
            warned = {c for c in CHECKS if any(METRIC.format(c) in row for row in rows)}
        self._in_a_row: dict[str, int] = {check: 0 for check in CHECKS if check in warned}

    def examine(
        self,
        row: Row,
        details: Details,
        step: int | None = None,
        place: Callable[[int], str] = "engine {}".format,
    ) -> list[Finding]:
        """Add health/<check> to the row of each check that finds the run ill.

        Args:
            row: metrics of `step`, or of the data before the first one (None).
            details: more evidence.
            place: describes the ranks of a rollout engine.

        Returns:
            The findings of which to warn.
        """
        findings = []
        for check, (judge, remedy, always) in CHECKS.items():
            limit: float | None = vars(self._config.health)[check]
            if limit is None:
                continue
            seen = Seen(row, self._rows, limit, self._config, place)
            evidence = judge(seen)
            is_first = check not in self._in_a_row
            if evidence is None:
                if not is_first:
                    self._in_a_row[check] = 0
                continue
            row[METRIC.format(check)] = 1.0
            times = self._in_a_row[check] = self._in_a_row.get(check, 0) + 1
            if is_first or always or times in REPEATS:
                more = f": {details[check]()}" if check in details else ""
                kind, values = "failure" if always else "warning", seen.values | {"limit": limit}
                remedy = remedy.replace("{scorer}", self._scorer)
                text = f"{evidence}{more}."
                findings.append(Finding(step, check, kind, times, values, text, remedy))
        return findings
