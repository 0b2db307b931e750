"""Agent programs: coroutines and commands, each run as one episode outside the trainer.

    async def run(task, client) -> float

`client` is an OpenAI client of the endpoint; its `base_url` and `api_key` fit any other SDK.
"""

import asyncio
import json
import os
import resource
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from hybridrl.config.user_code.classes import locate
from hybridrl.rewards.base import checked_by, finite_number

KEY = "agent.function"
# Variables of a command's environment: the task as JSON, the endpoint.
TASK, URLS, KEYS = (
    "HYBRIDRL_TASK",
    ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
)
# Ends of a command's output: in the log if it fails, in one line, and what is kept in memory.
SHOWN_CHARS, LINE_CHARS, MAX_OUTPUT_BYTES = 2000, 300, 2**20
# Seconds for a command to end after SIGTERM.
END_S = 5.0
_SUPERVISED = (
    "import os, signal, sys; sys.path.append(sys.argv[1]); "
    "from hybridrl.config.user_code.supervisor import supervise; "
    "supervise(int(sys.argv[2]), os.open(os.devnull, os.O_RDONLY)); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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


class ProgramFailed(RuntimeError):
    """A command ended without a reward."""


def program_task(
    function: str, args: dict[str, Any], *, memory_mb: int
) -> Callable[[Job], Awaitable[float]]:
    """Return the coroutine that runs the program of `function` for one episode."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    program = locate(KEY, function)
    _limit_memory(memory_mb)
    # Shared by all episodes: a client of its own costs an episode tens of milliseconds.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)

    async def episode(job: Job) -> float:
        # A repeated episode begins anew: the endpoint knows it by the second half of the key.
        key = f"{job.key}.{secrets.token_hex(4)}"
        client = AsyncOpenAI(
            base_url=job.url, api_key=key, http_client=http, max_retries=0, timeout=None
        )
        return finite_number(await program(job.task, client, **args), function)

    return episode


def command_problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the arguments of `command`."""
    found = args["command"]
    if not found or not all(isinstance(part, str) for part in found):
        yield (
            f"{key}.args.command = {found}, expected the texts of a program and its arguments.\n"
            f"Set '{key}.args.command=[python,/path/agent.py]'."
        )


@checked_by(command_problems)
async def command(task: Task, client: Any, *, command: list[str], memory_mb: int) -> float:
    """Run a command as a program.

    Its environment names the endpoint and the task. The last line of its standard output is the
    reward: a number, or an object {"reward": number}. It runs in an empty folder of its own; all
    processes that it started end with it.

    Args:
        task: of the episode.
        client: of the endpoint.
        command: program and arguments.
        memory_mb: limit of each of its processes, MiB of address space.

    Raises:
        ProgramFailed: it failed, or its last line is no reward; the message has its output.
    """
    url = str(client.base_url).rstrip("/")
    variables = {TASK: json.dumps(asdict(task)), "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    variables |= dict.fromkeys(URLS, url) | dict.fromkeys(KEYS, client.api_key)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _SUPERVISED, _ROOT, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=os.environ | variables,
            preexec_fn=partial(_limit_memory, memory_mb),
            process_group=0,
        )
        try:
            output = await _last_output(process)
            code = await process.wait()
        finally:
            await _end(process)
    text = output.decode(errors="replace").rstrip()
    try:
        found = json.loads(text.rpartition("\n")[2])
        reward = found["reward"] if isinstance(found, dict) else found
        if code == 0:
            return finite_number(reward, command[0])
    except (ValueError, KeyError):
        pass
    end = " | ".join(text[-LINE_CHARS:].splitlines())
    raise ProgramFailed(f"no reward, exit code {code}, {end}\n{text[-SHOWN_CHARS:]}")


def _limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process and those that it starts; they may raise it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, hard))


async def _last_output(process: asyncio.subprocess.Process) -> bytes:
    """Return the end of a process's output, of which no more is kept in memory."""
    assert process.stdout is not None
    output = bytearray()
    while part := await process.stdout.read(2**16):
        output += part
        del output[:-MAX_OUTPUT_BYTES]
    return bytes(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and all processes below it."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
