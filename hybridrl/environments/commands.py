"""Commands as agent programs, and functions that judge what a command has done.

    def score(task, transcript, folder, output) -> reward

Each is a process of its own below a supervisor, which ends all that it has started.
"""

import asyncio
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

from hybridrl.config.errors import Problem, raised_problems
from hybridrl.config.user_code.classes import function_at, locate
from hybridrl.config.user_code.importing import check_import
from hybridrl.config.user_code.signatures import check_arguments
from hybridrl.environments.programs import Reward, Task, as_reward
from hybridrl.processes.messages import END_S
from hybridrl.processes.process import FOLDER
from hybridrl.processes.supervisor import remove, supervised
from hybridrl.rewards.base import Rule, checked_by, section_problems

# Variables of a command's environment: the task as JSON and a file with it, the endpoint.
TASK, TASK_FILE, URLS, KEYS = (
    "HYBRIDRL_TASK",
    "HYBRIDRL_TASK_FILE",
    ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
)
# Linux limits a variable to 128 KiB, name included.
LONGEST_TASK = 2**17 - 100
# End of a command's output in one line of the log, and what is kept in memory.
LINE_CHARS, MAX_OUTPUT_BYTES = 300, 2**20
_JUDGED_BY: dict[str, Rule] = {
    "function": ("null or the path of a function", lambda value: isinstance(value, str | None))
}
_JUDGE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.environments.commands import judge; judge(sys.argv[2])"
)


class ProgramFailed(RuntimeError):
    """A command ended without a reward."""


def command_problems(key: str, args: dict[str, Any]) -> Iterator[Problem | str]:
    """Check the arguments of `command`."""
    argv, reward = args["command"], args["reward"]
    is_list = isinstance(argv, list) and all(isinstance(part, str) for part in argv)
    if not argv or not is_list:
        yield (
            f"{key}.args.command = {argv}, expected the texts of a program and its arguments.\n"
            f"Set '{key}.args.command=[python,/path/agent.py]'."
        )
    elif not _is_program(argv[0]):
        yield (
            f"{key}.args.command = {argv}, but {argv[0]} is neither a program on PATH nor the "
            "absolute path of an executable file. Commands run in a folder of their own.\n"
            f"Set '{key}.args.command=[python,/path/agent.py]'."
        )
    wrong = [*section_problems(f"{key}.args.reward", reward, _JUDGED_BY)]
    of_function = f"{key}.args.reward.function"
    remedy = f"Set '{of_function}=null' or '{of_function}=/path/file.py:name'."
    yield from (f"{problem}\n{remedy}" for problem in wrong)
    if not wrong and reward["function"] is not None:
        yield from raised_problems(_check_judge, f"{key}.args.reward", reward["function"])


def _is_program(name: str) -> bool:
    """Return whether a command can run this, from any folder."""
    is_relative = "/" in name and not os.path.isabs(name)
    return not is_relative and shutil.which(name) is not None


def _check_judge(key: str, path: str) -> None:
    check_import(f"{key}.function", path)
    call = "(task, transcript, folder, output)"
    check_arguments(key, path, function_at(key, path), {}, ((None,) * 4, {}), call)


