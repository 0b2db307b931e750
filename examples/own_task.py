"""An own task in one file: problems that the script writes, and a reward that judges answers.

python examples/own_task.py                              three steps, half a minute on two cores

Rewards run in processes of their own, which import this file: what starts the run is in `main`.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import hybridrl

DATA = Path("own_task.jsonl")


def write_problems(count: int = 512) -> None:
    """Write sums, with their answers; more columns reach the reward, too."""
    draw = random.Random(0)
    with DATA.open("w") as file:
        for _ in range(count):
            a, b = draw.randint(2, 49), draw.randint(2, 49)
            question = f"Tom has {a} apples and finds {b}. How many apples does Tom have now?"
            print(json.dumps({"question": question, "answer": f"#### {a + b}"}), file=file)


def close_enough(prompt: str, response: str, example: dict[str, Any], **args: Any) -> float:
    """Score a response: 1 if its last word is the answer, 0.2 if the answer appears anywhere."""
    answer, words = example["answer"].removeprefix("#### "), response.split()
    return 1.0 if words[-1:] == [answer] else 0.2 if answer in words else 0.0


def main() -> None:
    """Train on the problems; arguments are overrides."""
    write_problems()
    overrides = [
        "+recipe=gsm8k_grpo",
        f"data.train_files={DATA}",
        "reward.function=own_task.close_enough",
        "trainer.total_steps=3",
    ]
    result = hybridrl.train([*overrides, *sys.argv[1:]])
    print(f"mean reward {result.metrics['reward/mean']:.3f}; samples are in {result.folder}")


if __name__ == "__main__":
    main()
