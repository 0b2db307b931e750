"""Replay of a recorded response: what is read, which steps can be replayed, where it differs."""

import json
from dataclasses import replace

import pytest
import torch

from hybridrl.checkpoint.files import checkpoints_folder, step_name
from hybridrl.commands.resample import (
    Recorded,
    Sample,
    checkpoint_before,
    compared,
    prompts_of,
    read_recorded,
)
from hybridrl.commands.running import UsageError
from hybridrl.data.sources.prompts import DataSetSummary, Prompt, PromptSets
from hybridrl.trainer.tracking.token_log import token_table, write_tokens
from tests.batches import batch_of

LINE = {"response": "3 4", "length": 3, "prompt": "one\u2028line"}


def decode(rows):
    """Token 0 is the end, 9 a part of a character, others their number."""
    return [" ".join("\ufffd" if i == 9 else str(i) for i in row if i) for row in rows]


@pytest.mark.parametrize(
    ("ids", "log_probs", "finding"),
    [
        ([3, 4, 0], [-0.5, 0.0, -1.0], (True, "to the bit")),
        ([3, 4, 0], [-0.5, 0.25, -0.5], (True, "up to 0.5 nats")),
        ([3, 5, 0], [-0.5, 0.0, -1.0], (False, "at token 1: '5', was '4'")),
        ([3, 4], [-0.5, 0.0], (False, "at token 2: '', was ''")),
    ],
)
def test_tokens_are_compared_and_then_their_log_probs(ids, log_probs, finding):
    recorded = Recorded(1, 0, [LINE], Sample([3, 4, 0], [-0.5, None, -1.0]))
    same, text = compared(recorded, Sample(ids, log_probs), decode)
    assert same == finding[0] and finding[1] in text


@pytest.mark.parametrize(
    ("ids", "finding"),
    [
        ([3, 4, 0], (True, "of 3 tokens")),
        ([3, 5, 0], (False, "from token 1")),
        ([3, 4], (False, "from token 2")),
        ([9], (False, "from token 1")),
    ],
)
def test_without_ids_the_text_is_compared(ids, finding):
    same, text = compared(Recorded(1, 0, [LINE], None), Sample(ids, [0.0] * len(ids)), decode)
    assert same == finding[0] and finding[1] in text


def test_a_response_is_read_with_its_tokens_if_they_are_there(tmp_path):
    (tmp_path / "rollouts").mkdir()
    lines = [json.dumps(LINE | {"score": k}, ensure_ascii=False) + "\n" for k in range(3)]
    (tmp_path / "rollouts" / "step_2.jsonl").write_text("".join(lines))
    batch = batch_of([3])
    zeros = batch.responses.like(torch.zeros(3))
    batch = replace(batch, old_log_probs=zeros, advantages=zeros)
    updated = zeros.like(torch.zeros(3, dtype=torch.complex64))
    write_tokens(tmp_path, 2, token_table(batch, [1], updated, None, decode))
    assert read_recorded(tmp_path, 2, 1).sample == Sample([0, 0, 0], [0.0, 0.0, 0.0])
    other = read_recorded(tmp_path, 2, 2)
    assert (other.line, other.sample) == (LINE | {"score": 2}, None)
    with pytest.raises(UsageError, match=r"Recorded steps: 2\."):
        read_recorded(tmp_path, 1, 0)
    with pytest.raises(UsageError, match="0 to 2"):
        read_recorded(tmp_path, 2, 3)


def test_a_problem_that_has_changed_is_named_with_what_differs():
    known = [Prompt(k, [1], f"<user> {k}+1?", "q", {}, {}) for k in (0, 1)]
    prompts = PromptSets(known, [], [DataSetSummary("", "a.jsonl", 1.0, 2, 0)])

    def found(number, text):
        line = {"prompt_id": number, "prompt": text}
        return prompts_of(Recorded(1, 0, [line], None), prompts)

    assert found(1, "<user> 1+1?") == [known[1]]
    differs = r"a.jsonl: .* problem 1 differs from character 9 on: 1\?\n +was: 2\?"
    with pytest.raises(UsageError, match=differs):
        found(1, "<user> 1+2?")
    with pytest.raises(UsageError, match=r"problem 2 .* from character 0 on: no such problem"):
        found(2, "<user> 2+1?")


def test_a_step_needs_the_checkpoint_of_the_step_before(tmp_path):
    folder = checkpoints_folder(tmp_path)
    for step in (4, 8):
        (folder / step_name(step)).mkdir(parents=True)
    assert checkpoint_before(tmp_path, 9) == folder / step_name(8)
    assert checkpoint_before(tmp_path, 1) is None
    (tmp_path / "rollouts").mkdir()
    for step in (1, 5, 8):  # the run had eight steps
        (tmp_path / "rollouts" / f"step_{step}.jsonl").touch()
    with pytest.raises(UsageError, match=r"Recorded steps with such a checkpoint: 1, 5\."):
        checkpoint_before(tmp_path, 8)