@checked_by(command_problems)
async def command(
    task: Task, client: Any, *, command: list[str], memory_mb: int, reward: Mapping[str, Any]
) -> Reward:
    """Run a command as a program.

    Its environment names the endpoint and the task. It runs in an empty folder of its own; all
    processes that it started end with it. Its output is that of the episode.

    Args:
        task: of the episode.
        client: of the endpoint.
        command: program and arguments.
        memory_mb: limit of the data of each of its processes, MiB.
        reward: `function` judges the finished command. Without one, the last line of its standard
            output is the reward: a number, or an object as `as_reward` converts it.

    Raises:
        ProgramFailed: it failed, or gave no reward.
    """
    url, function = str(client.base_url).rstrip("/"), reward["function"]
    variables = dict.fromkeys(URLS, url) | dict.fromkeys(KEYS, client.api_key)
    variables["ANTHROPIC_BASE_URL"], text = url.removesuffix("/v1"), json.dumps(asdict(task))
    with _own_folder() as around:
        folder, file = around / "work", around / "task.json"
        folder.mkdir()
        file.write_text(text)
        variables |= {TASK_FILE: str(file), "PWD": str(folder)}  # PWD: no shell has set it
        variables |= {TASK: text} if len(text) < LONGEST_TASK else {}
        run = functools.partial(_run, folder, os.environ | variables, memory_mb)
        ended = await run(command)
        if function is None or ended.code:
            return _reward(ended, command[0])
        facts = {"task": asdict(task), "transcript": await _transcript(client)}
        facts |= {"output": ended.both}
        with tempfile.TemporaryFile("w+") as stdin:
            json.dump(facts, stdin)
            stdin.seek(0)
            paths = json.dumps([os.path.abspath(path) for path in sys.path])
            # -P: no module is imported from the command's folder.
            judged = [sys.executable, "-P", "-c", _JUDGE, paths, function]
            return _reward(await run(judged, stdin), function)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a folder of an episode, removed afterwards, or else with the process.

    In the background: time and failure of the removal are not those of the episode.
    """
    folder = tempfile.mkdtemp(dir=_process_folder())
    try:
        yield Path(folder)
    finally:
        asyncio.get_running_loop().run_in_executor(None, remove, folder)


@functools.cache
def _process_folder() -> str:
    """Make the folder of this process; return its path."""
    os.mkdir(os.environ[FOLDER], 0o700)
    return os.environ[FOLDER]


def judge(path: str) -> None:
    """Call the function at `path` with what stdin has; write its reward. A process of its own."""
    facts = json.load(sys.stdin)
    function = locate("agent.args.reward.function", path)
    result = function(Task(**facts["task"]), facts["transcript"], Path.cwd(), facts["output"])
    reward = as_reward(result, path)
    own = reward.total - sum(reward.turns.values())
    sys.stdout.write("\n" + json.dumps({"reward": own, "turns": reward.turns}))


async def _transcript(client: Any) -> list[list[dict[str, Any]]]:
    """Return the messages of each conversation of the episode."""
    import httpx

    answer = await client.get("/transcript", cast_to=httpx.Response)
    conversations: list[list[dict[str, Any]]] = answer.json()
    return conversations


class _Ended(NamedTuple):
    """Ends of a command's stdout, and of stdout and stderr together; its exit code."""

    stdout: str
    both: str
    code: int


def _reward(ended: _Ended, what: str) -> Reward:
    """Return the reward in the last line of a command's stdout.

    Raises:
        ProgramFailed: it is none, or the exit code is not 0.
    """
    try:
        if ended.code == 0:
            return as_reward(json.loads(ended.stdout.rstrip().rpartition("\n")[2]), what)
    except ValueError:
        pass
    end = " | ".join(ended.both.rstrip()[-LINE_CHARS:].splitlines())
    expected = 'expected as last line of stdout: a number or {"reward": number}'
    more = "" if ended.code else f"; {expected}"
    raise ProgramFailed(f"no reward, exit code {ended.code}, {end}{more}")


async def _run(
    folder: Path,
    environment: Mapping[str, str],
    memory_mb: int,
    command: Sequence[str],
    stdin: IO[str] | int = asyncio.subprocess.DEVNULL,
) -> _Ended:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        *supervised(command, memory_mb),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=environment,
        process_group=0,
    )
    stdout, both = bytearray(), bytearray()
    try:
        await asyncio.gather(_read(process.stdout, (stdout, both)), _read(process.stderr, (both,)))
        code = await process.wait()
        return _Ended(stdout.decode(errors="replace"), both.decode(errors="replace"), code)
    finally:
        await _end(process)


async def _read(stream: asyncio.StreamReader | None, outputs: Sequence[bytearray]) -> None:
    """Add what comes to some outputs, of which only the ends are kept, and to the episode's."""
    assert stream is not None
    while part := await stream.read(2**16):
        sys.stdout.buffer.write(part)
        for output in outputs:
            output += part
            del output[:-MAX_OUTPUT_BYTES]


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
