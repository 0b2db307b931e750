"""Taskset of verifiers: texts of four digits, to be written from the end; nothing is downloaded.

The task of prime-rl's example reverse_text, with texts that the embedded model can read.
"""

import random
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

NUM_HELD_OUT = 320


class ReverseTextConfig(vf.TasksetConfig):
    """Config of the taskset: the split."""

    split: Literal["train", "test"] = "train"


class ReverseTextData(vf.TaskData):
    """A text, in the prompt, and its reverse."""

    answer: str


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, vf.TaskConfig]):
    """Rewards what a reply and the reverse have in common."""

    @vf.reward
    async def common(self, task: Any, trace: Any) -> float:
        """Return the share of the longest common subsequence in the longer of both texts."""
        lengths = [0] * (len(task.answer) + 1)
        for one in trace.last_reply:
            before = [*lengths]
            for k, other in enumerate(task.answer):
                lengths[k + 1] = before[k] + 1 if one == other else max(before[k + 1], lengths[k])
        return lengths[-1] / max(len(task.answer), len(trace.last_reply))


class ReverseText(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """The 10,000 texts in an order of their own, the last ones held out."""

    def load(self) -> Iterator[ReverseTextTask]:
        """Yield a task for each text of the split."""
        texts = random.Random(1).sample([f"{number:04}" for number in range(10_000)], 10_000)
        is_train = self.config.split == "train"
        for text in texts[:-NUM_HELD_OUT] if is_train else texts[-NUM_HELD_OUT:]:
            # A form to which the embedded model gives short answers.
            data = ReverseTextData(prompt=f"So {text} ####", answer=text[::-1])
            yield ReverseTextTask(data, self.config.task)


__all__ = ["ReverseText"]
