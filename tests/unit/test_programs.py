"""Agent programs: rewards, failures with their output, limits, and nothing left behind."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hybridrl.agents.training.programs import ProgramPool
from hybridrl.config.choices import OtherSampling
from hybridrl.config.schema import AgentConfig
from hybridrl.environments.commands import command_problems
from hybridrl.environments.programs import Job, Reward, Task
from hybridrl.processes.messages import Failure
from hybridrl.processes.pool import ProcessesError
from tests.support.scorers import wait_for

PROGRAM = """
import asyncio, os, time

async def run(task, client, *, scale):
    match task.example["answer"]:
        case "key":
            return float(client.api_key.startswith("key-") and str(client.base_url) == "http://x/v1/")
        case "raise":
            raise ValueError("no such tool")
        case "hang":
            await asyncio.sleep(60)
        case "block":
            time.sleep(60)
        case "die":
            os._exit(3)
        case "memory":
            bytearray(6 * 2**30)
        case "text":
            return "good"
        case "turns":
            return {"reward": 1, "turns": {"chatcmpl-a": 0.5, "chatcmpl-b": 0.25}}
        case "no turns":
            return {"reward": 1, "turns": [0.5]}
        case "flood":
            print("beginning")
            for number in range(10**5):
                print("line", number)
            await asyncio.to_thread(print, "end of", task.example["answer"])
            raise ValueError("after much output")
        case "slow flood":
            print("I wait for a tool")
            await asyncio.sleep(60)
    print("quiet", task.example["answer"])
    return scale * len(task.messages)
"""

KEEPS_KEY = """open({keys!r}, "a").write(client.api_key + chr(10)); await asyncio.sleep(0.5)
    """


IN_ORDER = """
import asyncio
async def run(task, client, *, file):
    open(file, "a").write(task.example["answer"])
    await asyncio.sleep(0.2)
    return 1
"""

CLEANING = """
import asyncio
async def run(task, client, *, file):
    try:
        await asyncio.sleep(60)
    finally:
        open(file, "a").write("began ")
        await asyncio.sleep(5)
        open(file, "a").write("ended ")
"""

MEETING = """
import asyncio
from pathlib import Path

async def run(task, client, *, folder, count):
    (Path(folder) / task.example["answer"]).touch()
    while len([*Path(folder).iterdir()]) < count:
        await asyncio.sleep(0.01)
    return 1
