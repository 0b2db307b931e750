"""Prompts and engines whose responses are a function of prompt and sample."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.requests import Request
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.sampling.source import Generation, SourceParts
from tests.support.fake_engine import CONFIG, FakeEngines


def prompt(number: int) -> Prompt:
    return Prompt(number, [number, 0], f"p{number}", f"q{number}", {"answer": ""}, {})


def script(request: Request) -> list[int]:
    """Each response is [prompt, sample] and as many more tokens as the sample's index."""
    _, number, sample = map(int, request.request_id.split("-"))
    return [number, sample, *[9] * (sample % 3)]


def generate(wanted: Wanted) -> RolloutBatch:
    """Responses of two engines."""
    return FakeEngines(script, 2).generate(wanted.requests(CONFIG))


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
