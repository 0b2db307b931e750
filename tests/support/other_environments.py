"""Adapters of other people's environments against the real endpoint, with scripted answers."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import hybridrl
from hybridrl.agents.episode import Episode, Settings
from hybridrl.agents.policy import Policy
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.server import EndpointServer
from hybridrl.agents.text import ModelText
from hybridrl.agents.training.batch import unknown_turns
from hybridrl.config.choices import Init, OtherSampling
from hybridrl.config.schema import ModelConfig
from hybridrl.data.requests import STOP, Progress, Request
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.environments.programs import Reward, Task, as_reward
from hybridrl.rollout.vllm.text import ParseTools

Play = Callable[..., Coroutine[Any, Any, object]]
TINY = Path(hybridrl.__file__).parent / "models" / "tiny"
MODEL = ModelConfig(path=str(TINY), init=Init.pretrained, seed=0, trust_remote_code=False)
END = 1
TOOLS_TEMPLATE = (
    "{% if tools %}tools{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}<|assistant|>"
)


class Scripted:
    """Engines that answer what `say` makes of a prompt; they keep the prompts."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.tokenizer = load_tokenizer(MODEL)
        self.say, self.prompts = say, list[str]()

    def submit(self, request: Request) -> "asyncio.Queue[Progress]":
        """Answer at once."""
        self.prompts.append(self.tokenizer.decode(request.prompt))
        tokens = [*self.tokenizer.encode(self.say(self.prompts[-1])), END]
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        queue.put_nowait(Progress(request.request_id, tokens, [-0.5] * len(tokens), STOP))
        return queue

    def cancel(self, request: Request) -> None:
        """Do nothing."""


def played(
    play: Play,
    examples: Sequence[dict[str, Any]],
    say: Callable[[str], str],
    *,
    parse: ParseTools | None = None,
    **args: Any,
) -> tuple[list[Reward | Exception], list[str]]:
    """Play an episode of each example at the same time, each with its own key.

    Returns:
        The reward or error of each, and all prompts.
    """
    engines = Scripted(say)
    if parse is not None:
        engines.tokenizer.chat_template = TOOLS_TEMPLATE
    policy = Policy(ModelText(engines.tokenizer, [END]), engines, parse)
    settings = Settings(1.0, 1.0, 1.0, 1.0, 500, OtherSampling.refuse)

    async def one(url: str, number: int, example: dict[str, Any]) -> Reward:
        record, key = EpisodeRecord(policy.text.encode), f"key{number}"
        policy.open(Episode(key, (number,), 0, settings, record))
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        question = example["question"]
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        reward = as_reward(await play(Task(example, question, ""), client, **args), "play")
        assert unknown_turns(record.sequences, reward.turns) == ""
        assert len(record.sequences) == 1, record.branch
        return reward

    async def all_of(url: str) -> list[Any]:
        jobs = (one(url, number, example) for number, example in enumerate(examples))
        return await asyncio.gather(*jobs, return_exceptions=True)

    with closing(EndpointServer(policy, "127.0.0.1", 0)) as server:
        return asyncio.run(all_of(server.url)), engines.prompts
