"""Prompts and an engine whose responses are a function of prompt and sample."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from hybridrl.data.batch import EngineStats, PromptBatch, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.sampling.source import Generation, SourceParts


def prompt(number: int) -> Prompt:
    return Prompt(number, [number, 0], f"p{number}", f"q{number}", {"answer": ""}, {})


def generate(request: PromptBatch) -> RolloutBatch:
    """Each response is [prompt, sample] and as many more tokens as the sample's index."""
    each = request.responses_per_prompt
    first = int(request.first_sample[0])
    samples = range(first, first + each)
    ids = request.prompt_id.tolist()
    rows = [[number, sample, *[9] * (sample % 3)] for number in ids for sample in samples]
    responses = Ragged.from_rows(rows, torch.int64)
    return RolloutBatch(
        prompts=request.prompts.select([i for i in range(len(request)) for _ in samples]),
        responses=responses,
        response_mask=responses.like(torch.ones_like(responses.values).bool()),
        rollout_log_probs=responses.like(-torch.ones(len(responses.values))),
        group_id=request.prompt_id.repeat_interleave(each),
        weight_version=torch.zeros(len(rows), dtype=torch.int64),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        engines=(EngineStats(10 * len(rows), 2.0, 0.5), EngineStats(0, 0.0, 0.0)),
    )


def decode(rows: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


class FirstWeights:
    """An engine whose weights were never updated."""

    weight_version = 0


def source_parts(
    config: Any,
    take: Any,
    generate: Any = None,
    rewards: Any = None,
    *,
    engine: Any = None,
    rollout: Any = None,
    trains_policy: Any = lambda step: True,
) -> SourceParts:
    """Parts of a source; a test gives those that it reads."""
    generation = Generation(generate, engine or FirstWeights(), ResponseLengths())
    section = lambda name: nullcontext()  # noqa: E731
    return SourceParts(config, take, generation, rewards, rollout, trains_policy, section)


def in_flight_config(
    prompts_per_step: int, longest: int, *, rounds: int = 1, **rollout: Any
) -> SimpleNamespace:
    """What sources of groups in flight read of a config, with two responses to a prompt."""
    usual = {"responses_per_prompt": 2, "temperature": 1.0, "top_p": 1.0, "seed": 1}
    algorithm = {"overlong": SimpleNamespace(train_on_truncated=True), "advantage": "grpo"}
    return SimpleNamespace(
        algorithm=SimpleNamespace(**algorithm, max_sampling_rounds=rounds),
        data=SimpleNamespace(prompts_per_step=prompts_per_step),
        rollout=SimpleNamespace(max_response_tokens=longest, **usual, **rollout),
    )
