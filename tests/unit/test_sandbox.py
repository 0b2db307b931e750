"""The sandbox with real programs: how they end, what is limited, that nothing outlives them."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hybridrl.rewards.sandbox.programs import Case, Isolation, Limits, Outcome, run_tests
from tests.support.sandbox_settings import LIMITS, both, in_bubblewrap, outcome
from tests.support.scorers import is_gone, wait_for

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_process_is_left")]
PASSED, FAILED, TIMEOUT = Outcome
BUBBLEWRAP = Isolation.bubblewrap


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
    by_line = "import fileinput\nprint(*fileinput.input())"
    assert run_tests(by_line, [Case(stdin="8", stdout="8")], LIMITS, isolation) == [PASSED]
    assert run_tests("print(8)\nexit()", [Case(stdout="8")], LIMITS, isolation) == [PASSED]
    assert run_tests("print(8)\nexit(1)", [Case(stdout="8")], LIMITS, isolation) == [FAILED]


ENDS = [
    "import threading, time\ndef f():\n    time.sleep(0.1)\n    print(8)\n"
    "threading.Thread(target=f).start()",
    "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(8)",
    "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint(8)",
    "import atexit, io, sys\nout, sys.stdout = sys.stdout, io.StringIO()\n@atexit.register\n"
    "def f():\n    out.write(sys.stdout.getvalue())\nprint(8)\nsys.exit()",
]


@both
@pytest.mark.parametrize("program", ENDS)
def test_a_script_ends_after_its_threads_exit_functions_and_output(isolation, program):
    case, limits = Case(stdout="8"), Limits(**(vars(LIMITS) | {"seconds_per_test": 5.0}))
    assert run_tests(program, [case], limits, isolation) == [PASSED]
    assert run_tests(f"print(8)\n1 / 0\n{program}", [case], limits, isolation) == [FAILED]


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


# Programs without an f that do not fail by themselves, and those that would judge themselves.
FAKES = [
    "import sys\nsys.exit(0)",
    "import sys\nsys.exit()",
    "raise SystemExit",
    "quit()",
    "import os\nos._exit(0)",
    "import atexit, os\natexit.register(os._exit, 0)",
    "import os\nfor fd in range(64):\n try: os.write(fd, b'passed\\n' * 9)\n except OSError: pass",
    "import os\nfor fd in range(64):\n try: os.write(fd, b'begun' + bytes(16))\n"
    " except OSError: pass\nos._exit(0)",
    "import os\nfor fd in range(1, 64): os.dup2(0, fd)",
    "import os\nfor fd in range(64): os.dup2(1, fd)",
    "import os\nos.closerange(0, 64)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "import os, signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\nos.kill(0, signal.SIGKILL)",
    "import builtins\nbuiltins.exec = lambda *a: None",
    "import builtins\nbuiltins.compile = lambda *a: compile('', '', 'exec')",
    "import builtins\nbuiltins.AssertionError = SystemExit",
    "import builtins\nbuiltins.__build_class__ = builtins.NameError = BaseException",
    "import os\nos.write = os._exit",
    "import sys\nsys.stdout = None\nsys.modules['os'] = None",
    "import sys\nsys.excepthook = lambda *a: None",
    "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "import gc\nfor x in gc.get_objects():\n if isinstance(x, dict): x.setdefault('g', print)",
    "import sys\nsys.setrecursionlimit(10)",
    "import sys\ndef t(*a): raise SystemExit\nsys.settrace(t)",
    "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
]


@in_bubblewrap
def test_a_program_that_pretends_has_not_passed():
    """Neither a test of statements nor one of output."""
    assert outcome("f = abs", BUBBLEWRAP, "assert f(-1) == 1") is PASSED
    for program in FAKES:
        cases = [Case(statements="assert f(-1) == 1"), Case(stdin="-1", stdout="a right answer")]
        found = run_tests(program, cases, LIMITS, BUBBLEWRAP)
        assert PASSED not in found, (program, found)


# Sends what proves that a test has come to its end.
OF_FRAMES = """
import os, sys
frame = sys._getframe()
while "secret" not in frame.f_locals:
    frame = frame.f_back
os.write(3, frame.f_locals["secret"])
os._exit(0)
"""


@in_bubblewrap
def test_a_program_that_searches_its_frames_fools_statements_but_no_output():
    """A known gap, which docs/security.md tells."""
    cases = [Case(statements="assert False"), Case(stdin="-1", stdout="a right answer")]
    assert run_tests(OF_FRAMES, cases, LIMITS, BUBBLEWRAP) == [PASSED, FAILED]


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


# Each thread would have a table of its own with the most descriptors that a process may open.
FULL_SOCKETS = """
import ctypes, socket, threading
libc, held, end = ctypes.CDLL(None), [], threading.Event()
def fill():
    libc.syscall(436, 2**31, 2**31, 2)  # close_range, CLOSE_RANGE_UNSHARE
    pairs = []
    try:
        while sum(held) < 2**29:
            pairs.append(socket.socketpair())
            for one in pairs[-1]:
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
                held.append(one.send(bytes(2**20)))
    except OSError: pass
    begun.release()
    end.wait()
begun = threading.Semaphore(0)
threading.stack_size(2**16)
for _ in range(60):
    threading.Thread(target=fill, daemon=True).start()
    begun.acquire()
