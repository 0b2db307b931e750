"""RewardScorer with real processes: failures of every kind, their blame, no process left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.processes.messages import FailureKind
from hybridrl.processes.pool import MAX_LOGGED_CAUSES, ProcessesError
from hybridrl.processes.process import KILL_AFTER_S, PoolProcess
from hybridrl.rewards.scorer import RewardScorer, ScoreResult
from tests.support.reward_cases import LOG_LINE
from tests.support.scorers import is_gone, reward_scorer, wait_for

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_process_is_left")]
TIMEOUT_S = 0.5
FAILED = -7.0


def scorer(function: str, *, processes: int = 2, timeout_s: float = 20.0, **args) -> RewardScorer:
    return reward_scorer(
        f"tests.support.reward_cases.{function}",
        args,
        timeout_s=timeout_s,
        num_processes=processes,
        failed_score=FAILED,
    )


def score(function: str, responses: list[str], example: dict | None = None, **kwargs):
    with scorer(function, **kwargs) as pool:
        return pool.score([("prompt", response, example or {}) for response in responses])


@pytest.mark.parametrize("size", [0, 1, 7, 200])
def test_scores_stand_in_the_order_of_the_items(size):
    result = score("length", ["x" * index for index in range(size)], scale=0.5)
    assert result == ScoreResult([0.5 * index for index in range(size)], [])
    assert Counter(f.kind for f in result.failures) == {}


def test_all_processes_work_and_are_used_again():
    items = [("", "", {})] * 30
    with scorer("own_process_id", processes=3) as pool:
        # The first calls may end before the last process has started.
        assert wait_for(lambda: len(set(pool.score(items).scores)) == 3)
        first, second = set(pool.score(items).scores), set(pool.score(items).scores)
    assert len(first) == 3
    assert second == first
    assert os.getpid() not in first


def test_processes_import_only_the_reward():
    assert score("heavy_modules", ["x"]).scores == [0.0]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raises", "ValueError: no such unit: furlong"),
        ("exits", "SystemExit: 0"),
        ("interrupts", "KeyboardInterrupt"),
        ("recurses", "RecursionError"),
        ("nan", "returned nan, expected a finite number"),
        ("infinite", "returned inf, expected a finite number"),
        ("none", "returned a NoneType, expected a number"),
        ("text", "returned a str, expected a number"),
        ("decimal", "returned a Decimal, expected a number"),
        ("huge", "OverflowError"),
        ("float32_inf", "returned 1e+39, expected at most 1e+12"),
        ("overflows_squared", "returned -10000000000000.0, expected at most 1e+12"),
        ("coroutine", "returned a coroutine, expected a number"),
        ("surrogate", r"ValueError: caf\ud800"),
        ("no_text", "<exception str() failed>"),
        ("long_text", "long long"),
        ("unknown", "KeyError: 'unknown'"),
    ],
)
def test_what_raises_or_is_no_number_fails_alone(bad_manners, response, reason):
    result = bad_manners.score([("", text, {}) for text in ("good", response, "half", "true")])
    assert result.scores == [1.0, FAILED, 0.5, 1.0]
    (failure,) = result.failures
    assert (failure.index, failure.kind) == (1, FailureKind.error)
    assert reason in failure.reason
    assert "\n" not in failure.reason
    assert reason in failure.traceback
    assert len(failure.reason + failure.traceback) < 5000


@pytest.fixture(scope="module")
def bad_manners() -> Iterator[RewardScorer]:
    with scorer("misbehave", processes=1) as pool:
        pool.score([("", "good", {})])  # its processes are there before the first test begins
        yield pool


@pytest.mark.parametrize("response", ["sleeps", "spins"])
def test_what_takes_too_long_is_interrupted_and_its_process_lives_on(response):
    others = set(psutil.Process().children())
    with scorer("misbehave", processes=1, timeout_s=TIMEOUT_S) as pool:
        assert pool.score([("", "good", {})]).scores == [1.0]
        alive = set(psutil.Process().children())
        start = time.monotonic()
        result = pool.score([("", text, {}) for text in ("good", response, "good")])
        assert time.monotonic() - start >= TIMEOUT_S
        assert set(psutil.Process().children()) == alive
        assert len(alive - others) == 1
    assert result.scores == [1.0, FAILED, 1.0]
    assert Counter(f.kind for f in result.failures) == {FailureKind.timeout: 1}
    assert result.failures[0].index == 1
    assert "0.5 s" in result.failures[0].reason
    assert "reward_cases.py" in result.failures[0].traceback


def test_what_a_copy_of_the_process_returns_or_prints_is_no_answer():
    result = score("misbehave", ["half", "forks", "fork_raises", "prints", "half"], processes=1)
    assert result == ScoreResult([0.5, 1.0, 1.0, 1.0, 0.5], [])


def test_what_writes_to_the_pools_socket_fails_alone():
    """Data that are no message; messages that are wrong at their place in the batch."""
    data = ["score", "failure", "text", "zeros", "length", "nesting", "json", "ready", "other"]
    responses = ["half", *(f"writes_{name}" for name in data), "good"]
    result = score("misbehave", responses, processes=1)
    assert result.scores == [0.5, *(FAILED for _ in data), 1.0]
    reasons = {failure.reason for failure in result.failures}
    assert reasons == {"its process sent an invalid message and was killed"}


@pytest.mark.parametrize("response", ["swallows", "blocks", "leaves_group", "writes_half"])
def test_what_cannot_be_interrupted_is_killed(response):
    start = time.monotonic()
    result = score("misbehave", ["good", response, "good"], processes=1, timeout_s=TIMEOUT_S)
    assert TIMEOUT_S + KILL_AFTER_S <= time.monotonic() - start < 60  # it asked for 600
    assert result.scores == [1.0, FAILED, 1.0]
    assert Counter(f.kind for f in result.failures) == {FailureKind.timeout: 1}
    assert "could not be interrupted" in result.failures[0].reason


def test_a_reward_that_takes_the_alarm_leaves_the_next_one_its_limit():
    result = score("misbehave", ["takes_alarm", "sleeps"], processes=1, timeout_s=TIMEOUT_S)
    assert result.scores == [1.0, FAILED]
    assert "could not be interrupted" not in result.failures[0].reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("dies", "its process ended, exit code 3"),
        ("is_killed", "its process ended, killed by signal 9"),
        ("closes", "its process ended"),
    ],
)
def test_who_kills_the_process_fails_alone(response, reason):
    responses = ["good", "good", response, "good", response, "good"]
    result = score("misbehave", responses, processes=1)
    assert result.scores == [1.0, 1.0, FAILED, 1.0, FAILED, 1.0]
    assert [failure.index for failure in result.failures] == [2, 4]
    assert Counter(f.kind for f in result.failures) == {FailureKind.error: 2}
    assert result.failures[0].reason.startswith(reason)


def test_no_item_is_computed_twice(tmp_path):
    """In a long chunk with dying and hanging rewards, every other item is called just once."""
    responses = [f"good {index}" for index in range(60)]
    for index, kind in {3: "dies", 17: "blocks", 18: "dies", 40: "sleeps", 59: "dies"}.items():
        responses[index] = f"{kind} {index}"
    example = {"file": str(tmp_path / "calls")}
    result = score("record", responses, example, processes=2, timeout_s=TIMEOUT_S)
    assert [failure.index for failure in result.failures] == [3, 17, 18, 40, 59]
    assert Counter(f.kind for f in result.failures) == {
        FailureKind.error: 3,
        FailureKind.timeout: 2,
    }
    calls = Path(example["file"]).read_text().splitlines()
    assert sorted(calls) == sorted(responses)


def test_a_cause_of_failures_is_logged_once_with_the_users_frames_and_counted(caplog):
    with scorer("misbehave", processes=1) as pool:
        for _ in range(3):
            assert len(pool.score([("", text, {}) for text in ("raises", "no", "raises")]).failures)
    shown, other, count, _ = [record.getMessage() for record in caplog.records]
    assert shown.startswith("reward failed for 2 of 3, first for item 0: ValueError: no such")
    assert other.startswith("reward failed for 1 of 3, first for item 1: KeyError: 'no'\n  Trace")
    assert "reward_cases.py" in shown and "in _raise" in shown
    assert "hybridrl/rewards" not in shown + other
    assert count.startswith("reward failed 6 times in all: ValueError, File ")
    assert count.endswith(", in _raise")


@pytest.mark.parametrize("response", ["paints", "writes_lines"])
def test_an_error_neither_controls_the_terminal_nor_forges_a_line_of_the_log(caplog, response):
    """Its text may be a model's, and the process may send a failure itself."""
    (failure,) = score("misbehave", [response], processes=1).failures
    first, *others = caplog.text.splitlines()
    assert failure.reason in first and LOG_LINE in caplog.text
    assert others and all(line.startswith("  ") for line in others)
    assert not [c for c in caplog.text if not (c.isprintable() or c == "\n")]
    if response == "paints":
        assert failure.reason == r"ValueError: \x1b]52;c;eA==\x07"
        assert r"\x1b]52;c;eA==\x07\rfine\u202e" in caplog.text


