"""Agent programs: coroutines, each run as one episode outside the trainer.

    async def run(task, client) -> reward

`client` is an OpenAI client of the endpoint; its `base_url` and `api_key` fit any other SDK.
commands.py runs other programs.
"""

import io
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TextIO
from urllib.parse import urlsplit

from hybridrl.config.user_code.classes import locate
from hybridrl.processes.messages import OUTPUT
from hybridrl.processes.supervisor import limit_memory
from hybridrl.rewards.base import WrongScore, finite_number

KEY = "agent.function"


@dataclass(frozen=True)
class Task:
    """Problem that an episode is to solve.

    Attributes:
        example: row of the data set; `answer` is the reference answer.
        messages: the problem as chat messages.
        prompt: the same rendered by the chat template, up to the policy's turn.
    """

    example: dict[str, Any]
    messages: list[dict[str, Any]]
    prompt: str


class Job(NamedTuple):
    """One episode: its task, and the endpoint's address and key."""

    task: Task
    url: str
    key: str


class Reward(NamedTuple):
    """Reward of an episode.

    Attributes:
        total: including that of its turns.
        turns: rewards of turns by the ids of their answers; of others 0.
    """

    total: float
    turns: dict[str, float]


def program_task(
    function: str, args: dict[str, Any], *, memory_mb: int
) -> Callable[[Job], Awaitable[Reward]]:
    """Return the coroutine that runs the program of `function` for one episode."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    output = EpisodeOutput()
    program = locate(KEY, function)
    limit_memory(memory_mb)
    # Shared by all episodes: a client of its own costs an episode tens of milliseconds.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)

    async def episode(job: Job) -> Reward:
        bypass_proxies(job.url)
        client = AsyncOpenAI(
            base_url=job.url, api_key=job.key, http_client=http, max_retries=0, timeout=None
        )
        with output.of_episode():
            return as_reward(await program(job.task, client, **args), function)

    return episode


def bypass_proxies(url: str) -> None:
    """Exclude an address from the proxies of all clients here and in commands."""
    host, names = urlsplit(url).hostname or "", ("no_proxy", "NO_PROXY")
    known = next(filter(None, map(os.environ.get, names)), "")
    if known != "*" and host not in known.split(","):
        os.environ.update(dict.fromkeys(names, f"{known},{host}".lstrip(",")))


def as_reward(value: Any, function: str) -> Reward:
    """Convert what a program returned: a number, or {"reward": number, "turns": {id: number}}.

    Raises:
        WrongScore: it is neither.
    """
    if isinstance(value, Reward):
        return value
    if not isinstance(value, dict):
        return Reward(finite_number(value, function), {})
    turns = value.get("turns", {})
    if "reward" not in value or not isinstance(turns, dict):
        raise WrongScore(
            f'{function} returned {value}, expected a number or {{"reward": number, '
            '"turns": {id of an answer: number}}'
        )
    rewards = {str(name): finite_number(one, function) for name, one in turns.items()}
    return Reward(finite_number(value["reward"], function) + sum(rewards.values()), rewards)


def read_reward(value: Any) -> Reward:
    """Convert a Reward as decoded from JSON."""
    total, turns = value
    return Reward(float(total), {str(name): float(reward) for name, reward in turns.items()})


# End of an episode's output that is shown if it fails.
SHOWN_CHARS = 2000


class EpisodeOutput:
    """stdout and stderr of this process, by episode; what is written outside of one passes on."""

    def __init__(self) -> None:
        self._current: ContextVar[bytearray | None] = ContextVar("output", default=None)
        sys.stdout, sys.stderr = self._of(sys.stdout), self._of(sys.stderr)

    @contextmanager
    def of_episode(self) -> Iterator[None]:
        """Keep the output of the code in this block; an error gets a note with its end."""
        output = bytearray()
        before = self._current.set(output)
        try:
            yield
        except BaseException as error:
            if text := output.decode(errors="replace").strip():
                error.add_note(f"{OUTPUT}{text}")
            raise
        finally:
            self._current.reset(before)

    def _of(self, real: TextIO) -> TextIO:
        stream = _Stream(real.buffer, self._current)
        return io.TextIOWrapper(stream, "utf-8", "backslashreplace", write_through=True)


class _Stream(io.BufferedIOBase):
    """Binary stream in place of `real`, which has the descriptor."""

    def __init__(self, real: BinaryIO, current: ContextVar[bytearray | None]) -> None:
        self._real, self._current = real, current

    @property
    def name(self) -> str:
        """Name of the real stream."""
        return self._real.name

    def write(self, data: Any) -> int:
        """Add data to the episode's output, of which the end is kept, or to the real stream."""
        if (output := self._current.get()) is None:
            self._real.write(data)
            self._real.flush()
        else:
            output += data
            del output[:-SHOWN_CHARS]
        return len(data)

    def writable(self) -> bool:
        """Return that data can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the real stream."""
        return self._real.fileno()