"""


def job(answer: str) -> Job:
    return Job(
        Task({"answer": answer}, [{"role": "user", "content": "?"}], "?"), "http://x/v1", "key-1"
    )


def config(function: str, **args: object) -> AgentConfig:
    return AgentConfig(
        function=function,
        args=args,
        concurrency=8,
        num_processes=2,
        timeout_s=2.0,
        memory_mb=4096,
        other_sampling=OtherSampling.refuse,
        tool_parser=None,
        host="127.0.0.1",
        port=0,
    )


def results(pool: ProgramPool, jobs: list[Job]) -> list[Any]:
    return [one.result(60) for one in pool.begin(jobs)]


def test_a_failed_episode_costs_its_own_reward(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    asked = ["1", "key", "raise", "hang", "block", "die", "memory", "text"]
    asked += ["no turns", "turns", "2"]
    start = time.monotonic()
    with ProgramPool(config(f"{file}:run", scale=0.5)) as pool:
        found = results(pool, [job(answer) for answer in asked])
        # After a signal while it starts, Python must not wait for it at its end.
        assert all(t.daemon for t in threading.enumerate() if t.name.startswith("programs"))
    assert found[0] == found[-1] == Reward(0.5, {}) and found[1] == Reward(1.0, {})
    assert found[-2] == Reward(1.75, {"chatcmpl-a": 0.5, "chatcmpl-b": 0.25})
    reasons = [one.reason for one in found if isinstance(one, Failure)]
    for reason, part in zip(
        reasons,
        [
            "no such tool",
            "longer than 2 s",
            "longer than 2 s",
            "exit code 3",
            "MemoryError",
            "text",
            "id of an answer",
        ],
        strict=True,
    ):
        assert part in reason or (part == "text" and "expected a number" in reason)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(("allowed", "count"), [(8, 8), (None, 128)])
def test_as_many_programs_run_at_the_same_time_as_allowed(tmp_path, allowed, count):
    """By default 64 for each of two engines."""
    file, folder = tmp_path / "agent.py", tmp_path / "met"
    file.write_text(MEETING)
    folder.mkdir()
    settings = config(f"{file}:run", folder=str(folder), count=count)
    settings = replace(settings, concurrency=allowed, num_processes=3, timeout_s=30.0)
    with ProgramPool(settings, num_engines=2) as pool:
        found = results(pool, [job(str(number)) for number in range(count)])
    assert found == [Reward(1.0, {})] * count


def test_what_begins_first_waits_for_no_others_turn(tmp_path):
    """Two run at a time; those of an evaluation come before what waits, in their order."""
    file, order = tmp_path / "agent.py", tmp_path / "order"
    file.write_text(IN_ORDER)
    settings = replace(config(f"{file}:run", file=str(order)), concurrency=2, num_processes=1)
    with ProgramPool(settings) as pool:
        waiting = pool.begin([job(name) for name in "abcdef"])
        assert wait_for(order.exists)
        first = pool.begin([job(name) for name in "123"], first=True)
        assert [one.result(60) for one in (*first, *waiting)] == [Reward(1.0, {})] * 9
    assert order.read_text() == "ab123cdef"


def test_long_clean_up_after_the_time_limit_repeats_no_episode(tmp_path):
    """The failure waits for its beginning alone; it goes on and ends."""
    file, notes = tmp_path / "agent.py", tmp_path / "notes"
    file.write_text(CLEANING)
    settings = replace(config(f"{file}:run", file=str(notes)), num_processes=1, timeout_s=1.0)
    repeated: list[str] = []
    with ProgramPool(settings) as pool:
        pool.on_repeat = lambda name, attempt: repeated.append(name)
        found = results(pool, [job("a"), job("b"), job("c")])
        assert notes.read_text() == "began " * 3 and not repeated
        assert [one.reason for one in found] == ["took longer than 1 s"] * 3
        assert wait_for(lambda: notes.read_text().endswith("ended " * 3))


def test_a_program_that_is_repeated_has_a_new_key_that_was_named_before(tmp_path):
    """In the company of one that kills its process; before, the endpoint is told."""
    file, keys = tmp_path / "agent.py", tmp_path / "keys.txt"
    file.write_text(PROGRAM.replace("match task", KEEPS_KEY.format(keys=str(keys)) + "match task"))
    settings, told = config(f"{file}:run", scale=0.5), []
    settings.num_processes = 1
    with ProgramPool(settings) as pool:
        pool.on_repeat = lambda *names: told.append((names, len(keys.read_text().split())))
        found = results(pool, [job("hang"), job("die"), job("die")])
    assert all(isinstance(one, Failure) for one in found)
    begun = keys.read_text().split()
    assert begun[:3] == ["key-1"] * 3 and len({*begun}) == 4
    assert begun[3:] == [f"{name}.{attempt}" for (name, attempt), _ in told]
    assert [count for _, count in told] == [3, 3, 3]


def test_the_end_of_a_coroutines_output_is_kept_with_its_failure(tmp_path, capfd):
    """Of its own output, though other episodes of its process write meanwhile."""
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    settings = config(f"{file}:run", scale=0.5)
    settings.num_processes = 1
    asked = ["slow flood", "1", "flood", "2"]
    with ProgramPool(settings) as pool:
        slow, _, flood, _ = results(pool, [job(answer) for answer in asked])
    assert flood.reason == "ValueError: after much output"
    assert "line 99999\n  end of flood" in flood.traceback and len(flood.traceback) < 5000
    assert "beginning" not in flood.traceback and "quiet" not in flood.traceback
    assert "longer than 2 s" in slow.reason and "I wait for a tool" in slow.traceback
    assert "quiet" not in "".join(capfd.readouterr())


def test_the_end_of_a_run_does_not_wait_for_its_programs(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    settings = config(f"{file}:run", scale=0.5)
    settings.timeout_s = 100.0
    start = time.monotonic()
    with ProgramPool(settings) as pool:
        running = pool.begin([job("1"), job("block"), job("hang")])
        time.sleep(4)
    assert running[0].result(1) == Reward(0.5, {})
    for one in running[1:]:
        with pytest.raises(ProcessesError):
            one.result(1)
    assert time.monotonic() - start < 30


COMMAND = "import json, os; exec(json.loads(os.environ['HYBRIDRL_TASK'])['example']['answer'])"


@pytest.fixture(scope="module")
def commands() -> Iterator[ProgramPool]:
    """Runs the answer of a task as a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "here")
        patch.delenv("no_proxy", raising=False)
        with ProgramPool(config(**command_settings(None))) as pool:
            yield pool