def test_the_number_of_causes_that_are_logged_is_limited(caplog):
    with scorer("raise_on_line", processes=1) as pool:
        assert len(pool.score([("", str(line), {}) for line in range(1, 41)]).failures) == 40
    assert len(caplog.records) == MAX_LOGGED_CAUSES + 1
    assert "failed 30 times in all: other causes" in caplog.text


def test_a_process_that_died_idle_is_replaced():
    others = set(psutil.Process().children())
    # One process: of several, one may answer all while the others still start.
    with scorer("length", processes=1) as pool:
        assert pool.score([("", "abc", {})] * 4).scores == [3.0] * 4
        (supervisor,) = set(psutil.Process().children()) - others
        # The process under it, which holds the socket, ends after it.
        (worker,) = supervisor.children()
        fd = os.pidfd_open(worker.pid)
        supervisor.kill()
        assert wait([fd], timeout=10.0)
        os.close(fd)
        assert pool.score([("", "abcd", {})] * 4) == ScoreResult([4.0] * 4, [])


@pytest.mark.parametrize(
    ("hides", "then"), [(False, "blocks"), (True, "blocks"), (True, "dies"), (True, "good")]
)
def test_processes_of_a_reward_end_with_it(tmp_path, hides, then):
    example = {"file": str(tmp_path / "pids"), "hides": hides}
    # Long enough for Python to start on a busy machine.
    result = score("leave_child", [then], example, processes=1, timeout_s=3 * TIMEOUT_S)
    assert result.scores == [1.0 if then == "good" else FAILED]
    left = json.loads(Path(example["file"]).read_text())
    assert left and wait_for(lambda: all(map(is_gone, left)))


