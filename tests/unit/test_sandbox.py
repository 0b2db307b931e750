"""The sandbox with real programs: how they end, what is limited, that nothing outlives them."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from sandbox_settings import LIMITS, both, in_namespace, outcome

from hybridrl.rewards.jail import Case, Isolation, Limits, Outcome
from hybridrl.rewards.sandbox import run_tests

PASSED, FAILED, TIMEOUT = Outcome
NAMESPACE = Isolation.namespace


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@both
def test_statements_see_the_programs_names(isolation):
    program = (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nf = lambda x: x + 1"
    )
    cases = ["assert f(1) == 2", "assert f(1) == 3", "assert P(1) == P(1)", "assert g(1)", "f("]
    outcomes = run_tests(program, [Case(statements=c) for c in cases], LIMITS, isolation)
    assert outcomes == [PASSED, FAILED, PASSED, FAILED, FAILED]


@both
def test_scripts_read_and_print(isolation):
    program = "if __name__ == '__main__':\n    print(2 * int(input()), ' ')\n    print(input())"
    cases = [
        Case(stdin="4\nx y\n", stdout="8\nx y"),
        Case(stdin="4\nx y", stdout="8   \nx y\n\n"),
        Case(stdin="4\nx y\n", stdout="9\nx y"),
        Case(stdin="4\nx y\n", stdout="8 x y"),
        Case(stdin="4\n", stdout="8"),  # the second input() raises
    ]
    assert run_tests(program, cases, LIMITS, isolation) == [PASSED, PASSED, *[FAILED] * 3]
    assert run_tests("print(8)\nexit()", [Case(stdout="8")], LIMITS, isolation) == [PASSED]
    assert run_tests("print(8)\nexit(1)", [Case(stdout="8")], LIMITS, isolation) == [FAILED]


@both
def test_one_test_does_not_see_what_another_did(isolation):
    program = "seen = []"
    cases = [Case(statements="seen.append(1)\nassert seen == [1]")] * 3
    assert run_tests(program, cases, LIMITS, isolation) == [PASSED] * 3


UNFINISHED = [
    "(",
    "1 / 0",
    "exit()",
    "raise KeyboardInterrupt",
    "import os\nos._exit(0)",
    "import os\nos.write(3, bytes(16))",
    "import os\nos.close(3)",
    "import os\nos.closerange(0, 64)",
    "import os\nos.abort()",
    "import ctypes\nctypes.string_at(0)",
    "def f(): f()\nf()",
    "\0",
]


@both
def test_who_does_not_come_to_the_end_has_failed(isolation):
    cases = [Case(statements=text) for text in ["pass", *UNFINISHED, "pass"]]
    outcomes = run_tests("", cases, LIMITS, isolation)
    assert outcomes == [PASSED, *[FAILED] * len(UNFINISHED), PASSED]
    assert outcome("exit()", isolation) is FAILED


ENDLESS = [
    "while True: pass",
    "import time\ntime.sleep(600)",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
]


@both
def test_an_endless_program_is_cut_off(isolation):
    cases = [Case(statements=text) for text in [*ENDLESS, "pass"]]
    limits = Limits(**(vars(LIMITS) | {"seconds_per_test": 0.1}))
    start = time.monotonic()
    assert run_tests("", cases, limits, isolation) == [*[TIMEOUT] * len(ENDLESS), PASSED]
    assert 0.1 * len(ENDLESS) <= time.monotonic() - start < 30


@both
def test_cpu_time_is_limited(isolation):
    """The kernel ends what has used that much, in all threads, with SIGXCPU."""
    program = "import resource, signal\nfound = resource.getrlimit(resource.RLIMIT_CPU)"
    assert outcome(program, isolation, "assert found == (3, 4)", seconds_per_test=2.5) is PASSED
    assert outcome(program, isolation, "signal.raise_signal(signal.SIGXCPU)") is TIMEOUT


@both
def test_all_tests_together_are_limited(isolation):
    cases = [Case(statements="while True: pass")] * 100
    limits = Limits(**(vars(LIMITS) | {"seconds": 0.15}))
    start = time.monotonic()
    assert run_tests("", cases, limits, isolation) == [TIMEOUT] * 100
    assert time.monotonic() - start < 10


@both
def test_the_first_failure_may_end_it(isolation):
    cases = [Case(statements=f"assert x != {i}") for i in range(4)]
    found = run_tests("x = 1", cases, LIMITS, isolation, stop_at_failure=True)
    assert found == [PASSED, FAILED, FAILED, FAILED]


@both
def test_memory_is_limited(isolation):
    program = (
        "blocks = []\ntry:\n    while len(blocks) < 2000: blocks.append(bytearray(2**20))\n"
        "except MemoryError: pass\nfound = len(blocks)\nblocks = None\n"
    )
    assert outcome(program, isolation, "assert 16 < found < 256", seconds_per_test=10.0) is PASSED
    assert outcome("x = bytearray(2**30)", isolation) is FAILED


@both
def test_output_is_limited(isolation):
    start = time.monotonic()
    program = "while True: print('x' * 10**6)"
    assert run_tests(program, [Case(stdout="x")], LIMITS, isolation) == [FAILED]
    program = "import sys\nwhile True: sys.stderr.write('x' * 10**6)"
    assert outcome(program, isolation, seconds_per_test=0.1) is TIMEOUT
    assert time.monotonic() - start < 20


@in_namespace
def test_files_are_its_own_and_limited_together():
    program = (
        "import os\nwritten = 0\n"
        "try:\n"
        "    for i in range(100):\n"
        "        with open(f'{i}', 'wb', buffering=0) as f: written += f.write(bytes(2**18))\n"
        "except OSError: pass\n"
    )
    assert outcome(program, NAMESPACE, "assert 2**18 < written <= 2 * 2**20") is PASSED
    cases = [Case(statements="open('x', 'x')")] * 2  # the same folder for all tests of a response
    assert run_tests("", cases, LIMITS, NAMESPACE) == [PASSED, FAILED]
    assert outcome("open('x', 'x')", NAMESPACE) is PASSED  # and another for the next


CALLER = """
import sys
from hybridrl.rewards.sandbox import *
limits = Limits(seconds_per_test=60.0, seconds=60.0, memory_mb=256, file_mb=2)
run_tests("import time; time.sleep(60)", [Case(statements="")], limits, Isolation(sys.argv[1]))
"""


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_sandbox_ends_with_its_caller(isolation, number):
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, isolation], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        depth = 3 if isolation is NAMESPACE else 2
        process = psutil.Process(caller.pid)
        assert wait_for(lambda: len(process.children(recursive=True)) == depth)
        inside = [child.pid for child in process.children(recursive=True)]
        caller.send_signal(number)
        caller.wait(timeout=10)
        assert wait_for(lambda: all(map(is_gone, inside)))
    finally:
        caller.kill()
        caller.wait()