def command_settings(judge: str | None) -> dict[str, Any]:
    """Settings of the command, judged by a function or by its last line."""
    path, command = "hybridrl.environments.commands.command", [sys.executable, "-c", COMMAND]
    own = {"command": command, "memory_mb": 512, "reward": {"function": judge}}
    return {"function": path} | own


def run(pool: ProgramPool, script: str) -> object:
    """Result of a command as an episode."""
    return results(pool, [job(script)])[0]


def test_the_last_line_of_a_command_is_its_reward(commands):
    script = (
        "task = json.loads(os.environ['HYBRIDRL_TASK']); print('thinking'); "
        "assert os.environ['OPENAI_BASE_URL'] == 'http://x/v1'; assert not os.listdir('.'); "
        "assert os.path.samefile('.', os.environ['PWD']); "
        "assert os.environ['ANTHROPIC_BASE_URL'] == 'http://x'; "
        "assert os.environ['NO_PROXY'] == os.environ['no_proxy'] == 'here,x'; "
        "print(json.dumps({'reward': len(task['messages'])}))"
    )
    assert run(commands, script) == Reward(1.0, {})
    script = "print(json.dumps({'reward': 0, 'turns': {'chatcmpl-a': 0.5}}))"
    assert run(commands, script) == Reward(0.5, {"chatcmpl-a": 0.5})


def test_the_example_of_a_sandbox_hides_the_answer_from_its_program():
    """From its environment, its folder, files and processes around it."""
    example = Path(__file__).parents[2] / "examples" / "sandboxed_agent.py"
    hidden = f"../task.json {example} /root /home /tmp"
    script = f"""
        grep '"role": "user"' question.json && test -n "$OPENAI_API_KEY" &&
        test -z "$(ls -d {hidden} 2> /dev/null)" &&
        test -z "$(cat /proc/*/environ | grep HYBRIDRL_TASK)" && echo 1
    """
    own = command_settings(None) | {"command": [sys.executable, str(example), "sh", "-c", script]}
    with ProgramPool(config(**own)) as pool:
        assert results(pool, [job("7")]) == [Reward(1.0, {})]


def test_a_task_that_no_variable_holds_is_in_a_file():
    """Linux limits a variable to 128 KiB; in ASCII JSON each of these letters has 6 bytes."""
    script = (
        "import json, os; file = os.environ['HYBRIDRL_TASK_FILE']; "
        "task = json.load(open(file)); assert 'HYBRIDRL_TASK' not in os.environ; "
        "os.rename(file, 'task.json'); print(len(task['example']['question']))"
    )
    own = command_settings(None) | {"command": [sys.executable, "-c", script]}
    with ProgramPool(config(**own)) as pool:
        long = job("")
        long.task.example["question"] = "数" * 30_000
        assert results(pool, [long])[0] == Reward(30_000.0, {})