def test_a_signal_while_processes_start_leaves_neither_them_nor_their_thread(monkeypatch):
    started, before = [], set(threading.enumerate())

    def start(setup):
        if started:
            raise KeyboardInterrupt
        started.append(PoolProcess(setup))
        return started[0]

    monkeypatch.setattr("hybridrl.processes.pool.PoolProcess", start)
    with pytest.raises(KeyboardInterrupt):
        scorer("length")
    new = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("start reward") for thread in new)


def test_an_interrupted_call_leaves_the_scorer_usable():
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with scorer("misbehave", processes=1) as pool:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                pool.score([("", "sleeps", {}), ("", "sleeps", {})])
            assert pool.score([("", "half", {})]).scores == [0.5]
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_closing_is_quick_even_while_rewards_hang_and_may_be_repeated():
    pool = scorer("misbehave", processes=2)
    start = time.monotonic()
    pool.close()  # while the processes still start
    pool.close()
    assert time.monotonic() - start < 1.0


DRIVER = """
import sys, time
from tests.support.scorers import reward_scorer
print("driver", flush=True)  # again, if a reward process imported this file
misbehave = "tests.support.reward_cases.misbehave"
pool = reward_scorer(misbehave, {}, timeout_s=600, num_processes=2, failed_score=0)
with pool:
    pool.score([("", "good", {})] * 4)
    print("warm", flush=True)
    try:
        pool.score([("", "blocks", {})] * 2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture
def driver(tmp_path) -> Iterator[subprocess.Popen]:
    """A program without a main guard whose reward processes hang, in a group of its own."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert process.stdout.readline() == "driver\n"
    assert process.stdout.readline() == "warm\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_ctrl_c_reaches_the_driver_only_and_close_ends_the_rest(driver):
    children = psutil.Process(driver.pid).children()
    assert len(children) == 2
    time.sleep(0.1)  # into the second call
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout.readline() == "interrupted\n"
    assert driver.wait(timeout=10) == 0
    assert all(is_gone(child.pid) for child in children)


def test_reward_processes_die_with_a_driver_that_is_killed(driver):
    children = psutil.Process(driver.pid).children()
    assert len(children) == 2
    driver.kill()
    assert wait_for(lambda: all(is_gone(child.pid) for child in children))


def score_with_a_module_that(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score by a module that was there when this process looked, and is `source` afterwards."""
    module = folder / "fleeting.py"
    module.write_text("def score(prompt, response, example):\n    return 1.0\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "fleeting", raising=False)
    __import__("fleeting")
    module.write_text(source)
    with reward_scorer(
        "fleeting.score", {}, timeout_s=1.0, num_processes=1, failed_score=0.0
    ) as pool:
        pool.score([("", "", {})])


def test_a_reward_that_processes_cannot_import_raises(tmp_path, monkeypatch):
    says = r"^reward processes cannot start:(.|\n)*No module named 'no_such_dependency'"
    with pytest.raises(ProcessesError, match=says):
        score_with_a_module_that("import no_such_dependency", tmp_path, monkeypatch)


def test_processes_that_die_while_they_start_raise_instead_of_starting_for_ever(
    tmp_path, monkeypatch
):
    with pytest.raises(ProcessesError, match=r"fleeting\.score, the last exit code 5"):
        score_with_a_module_that("import os; os._exit(5)", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"function": "tests.support.reward_cases.no_such"}, "no_such"),
        ({"function": "tests.support.reward_cases.NOT_A_FUNCTION"}, "NOT_A_FUNCTION"),
        ({"args": {"scael": 2.0}}, "scael"),
    ],
)
def test_bad_settings_are_named_before_a_process_starts(change, names):
    function = "tests.support.reward_cases.length"
    good = {"function": function, "args": {}, "timeout_s": 1.0, "num_processes": 1}
    with pytest.raises(ConfigError, match=names):
        reward_scorer(**(good | change), failed_score=0.0)


def test_a_thousand_answers_of_gsm8k_take_no_time():
    solution = "Tom has 3 apples and buys 4 more. " * 10
    items = [
        ("prompt " * 40, f"{solution}\n#### {index}", {"answer": f"{solution}\n#### 1"})
        for index in range(1000)
    ]
    with reward_scorer(
        "hybridrl.rewards.gsm8k.score",
        {"mode": "strict"},
        timeout_s=5.0,
        num_processes=2,
        failed_score=0.0,
    ) as pool:
        pool.score(items[:10])
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert sum(pool.score(items).scores) == 1.0
            seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3
