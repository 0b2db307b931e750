"""Which prompts are sampled at the start, and what is said where log-probs differ."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import PromptImages, image_rows
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.image_tokens import PromptFiles
from hybridrl.data.sources.prompts import Prompt
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.sampling.start_check import PROMPTS, RESPONSES, TOKENS, StartCheck
from tests.support.model_shapes import with_window
from tests.support.run_configs import run_config

PLAIN = model_shape(read_model_config("embedded"))
SHAPE = with_window(PLAIN, 50, 2)


class Trainer:
    """Both sides: log-probs are 0, but for what `error` adds to those of vLLM."""

    def __init__(self, error):
        self.error = error
        self.sampled = []

    def call(self, method, requests):
        assert method == "generate"
        self.sampled.append(requests)
        responses = Ragged.from_rows([torch.zeros(TOKENS)] * len(requests), torch.int32)
        rows = [
            torch.tensor([self.error(len(one.prompt) + k) for k in range(TOKENS)])
            for one in requests.requests
        ]
        return RolloutBatch(
            prompts=requests.prompts,
            responses=responses,
            response_mask=responses.like(torch.ones_like(responses.values).bool()),
            rollout_log_probs=Ragged.from_rows(rows, torch.float32),
            group_id=requests.group_id,
            weight_version=torch.zeros(len(requests), dtype=torch.int64),
            truncated=torch.ones(len(requests), dtype=torch.bool),
            images=image_rows(one.images for one in requests.requests),
        )

    def log_probs(self, batch):
        return batch.responses.like(torch.zeros(len(batch.responses.values)))


def checked(error, *overrides, shape=SHAPE, seen=()):
    """The requests of a start whose log-probs differ so, by the position of a token."""
    trainer = Trainer(error)
    phases = SimpleNamespace(section=lambda name: nullcontext())
    check = StartCheck(run_config(*overrides), shape, trainer, trainer, phases, seen)
    for _ in range(2):  # the second step samples and compares nothing
        check.sample()
        check.compare()
    return [one for requests in trainer.sampled for one in requests.requests]


def test_one_prompt_is_shorter_and_one_longer_than_the_window():
    requests = checked(lambda position: 0.0)
    assert [len(one.prompt) for one in requests] == [8] * 8 + [42] * 8 + [66] * 8
    assert all(one.prompt == requests[k - k % 2].prompt for k, one in enumerate(requests))
    assert len({tuple(one.prompt) for one in requests}) == 3 * PROMPTS
    assert len({one.seed for one in requests}) == len(requests) == 3 * PROMPTS * RESPONSES
    assert all(0 <= token < SHAPE.vocab for one in requests for token in one.prompt)
    assert {one.max_tokens for one in requests} == {16}


def test_no_prompt_is_longer_than_the_engine_takes():
    sizes = ["rollout.max_prompt_tokens=30", "rollout.max_response_tokens=12"]
    requests = checked(lambda position: 0.0, *sizes)
    assert {len(one.prompt) for one in requests} == {8, 30}
    assert {one.max_tokens for one in requests} == {12}


def test_a_model_without_windows_is_sampled_once():
    requests = checked(lambda position: 0.0, shape=PLAIN)
    assert {len(one.prompt) for one in requests} == {8}


def test_the_first_token_that_differs_is_named():
    """The query of token 50 sees one token more in vLLM: from token 51 on."""
    with pytest.raises(RunStopped) as stopped:
        checked(lambda position: 0.02 * (position > 50))
    said = str(stopped.value)
    assert said.startswith("at the start, rollout_log_probs and old_log_probs differ by more than ")
    assert "1 layers of full attention, 2 layers of sliding attention (window 50)" in said
    assert "on 2 of 2 lengths:" in said
    assert "42 tokens, differs from token 51 of a sequence on): 0.02 nats" in said
    assert "in the mean of 56 tokens" in said  # 7 of 16 in each response
    assert "66 tokens, differs from token 66 of a sequence on): 0.02 nats" in said


def test_one_token_is_enough_in_float32():
    checked(lambda position: 9e-4)
    with pytest.raises(RunStopped, match=r"8 tokens, differs from token 12 of a sequence on"):
        checked(lambda position: 0.002 * (position == 12))
    checked(lambda position: 0.002, "trainer.max_log_prob_diff=0.01")


def test_the_mean_counts_in_bfloat16_where_single_tokens_differ_by_more():
    """Of 128 tokens and 100 without a difference."""
    narrow = [
        "rollout.dtype=bfloat16",
        "fsdp.param_dtype=bfloat16",
        "trainer.max_log_prob_diff=0.1",
    ]
    checked(lambda position: 1.4 * (position % 16 == 0), *narrow)
    checked(lambda position: 0.17, *narrow)
    with pytest.raises(RunStopped, match=r"on 3 of 3 lengths"):
        checked(lambda position: 0.18, *narrow)


def test_a_log_prob_that_is_no_number_stops_the_run():
    with pytest.raises(RunStopped, match=r"8 tokens, differs from token 12 of"):
        checked(lambda position: float("nan") if position >= 12 else 0.0)


def test_prompts_with_images_are_compared_as_well():
    processor = SimpleNamespace(processed=lambda files: PromptImages(("one",), {}))
    seen = [Prompt(0, [1] * 100, "", "", {}, {}, images=PromptFiles((), [], processor))]
    requests = checked(lambda position: 0.0, seen=seen)
    assert [one.images is None for one in requests] == [True] * 24 + [False] * 2
    with pytest.raises(RunStopped, match="100 tokens with images, differs from token 100"):
        checked(lambda position: 0.1 * (position >= 100), seen=seen)