end.set()
"""


@in_bubblewrap
def test_memory_of_sockets_is_limited():
    statements = f"assert 2**20 < sum(held) < {LIMITS.memory_mb << 20}"
    assert outcome(FULL_SOCKETS, BUBBLEWRAP, statements, seconds_per_test=10.0) is PASSED


@both
def test_descriptors_may_be_closed_by_range_and_marked_to_close(isolation):
    program = (
        "import ctypes, os\nos.pipe()\nfound = ctypes.CDLL(None).syscall(436, 4, 63, 4)\n"
        "inherited = os.get_inheritable(4)\nos.closerange(4, 64)\nleft = os.path.exists(4)"
    )
    assert outcome(program, isolation, "assert (found, inherited, left) == (0, 0, 0)") is PASSED


@both
def test_output_is_limited(isolation):
    start = time.monotonic()
    program = "while True: print('x' * 10**6)"
    assert run_tests(program, [Case(stdout="x")], LIMITS, isolation) == [FAILED]
    program = "import sys\nwhile True: sys.stderr.write('x' * 10**6)"
    assert outcome(program, isolation, seconds_per_test=0.1) is TIMEOUT
    assert time.monotonic() - start < 20


@in_bubblewrap
def test_files_are_its_own_and_limited_together():
    program = (
        "import os\nwritten = 0\n"
        "try:\n"
        "    for i in range(100):\n"
        "        with open(f'{i}', 'wb', buffering=0) as f: written += f.write(bytes(2**18))\n"
        "except OSError: pass\n"
    )
    assert outcome(program, BUBBLEWRAP, "assert 2**18 < written <= 2 * 2**20") is PASSED
    cases = [Case(statements="open('x', 'x')")] * 2  # the same folder for all tests of a response
    assert run_tests("", cases, LIMITS, BUBBLEWRAP) == [PASSED, FAILED]
    assert outcome("open('x', 'x')", BUBBLEWRAP) is PASSED  # and another for the next


@in_bubblewrap
def test_a_program_reads_what_it_has_written_itself():
    program = (
        "import os\nos.mkdir('a'); os.mkdir('b')\nopen('a/x', 'w').write('1')\n"
        "os.rename('a/x', 'b/y')\nfound = open('b/y').read(), os.listdir('b'), os.listdir('a')\n"
        "import tempfile\ntempfile.TemporaryFile().write(b'1')"
    )
    assert outcome(program, BUBBLEWRAP, "assert found == ('1', ['y'], []), found") is PASSED


@both
def test_programs_have_libraries_threads_and_entropy(isolation):
    program = (
        "import asyncio, csv, decimal, json, os, sqlite3, threading, zoneinfo\nimport numpy\n"
        "seen = []\nt = threading.Thread(target=seen.append, args=(1,))\nt.start(); t.join()\n"
        "if os.path.isdir('/usr/share/zoneinfo'): zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "open('/dev/urandom', 'rb').read(4)\nasync def one(): return 1\n"
    )
    statements = "assert seen == [1] and asyncio.run(one()) == 1 and numpy.arange(3).sum() == 3"
    many = {"memory_mb": 4096, "seconds_per_test": 20.0, "seconds": 20.0}
    assert outcome(program, isolation, statements, **many) is PASSED


@both
def test_the_expected_output_is_not_in_the_programs_memory(isolation):
    """Nor is what another test expects."""
    program = (
        "import gc, sys\nfound = []\nframe = sys._getframe()\n"
        "while frame: found.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "found += [repr(x) for x in gc.get_objects() if isinstance(x, dict | list | tuple)]\n"
        "print(''.join(['4f5e', '6d7c']) in ''.join(found))"
    )
    long = Limits(**(vars(LIMITS) | {"seconds_per_test": 5.0}))
    found = run_tests(program, [Case(stdout="4f5e6d7c"), Case(stdout="False")], long, isolation)
    assert found == [FAILED, PASSED]


@both
def test_text_that_is_no_unicode_fails_its_program_alone(isolation):
    cases = [Case(statements="'\ud800'"), Case(stdin="\ud800", stdout="?"), Case(stdin="1")]
    assert run_tests("'\ud800'", cases[:1], LIMITS, isolation) == [FAILED]
    assert run_tests("print(input())", cases, LIMITS, isolation) == [FAILED, PASSED, FAILED]


CALLER = """
import sys
from hybridrl.rewards.sandbox.programs import Case, Isolation, Limits, run_tests
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
        depth = 3 if isolation is BUBBLEWRAP else 2
        process = psutil.Process(caller.pid)
        assert wait_for(lambda: len(process.children(recursive=True)) == depth)
        inside = [child.pid for child in process.children(recursive=True)]
        caller.send_signal(number)
        caller.wait(timeout=10)
        assert wait_for(lambda: all(map(is_gone, inside)))
    finally:
        caller.kill()
        caller.wait()


WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
PROBLEMS = """
from hybridrl.rewards.code import score
limits = dict(seconds_per_test=1.0, seconds=5.0, memory_mb=256, file_mb=2)
for isolation in ("bubblewrap", "none"):
    args = dict(tests_key="t", grading="all", isolation=isolation, limits=limits)
    print(*list(score.problems("reward", args)) or ["nothing"], sep="\\n")
"""


@in_bubblewrap
@pytest.mark.parametrize("lacks", ["namespaces", "bubblewrap", "a second user"])
def test_where_the_sandbox_is_not_to_be_had_code_rewards_are_refused_with_the_ways_out(lacks):
    """A user namespace of our own that allows none below stands for such a machine."""
    command = [sys.executable, "-c", PROBLEMS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if lacks == "namespaces":
        command = ["unshare", "-Ur", "sh", "-c", WITHOUT_NAMESPACES, "sh", *command]
    elif lacks == "a second user":
        command = ["unshare", "-Ur", *command]
    else:
        environment["PATH"] = "/nowhere"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    problem, ways, nothing = done.stdout.splitlines()
    assert problem.startswith("reward.args.isolation = bubblewrap, but"), done
    if lacks == "bubblewrap":
        assert "no program bwrap" in problem
    for way in ("apt-get install bubblewrap", "reward=http", "isolation=none"):
        assert way in ways
    assert nothing == "nothing"
