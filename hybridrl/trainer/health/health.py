"""Health of a run: which checks warn at a step, and how often."""

from collections.abc import Callable, Mapping, Sequence

from hybridrl.config.schema import RunConfig
from hybridrl.trainer.health.checks import CHECKS
from hybridrl.trainer.health.judges import Seen
from hybridrl.trainer.record import Row

# Steps in a row after which a warning is repeated.
REPEATS = (10, 100, 1000)
# Metric of a check, 1 in steps in which the run is ill.
METRIC = "health/{}"

# What a check's evidence may say besides, by its id; called if it warns.
Details = Mapping[str, Callable[[], str]]


class Health:
    """Health checks over the steps of a run.

    A check warns at its first ill step and again after REPEATS ill steps in a row; one on a count
    of failures warns at each ill step. A threshold of null turns a check off.

    Args:
        config: of the run.
        rows: metrics of the steps so far; it grows.
    """

    def __init__(self, config: RunConfig, rows: Sequence[Row]) -> None:
        self._config, self._rows = config, rows
        self._limits: dict[str, float | None] = vars(config.health)
        scorer = "environment" if config.environment else "reward function"
        self._scorer = "program" if config.agent else scorer
        self._in_a_row: dict[str, int] = {
            check: 0 for check in CHECKS if any(METRIC.format(check) in row for row in rows)
        }

    def examine(
        self,
        row: Row,
        details: Details,
        step: int | None = None,
        place: Callable[[int], str] = "engine {}".format,
    ) -> list[str]:
        """Add health/<check> to the row of each check that finds the run ill.

        Args:
            row: metrics of `step`, or of the data before the first one (None).
            details: more evidence.
            place: describes the ranks of a rollout engine.

        Returns:
            The warnings that are due.
        """
        warnings = []
        for check, (judge, remedy, always) in CHECKS.items():
            limit = self._limits[check]
            if limit is None:
                continue
            evidence = judge(Seen(row, self._rows, limit, self._config, place))
            is_first = check not in self._in_a_row
            if evidence is None:
                if not is_first:
                    self._in_a_row[check] = 0
                continue
            row[METRIC.format(check)] = 1.0
            times = self._in_a_row[check] = self._in_a_row.get(check, 0) + 1
            if not (is_first or always or times in REPEATS):
                continue
            when = "" if step is None else f"step {step}, "
            since = f" for {times} steps now" if times in REPEATS else ""
            more = f": {details[check]()}" if check in details else ""
            remedy = remedy.replace("{scorer}", self._scorer)
            warnings.append(f"{when}health.{check}{since}: {evidence}{more}.\n{remedy}")
        return warnings
