"""Calculator as an agent program: the model writes `16 + 4 =`, the program goes on with ` 20`.

The same task as calculator.py, by the endpoint: a text without `=` at its end is the last one.
"""

from typing import Any

from hybridrl.environments.calculator import MARKER, Calculator
from hybridrl.environments.programs import Task
from hybridrl.rewards.base import answer_reader, checked_by
from hybridrl.rewards.gsm8k import mode_problems


@answer_reader
@checked_by(mode_problems)
async def run(task: Task, client: Any, *, mode: str, max_turns: int) -> float:
    """Solve a problem in turns with a calculator; return GSM8K's reward."""
    calculator, text = Calculator(task.example, mode), task.prompt
    for _ in range(max_turns):
        answer = await client.completions.create(model="policy", prompt=text, stop=[MARKER])
        (choice,) = answer.choices
        said = choice.text + (choice.stop_reason or "")
        result = calculator.step(said)
        if result.done:
            return result.reward
        text += said + result.text
    return 0.0
