"""Calculator: after `16 + 4 =` from the model, the environment writes ` 20` and a new line.

A turn without `=` at its end is the last one. The reward is GSM8K's, of the whole conversation.
"""

from typing import Any

from hybridrl.environments.arithmetic import as_text, evaluate, expression_at_end
from hybridrl.environments.base import StepResult
from hybridrl.rewards import gsm8k

MARKER = "="
# Answer if nothing can be computed.
UNKNOWN = "?"


class Calculator:
    """Environment that computes the model's expressions exactly.

    Args:
        example: row whose "answer" ends in `#### 42`, or is the number alone.
        mode: search for the final number, strict or flexible: see hybridrl.rewards.gsm8k.
    """

    def __init__(self, example: dict[str, Any], mode: str) -> None:
        self._answer = {"answer": example["answer"]}
        self._mode = gsm8k.Mode(mode)
        self._text = ""

    def reset(self) -> str:
        """Return "": the prompt is complete."""
        return ""

    def step(self, text: str) -> StepResult:
        """Return the value of the expression before the final `=`, or the final reward."""
        self._text += text
        expression, marker, behind = text.rpartition(MARKER)
        if not marker or behind.strip():
            reward = gsm8k.score("", self._text, self._answer, self._mode)
            return StepResult("", reward, True)
        answer = f" {_computed(expression)}\n"
        self._text += answer
        return StepResult(answer, 0.0, False)


def _computed(text: str) -> str:
    """Return the value of the expression at the end of the last line."""
    line = text.rpartition("\n")[2]
    try:
        return as_text(evaluate(expression_at_end(line)))
    except (ValueError, ZeroDivisionError):
        return UNKNOWN
