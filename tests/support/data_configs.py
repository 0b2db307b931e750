"""A data config as conf/data gives it, and small problem files."""

import json
from pathlib import Path
from typing import Any

from hybridrl.config.choices import Repeated, TooLongPrompts
from hybridrl.config.sections import DataConfig, MixturePart


def data_config(**changes: Any) -> DataConfig:
    """The embedded problems, four a step, with `changes`."""
    values: dict[str, Any] = {
        "name": "embedded",
        "train_files": None,
        "eval_files": None,
        "function": None,
        "args": {},
        "prompt_key": "question",
        "answer_key": "answer",
        "images_key": "images",
        "num_eval_problems": None,
        "system_prompt": None,
        "chat_template_kwargs": {},
        "few_shot": 0,
        "solution_key": None,
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "label_key": "label",
        "too_long_prompts": TooLongPrompts.error,
        "duplicates": Repeated.keep,
        "held_out_overlap": Repeated.drop,
        "curriculum": None,
        "curriculum_steps": 10,
        "prompts_per_step": 4,
        "mixture": {},
    }
    return DataConfig(**(values | changes))


def part(weight: float, **changes: Any) -> MixturePart:
    """One data set of a mixture."""
    values: dict[str, Any] = {
        "name": None,
        "train_files": None,
        "eval_files": None,
        "prompt_key": None,
        "answer_key": None,
        "images_key": None,
        "solution_key": None,
        "num_eval_problems": None,
        "system_prompt": None,
    }
    return MixturePart(weight=weight, **(values | changes))


def jsonl(path: Path, rows: list) -> Path:
    """Rows as JSON lines; texts are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def sums(numbers: range) -> list[dict]:
    """One problem for each number: what it is plus one."""
    return [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in numbers]
