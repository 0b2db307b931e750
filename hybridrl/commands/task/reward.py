"""The reward of this task: replace it by yours."""

import re
from typing import Any


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 1.0 if the last number of the response is the answer, else 0.0.

    Args:
        prompt: as the model read it.
        response: of the model, without special tokens.
        example: the row of data.jsonl.
    """
    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(example["answer"]))
