"""Tokenizer whose pieces merge, and environments that are stepped in this process."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridrl.environments.base import (
    EnvironmentReply,
    StepRequest,
    StepResult,
    environment_task,
)
from hybridrl.processes.messages import FailureKind

# Sampled pieces merge when they are read again: "a", "b" becomes "ab".
VOCABULARY = {token: i for i, token in enumerate(["<end>", "=", "a", "b", "ab", "aba", "1", "11"])}
END, STOP, A, B, AB, ABA, ONE, ELEVEN = range(8)
MERGES = [("a", "b"), ("ab", "a"), ("1", "1")]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(VOCABULARY, MERGES))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = merging_tokenizer()


def decode(rows: Sequence[list[int]]) -> list[str]:
    return TOKENIZER.batch_decode(list(rows), skip_special_tokens=True)


class Here:
    """Steps environments in this process."""

    def __init__(self, function: str, **args: Any) -> None:
        self.move = environment_task(function, args)
        self.heard: list[str] = []

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        return [self._reply(example) for example in examples]

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        self.heard += [turn.text for turn in turns]
        return [self._reply(turn) for turn in turns]

    def _reply(self, item: dict[str, Any] | StepRequest) -> EnvironmentReply:
        try:
            return self.move(item)
        except ValueError as error:
            return EnvironmentReply("", StepResult("", 0.0, True), FailureKind.error, str(error))