JUDGE = """
import os, time

def score(task, transcript, folder, output):
    print("judging")
    if "slow" in output:
        time.sleep(60)
    if "much" in output:
        bytearray(2**30)
    assert transcript == [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}]]
    assert task.messages[0]["content"] == "?" and os.getcwd() == str(folder)
    turns = {"msg_a": output.count("!")}
    return {"reward": float((folder / "made.txt").read_text()), "turns": turns}
"""


@pytest.fixture
def transcripts() -> Iterator[str]:
    """The address of a server with the transcript of one conversation."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = {"role": "assistant", "content": "7"}
            body = json.dumps([[{"role": "user", "content": "?"}, said]]).encode()
            assert self.path == "/v1/transcript"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_function_judges_transcript_folder_and_output(tmp_path, transcripts):
    """In a process of its own with the limits of the command."""
    (tmp_path / "judge.py").write_text(JUDGE)
    scripts = [
        "open('made.txt', 'w').write('2.5'); print('done!!')\n"
        "for name in ('json', 'numpy'): open(f'{name}.py', 'w').write('print(9); exit(0)')",
        "print('no file')",
        "print('much')",
        "raise SystemExit(3)",
        "print('slow')",
    ]
    settings = config(**command_settings(f"{tmp_path}/judge.py:score"))
    *jobs, slow = [job(script)._replace(url=transcripts) for script in scripts]
    with ProgramPool(settings) as pool:
        late = results(pool, [slow])
    settings.timeout_s = 60.0
    with ProgramPool(settings) as pool:
        found, *failures = [*results(pool, jobs), *late]
    assert found == Reward(4.5, {"msg_a": 2.0})
    parts = ["FileNotFoundError", "MemoryError", "exit code 3", "longer than 2 s"]
    for failure, part in zip(failures, parts, strict=True):
        assert isinstance(failure, Failure) and part in failure.reason


def test_a_command_that_fails_is_shown_with_its_output(commands):
    found = run(commands, "print('step 1'); raise SystemExit(4)")
    assert isinstance(found, Failure) and "code 4, step 1" in found.reason
    assert "expected" not in found.reason
    found = run(commands, "print(json.dumps({'score': 1}))")
    assert isinstance(found, Failure) and '{"score": 1}; expected' in found.reason
    assert found.reason.endswith('a number or {"reward": number}')


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ([sys.executable], None),
        (["ls", "-l"], None),
        ("ls", "args.command = ls, expected the texts"),
        (3, "args.command = 3, expected the texts"),
        (["no-such-program", "x"], "no-such-program is neither a program on PATH"),
        (["./run.sh"], "./run.sh is neither"),
        (["{folder}/agent.sh"], "agent.sh is neither"),
        (["{folder}/run.sh"], None),
    ],
)
def test_a_command_is_a_list_with_a_program(tmp_path, monkeypatch, command, problem):
    """One that can run in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("agent.sh").write_text("#!/bin/sh\n")
    Path("run.sh").touch(0o755)
    if isinstance(command, list):
        command = [part.format(folder=tmp_path) for part in command]
    args = {"command": command, "reward": {"function": None}}
    found = [*command_problems("agent", args)]
    assert len(found) == (problem is not None) and (problem or "") in "".join(found)


@pytest.mark.parametrize("reward", [None, "judge.py:score", {}, {"function": 3}, {"path": None}])
def test_a_commands_reward_is_a_section_with_a_function(reward):
    problems = [*command_problems("agent", {"command": ["ls"], "reward": reward})]
    assert problems and all("agent.args.reward" in problem for problem in problems)
    assert all("agent.args.reward.function=" in problem for problem in problems)


def test_a_program_that_cannot_run_is_named(tmp_path):
    """It may go, or change, after the check."""
    (tmp_path / "agent.sh").write_text("echo 1")
    settings, own = command_settings(None), {}
    for path in (tmp_path / "agent.sh", tmp_path / "gone"):
        with ProgramPool(config(**settings | {"command": [str(path)]})) as pool:
            own[path.name] = run(pool, "").reason
    assert own["agent.sh"].endswith(f"code 1, {tmp_path}/agent.sh: Permission denied")
    assert own["gone"].endswith(f"code 1, {tmp_path}/gone: No such file or directory")


