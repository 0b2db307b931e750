"""Health checks: rules on a step's metrics, each with a remedy.

A new check is one more Rule. A rule warns at its first step, and again after REPEATS steps in a
row; one on a count of failures warns at each step that has some.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hybridrl.config.estimators import estimator_of
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.tracking.tracker import Row

REPEATS = (10, 100, 1000)
TRUNCATED_SHARE = 0.9


class Rule(NamedTuple):
    """Rule on one metric.

    Attributes:
        metric: the rule applies to steps that have it.
        is_ill: (value, the step's metrics, config) -> true if the user should know.
        text: message with {value}, then what to do.
        always: true warns at each such step.
    """

    metric: str
    is_ill: Callable[[float, Row, RunConfig], bool]
    text: str
    always: bool = False


def _is_constant(std: float, row: Row, _: RunConfig) -> bool:
    """Return whether the rewards are equal up to the rounding of float32."""
    return std <= 1e-6 * max(1.0, abs(row.get("reward/mean") or 0.0))


def _is_unmixed(share: float, row: Row, config: RunConfig) -> bool:
    """Return whether groups decide and none is mixed; a constant reward has its own rule."""
    std = row.get("reward/std") or 0.0
    groups = estimator_of(config.algorithm.advantage).compares_groups
    return groups and share == 0 and not _is_constant(std, row, config)


def _some(value: float, *_: object) -> bool:
    return value > 0


_SKIPPED = "{value:.0f} updates of the %s skipped: loss or gradient was not finite"

RULES = (
    Rule(
        "reward/std",
        _is_constant,
        "every response got the same reward: there is nothing to learn from it.\nLook at some "
        "(trainer.samples_every_steps=1); check that reward.function fits the data. If the model "
        "never finds a right answer, it needs easier problems, a higher rollout.temperature, or "
        "training on the form of the answers first.",
    ),
    Rule(
        "reward/mixed_fraction",
        _is_unmixed,
        "in no group do the responses to a prompt differ in reward: their advantages are 0, and "
        "the reward gives no gradient.\nRaise rollout.responses_per_prompt, use problems that the "
        "model solves sometimes, or set algorithm=dapo, which replaces such prompts.",
    ),
    Rule(
        "response/truncated_fraction",
        lambda share, *_: share > TRUNCATED_SHARE,
        "{value:.0%} of the responses were cut off at rollout.max_response_tokens (or "
        "environment.max_turns).\nRaise it, or ask for short answers (data.system_prompt). A model "
        "that never ends its answers lacks a chat template and end token of its training.",
    ),
    Rule("actor/skipped_steps", _some, _SKIPPED % "actor", always=True),
    Rule("critic/skipped_steps", _some, _SKIPPED % "critic", always=True),
    Rule(
        "eval/failed",
        _some,
        "{value:.0f} rewards of held-out responses failed: the accuracies count them as wrong",
        always=True,
    ),
)


class Health:
    """Warnings of a run's steps by RULES; keeps how many steps in a row a rule has applied."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._in_a_row: dict[Rule, int] = {}

    def warnings(self, step: int, row: Row) -> Iterator[str]:
        """Yield the warnings of a step's metrics."""
        for rule in RULES:
            value = row.get(rule.metric)
            if value is None:
                continue
            is_first = rule not in self._in_a_row
            if not rule.is_ill(value, row, self._config):
                self._in_a_row |= {} if is_first else {rule: 0}
                continue
            steps = self._in_a_row[rule] = self._in_a_row.get(rule, 0) + 1
            if is_first or rule.always or steps in REPEATS:
                since = f", for {steps} steps now" if steps in REPEATS else ""
                yield f"step {step}{since}: {rule.text.format(value=value)}"
