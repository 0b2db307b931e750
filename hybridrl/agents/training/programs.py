"""Processes of agent programs."""

import itertools
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

from hybridrl.config.schema import AgentConfig
from hybridrl.data.sources.images import ImageText
from hybridrl.data.sources.prompts import Prompt
from hybridrl.distributed.background import run_in_background
from hybridrl.environments.programs import Job, Task, read_reward
from hybridrl.processes.messages import Indexed, Setup
from hybridrl.processes.pool import TaskPool

TASK = "hybridrl.environments.programs.program_task"
# A request costs its process some milliseconds of CPU in an SDK, while an engine waits for it.
MAX_PROCESSES = 16
# Episodes at a time for each rollout engine, if agent.concurrency is null.
EACH = 64
# `Reward` of an episode, or `Failure`.
Outcome = Future[Any]


def task_of(prompt: Prompt) -> Task:
    """Return the task of an episode."""
    messages = [{**message, "content": _content(message["content"])} for message in prompt.messages]
    return Task(prompt.example, messages, prompt.text)


def _content(text: str) -> str | list[Mapping[str, object]]:
    """Return a message's text, or its parts in the form of chat completions if it has images."""
    if not isinstance(text, ImageText):
        return text
    images = iter(text.images)
    return [
        part
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": next(images).url}}
        for part in text.parts
    ]


class ProgramPool:
    """Processes of the programs, which run while the caller does other things.

    Attributes:
        on_repeat: called with an episode's name and a new attempt's, before its program runs again.
    """

    def __init__(self, config: AgentConfig, num_engines: int = 1) -> None:
        options, count = {"memory_mb": config.memory_mb}, config.concurrency or num_engines * EACH
        setup = Setup(TASK, config.function, config.args, config.timeout_s, count, options)
        self._pool = TaskPool(
            setup,
            config.num_processes,
            "agent",
            read_reward,
            most=MAX_PROCESSES,
            repeated=self._repeated,
        )
        self.on_repeat: Callable[[str, str], None] = lambda name, attempt: None
        self._new: SimpleQueue[tuple[list[tuple[Job, Outcome]], bool]] = SimpleQueue()
        self._numbers, self._open = itertools.count(), dict[int, Outcome]()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._serving = run_in_background(self._serve, name="programs")

    def begin(self, jobs: Sequence[Job], *, first: bool = False) -> list[Outcome]:
        """Begin to run jobs; return the Future of each one's `Reward` or `Failure`.

        With `first` they run before those that wait for their turn.

        Raises:
            ProcessesError: processes do not start up.
        """
        if self._serving.done():
            self._serving.result()
        begun = [(job, Outcome()) for job in jobs]
        self._new.put((begun, first))
        self._ring.send(b"!")
        return [outcome for _, outcome in begun]

    def log(self, outcomes: Sequence[Any]) -> None:
        """Log the failures among the results of some jobs."""
        self._pool.log(outcomes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()
        self._ring.send(b"!")
        wait([self._serving])
        self._pool.close()
        self._bell.close()
        self._ring.close()

    def _serve(self) -> None:
        """Run jobs as they come; an error, such as the pool's end, is that of all open ones."""
        try:
            while True:
                for number, result in self._pool.advance(self._arrived(), self._bell).items():
                    self._open.pop(number).set_result(result)
        except BaseException as error:
            list(self._arrived())
            for outcome in self._open.values():
                outcome.set_exception(error)
            raise

    def _repeated(self, job: Job) -> Job:
        """Return a job for another attempt: with a key that earlier attempts cannot know."""
        name, attempt = job.key.partition(".")[0], secrets.token_urlsafe(16)
        self.on_repeat(name, attempt)
        return job._replace(key=f"{name}.{attempt}")

    def _arrived(self) -> Iterator[Indexed]:
        with suppress(BlockingIOError):
            self._bell.recv(2**16)
        while not self._new.empty():
            begun, first = self._new.get()
            numbered = [(next(self._numbers), *one) for one in begun]
            self._open |= {number: outcome for number, _, outcome in numbered}
            items = [(number, job) for number, job, _ in numbered]
            if first:
                self._pool.put_first(items)
            else:
                yield from items
