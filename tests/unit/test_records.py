"""Records of a run: turns, which tokens are kept, and their columns."""

import json
from dataclasses import replace

import pytest
import torch
from pyarrow import parquet

from hybridrl.config.sections import FunctionConfig
from hybridrl.controller.calls import Span
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.record import Responses, StepRecord
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.timing.timeline import Section, Timeline
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.progress import Progress
from hybridrl.trainer.tracking.records import RecordBuilder
from hybridrl.trainer.tracking.rollout_log import conversations
from hybridrl.trainer.tracking.token_log import clipped, pick_rows, token_table, write_tokens
from hybridrl.trainer.tracking.tracker import Tracker
from tests.support.batches import batch_of
from tests.support.run_configs import run_config


def texts(rows):
    return [".".join(map(str, row)) for row in rows]


def ragged(*rows):
    dtype = torch.bool if isinstance(rows[0][0], bool) else torch.float32
    return Ragged.from_rows(rows, dtype)


def test_a_conversation_is_cut_where_the_speaker_changes():
    batch = replace(
        batch_of([4, 2]),
        responses=Ragged.from_rows([[1, 2, 3, 4], [5, 6]], torch.int32),
        response_mask=ragged([False, True, True, False], [True, True]),
    )
    assert conversations(batch, texts, "tool") == [
        [
            {"role": "tool", "text": "1"},
            {"role": "assistant", "text": "2.3"},
            {"role": "tool", "text": "4"},
        ],
        [{"role": "assistant", "text": "5.6"}],
    ]


def test_an_episode_in_which_nothing_was_sampled_has_no_turns():
    batch = replace(
        batch_of([1, 2]),
        response_mask=ragged([False], [False, False]),
        rollout_log_probs=ragged([0.0], [-0.5, -0.1]),  # the second is sampled, and not trained
    )
    assert [len(turns) for turns in conversations(batch, texts, "user")] == [0, 1]


def test_records_of_an_agent_have_what_the_model_read():
    own = ["environment=agent", "agent.function=a.py:run", "trainer.samples_every_steps=1"]
    config = run_config("algorithm=grpo", *own)
    batch = replace(batch_of([1, 1]), prompts=Ragged.from_rows([[7, 8], [9]], torch.int32))
    prompt = Prompt(1, [1, 2, 3], "<user> 1+1?", "1+1?", {"answer": "2"}, {})
    responses = Responses([prompt] * 2, batch, Rewarded(["a", "b"], [0.5, 1.0], []))
    records = RecordBuilder(config, texts, texts)(responses)
    assert [one.prompt for one in records] == ["7.8", "9"]
    config.agent = None
    records = RecordBuilder(config, texts, texts)(responses)
    assert [one.prompt for one in records] == ["<user> 1+1?"] * 2


SCORES = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("count", "rows"),
    # Best, worst, farthest from the reference; then at even distances; then all.
    [(1, [2]), (2, [2, 6]), (3, [2, 5, 6]), (4, [0, 2, 5, 6]), (5, [0, 1, 2, 5, 6])],
)
def test_best_worst_farthest_and_others_are_picked(count, rows):
    batch = batch_of([2] * 8)
    far = [[0.0, 0.0] for _ in range(8)]
    far[5] = [0.0, -3.0]
    zeros = batch.responses.like(torch.zeros(16))
    batch = batch.adding(old_log_probs=zeros, ref_log_probs=ragged(*far))
    assert pick_rows(batch, SCORES, count) == rows
    assert pick_rows(batch, SCORES, 100) == [*range(8)]


LOG_2 = 0.6931472


@pytest.mark.parametrize(
    ("loss", "cut"),
    [
        # Ratios 2, 2, 1/2 and 1; 2, which does not count, and 1/2. Advantages +, -, -, +; +, +.
        ("ppo_clip", [True, False, True, False, False, False]),
        # The bound of 1.9 cuts the second, too.
        ("dual_clip", [True, True, True, False, False, False]),
        # One ratio for each response: 2 ** (1/4) and 1/2.
        ("gspo", [True, False, False, True, False, False]),
        ("cispo", None),
    ],
)
def test_a_token_is_clipped_on_the_side_where_the_loss_is_cut(loss, cut):
    batch = batch_of([4, 2])
    batch = batch.adding(
        old_log_probs=batch.responses.like(torch.full((6,), -1.0)),
        advantages=ragged([1.0, -1.0, -1.0, 1.0], [1.0, 1.0]),
        loss_mask=ragged([True, True, True, True], [False, True]),
    )
    new = torch.tensor([LOG_2, LOG_2, -LOG_2, 0.0, LOG_2, -LOG_2]) - 1.0
    args = {"clip_low": 0.2, "clip_high": 0.18, "max_ratio": 1.9}
    found = clipped(batch, new, FunctionConfig(function=loss, args=args))
    assert (None if found is None else found.tolist()) == cut


def test_a_table_has_a_row_per_token_and_null_where_there_is_no_number(tmp_path):
    batch = batch_of([2, 1])
    batch = batch.adding(
        response_mask=ragged([True, False], [True]),
        old_log_probs=ragged([-0.5, -0.25], [-0.125]),
        advantages=ragged([1.0, 0.0], [2.0]),
        weight_version=torch.tensor([7, 8]),
    )
    updated = batch.responses.like(torch.complex(torch.arange(3.0), torch.arange(3.0) + 0.5))
    path = write_tokens(tmp_path, 3, token_table(batch, [4, 9], updated, None, texts))
    assert path == tmp_path / "tokens" / "step_3.parquet"
    assert parquet.read_table(path).to_pydict() == {
        "response": [4, 4, 9],
        "position": [0, 1, 0],
        "token_id": [0, 0, 1],
        "token": ["0", "0", "1"],
        "rollout_log_prob": [0.0, None, -1.0],
        "old_log_prob": [-0.5, -0.25, -0.125],
        "ref_log_prob": [None] * 3,
        "teacher_log_prob": [None, None, None],
        "new_log_prob": [0.0, 1.0, 2.0],
        "entropy": [0.5, 1.5, 2.5],
        "advantage": [1.0, 0.0, 2.0],
        "value": [None] * 3,
        "return_": [None] * 3,
        "clipped": [None] * 3,
        "trained": [True, False, True],
        "version": [7, 7, 8],
    }


def test_a_resumed_timeline_forgets_later_steps_and_a_damaged_line(tmp_path):
    config = run_config("tracking.tensorboard=false", "trainer.samples_every_steps=2")
    section = Section(Span("update", 10.5, 1.0), [[Span("actor.update", 10.75, 0.5)]])
    timeline = Timeline(Span("step", 10.0, 2.0), [section])
    path = tmp_path / "timeline.jsonl"

    def steps(*numbers, before=()):
        tracker = Tracker(tmp_path, config, [{"step": step} for step in before])
        progress = Progress(config, RunConsole(1), tracker, list, int)
        for step in numbers:
            progress.after(StepRecord(step, {}, None, timeline))
        tracker.close()
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    assert steps(0, 1, 2, 3, 4, 6) == [2, 4, 6]
    assert steps(6, 8, before=[4, 5]) == [2, 4, 6, 8]
    path.write_bytes(path.read_bytes()[:-20])
    assert steps(10, before=[9]) == [2, 4, 6, 10]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 2,
        "seconds": 2.0,
        "num_ranks": 1,
        "sections": [
            {
                "name": "update",
                "start": 0.5,
                "seconds": 1.0,
                "ranks": [[{"method": "actor.update", "start": 0.75, "seconds": 0.5}]],
            }
        ],
    }
