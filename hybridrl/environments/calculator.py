"""A calculator: the model writes `16 + 4 =`, the environment goes on with ` 20` and a new line.

A turn that does not end with `=` is the last; the reward is GSM8K's, of the whole conversation.
"""

from typing import Any

from hybridrl.environments.arithmetic import as_text, evaluate, expression_at_end
from hybridrl.environments.base import StepResult
from hybridrl.rewards import gsm8k

MARKER = "="
# What follows on `=` where nothing can be computed.
UNKNOWN = "?"


class Calculator:
    """Computes what the model asks for, exactly, until it asks no more.

    Args:
        example: its "answer" is a solution that ends in `#### 42`, or the number alone.
        mode: how the final number is found, strict or flexible: see hybridrl.rewards.gsm8k.
    """

    def __init__(self, example: dict[str, Any], mode: str) -> None:
        self._answer = {"answer": example["answer"]}
        self._mode = gsm8k.Mode(mode)
        self._text = ""

    def reset(self) -> str:
        """Nothing: the prompt says it all."""
        return ""

    def step(self, text: str) -> StepResult:
        """The value of the expression before the final `=`; or the end, and its reward."""
        self._text += text
        asked, marker, behind = text.rpartition(MARKER)
        if not marker or behind.strip():
            reward = gsm8k.score("", self._text, self._answer, self._mode)
            return StepResult("", reward, True)
        answer = f" {_computed(asked)}\n"
        self._text += answer
        return StepResult(answer, 0.0, False)


def _computed(text: str) -> str:
    """The value of the expression that the last line of a text ends with."""
    line = text.rpartition("\n")[2]
    try:
        return as_text(evaluate(expression_at_end(line)))
    except (ValueError, ZeroDivisionError):
        return UNKNOWN