def test_a_command_may_write_to_stderr_after_its_reward(commands):
    script = "import sys; print('0.5', flush=True); print('Unclosed session', file=sys.stderr)"
    assert run(commands, script) == Reward(0.5, {})


def test_a_command_that_takes_too_long_is_shown_with_its_output(commands, caplog):
    script = "import time; print('I wait for a tool', flush=True); time.sleep(60)"
    found = run(commands, script)
    commands.log([found])
    assert "longer than 2 s" in found.reason and "I wait for a tool" in caplog.text


def test_a_command_may_reserve_addresses_without_memory(commands):
    """As WebAssembly in Node does."""
    script = (
        "import mmap; mmap.mmap(-1, 10 * 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0); print(1)"
    )
    assert run(commands, script) == Reward(1.0, {})


def test_a_command_that_floods_its_output_is_read_to_its_end(commands):
    assert run(commands, "for _ in range(2**14): print('x' * 4096)\nprint(0.25)") == Reward(
        0.25, {}
    )


def test_a_command_needs_no_more_memory_than_its_limit(commands):
    found = run(commands, "bytearray(2**30); print(1)")
    assert isinstance(found, Failure) and "MemoryError" in found.reason


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, by itself."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def test_folders_of_episodes_that_have_not_ended_go_with_their_pool(temporary):
    settings = config(**command_settings(None))
    settings.timeout_s = 60.0
    with ProgramPool(settings) as pool:
        pool.begin([job("import time; time.sleep(60)")])
        assert wait_for(lambda: [*temporary.glob("**/task.json")])
    assert not [*temporary.iterdir()]


def test_a_folder_that_is_hard_to_remove_costs_no_reward(temporary):
    script = (
        "here = os.getcwd()\nfor _ in range(3000): os.mkdir('x'); os.chdir('x')\n"
        "os.mkdir(f'{here}/closed', 0o500); print(1)"
    )
    with ProgramPool(config(**command_settings(None))) as pool:
        assert run(pool, script) == Reward(1.0, {})
        assert wait_for(lambda: not [*temporary.glob("*/*")])


def test_a_folder_that_cannot_be_removed_costs_no_reward_and_is_named_once(temporary, caplog):
    """One with an immutable file."""
    script = "import subprocess; open('x', 'w').close(); subprocess.run(['chattr', '+i', 'x']); "
    settings = config(**command_settings(None))
    settings.num_processes = 1
    with ProgramPool(settings) as pool:
        assert results(pool, [job(f"{script}print(1)")] * 3) == [Reward(1.0, {})] * 3
    left = [*temporary.glob("*/*/work/x")]
    if not left:
        pytest.skip("this user, or the file system of this folder, makes no file immutable")
    subprocess.run(["chattr", "-i", *left])
    (warning,) = [record.getMessage() for record in caplog.records if "cannot" in record.msg]
    assert len(left) == 3 and str(left[0].parents[2]) in warning


def test_a_command_that_is_hard_to_end_costs_its_own_episode_alone(commands):
    """It stops its supervisor. Its process, which runs other episodes too, must not be killed."""
    script = "import signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)"
    found = run(commands, script)
    assert isinstance(found, Failure) and found.reason == "took longer than 2 s"


def test_a_command_that_forks_and_never_ends_leaves_nothing(commands, tmp_path):
    """Its children leave its session and group, and refuse to end."""
    pids = tmp_path / "pids"
    script = f"""
import os, signal, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        time.sleep(100)
time.sleep(100)
"""
    found = run(commands, script)
    assert isinstance(found, Failure) and "longer than 2 s" in found.reason
    started = [int(line) for line in Path(pids).read_text().split()]
    assert len(started) == 5
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]
