"""Types of conf/data."""

from dataclasses import dataclass
from typing import Annotated, Any

from hybridrl.config.annotations import (
    FREE,
    LARGEST_COUNT,
    Range,
    Section,
    at_least_one,
    at_least_zero,
)
from hybridrl.config.choices import Repeated, TooLongPrompts

# Keys of conf/data that a mixture replaces by keys per data set.
SOURCE_KEYS = ("name", "train_files", "eval_files")


@dataclass(kw_only=True)
class MixturePart(Section):
    """conf/data: one data set of the mixture; null means the value of conf/data.

    Attributes:
        weight: share of the prompts, relative to the other data sets.
        name, train_files: source of the problems; exactly one is set.
    """

    weight: Annotated[float, Range("it is a share of prompts", 0, LARGEST_COUNT, low_open=True)]
    name: str | None
    train_files: Any
    eval_files: Any
    prompt_key: str | None
    answer_key: str | None
    solution_key: str | None
    num_eval_problems: Annotated[
        int | None, at_least_one("null means data.num_eval_problems"), FREE
    ]
    system_prompt: str | None


@dataclass(kw_only=True)
class DataConfig(Section):
    """conf/data. Files are a path or a list of paths."""

    name: str
    train_files: Any
    eval_files: Any
    prompt_key: str
    answer_key: str | None
    num_eval_problems: Annotated[int | None, at_least_one("null evaluates all problems"), FREE]
    system_prompt: str | None
    chat_template_kwargs: dict[str, Any]
    few_shot: Annotated[int, at_least_zero("it counts examples; 0 means none")]
    solution_key: str | None
    too_long_prompts: TooLongPrompts
    duplicates: Repeated
    held_out_overlap: Repeated
    curriculum: str | None
    curriculum_steps: Annotated[int, at_least_one("it is the length of the curriculum")]
    prompts_per_step: Annotated[int, at_least_one("a step needs prompts")]
    mixture: dict[str, MixturePart]

    @property
    def lacks_answers(self) -> bool:
        """Return whether rows of a data set have no answer."""
        parts = self.mixture.values()
        return self.answer_key is None and not (parts and all(part.answer_key for part in parts))
