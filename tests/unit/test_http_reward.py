"""The remote scorer against a real server on the loopback: answers, retries, failures, secrets."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.processes.messages import FailureKind
from hybridrl.rewards.base import Score
from hybridrl.rewards.http import score
from hybridrl.rewards.remote import FIRST_WAIT_S, RemoteScorerError, wait_s
from hybridrl.rewards.scorer import ScoreResult
from tests.support.scorers import reward_scorer
from tests.support.scoring_server import Handler, Reply, Server, serving

pytestmark = pytest.mark.full

SCORE = "hybridrl.rewards.http.score"
TOKEN = "s3cret-t0ken"
SILENCE_S = 0.2


class Scorer(Handler):
    """Does what the response asks for."""

    def answer(self, body: dict, number: int) -> Reply | None:
        kind, _, rest = body["response"].partition(" ")
        authorization = self.headers["Authorization"]
        match kind:
            case "status" | "later" | "odd" | "garbled":
                code, _, failures = rest.partition(" ")
                failing = number <= int(failures or 1000)
                more = {
                    "later": {"Retry-After": "1"},
                    "odd": {"Retry-After": "\u00b2"},
                    "garbled": {"Content-Encoding": "gzip"},
                }
                return int(code) if failing else 200, {"score": 0.5}, failing and more.get(kind)
            case "silent":
                self.server.released.wait(10)
                return None
            case "drops" if number == 1:
                return None
            case "sleeps":
                time.sleep(0.05)
                return 200, {"score": 1.0}
            case "raw":
                return 200, rest
            case "echoes":
                return 401, f"who is {authorization}?"
            case "authorized":
                return 200, {"score": authorization == f"Bearer {TOKEN}"}
        return 200, {"score": len(kind), "parts": {"style": 0.5}}


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(server := Server(Scorer)):
        yield server


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/score?key=hidden"


def settings(url: str, **changes) -> dict:
    return {"url": url, "timeout_s": 5.0, "retries": 2, "token_env": None} | changes


def ask(server: Server, response: str, **changes) -> Score:
    args = settings(url_of(server), **changes)
    return asyncio.run(score("prompt", response, {"answer": "7"}, **args))


def scored(
    args: dict, responses: list[str], processes: int = 1, concurrency: int = 1
) -> ScoreResult:
    with reward_scorer(
        SCORE,
        args,
        timeout_s=20.0,
        num_processes=processes,
        failed_score=-1.0,
        concurrency=concurrency,
    ) as scorer:
        return scorer.score([("prompt", response, {}) for response in responses])


def test_the_server_gets_the_item_and_gives_its_score(server):
    example = {"answer": "7", "when": {1}}
    found = asyncio.run(score("p", "abc", example, **settings(url_of(server))))
    assert found == Score(3, {"style": 0.5})
    expected = {"prompt": "p", "response": "abc", "example": {"answer": "7", "when": "{1}"}}
    assert server.bodies == [expected]


def test_scores_and_parts_come_through_the_reward_processes(server):
    result = scored(settings(url_of(server)), ["a", "abc", "ab"])
    assert result == ScoreResult([1.0, 3.0, 2.0], [], {"style": [0.5, 0.5, 0.5]})
    assert len(server.peers) == 1  # one connection for one request at a time


@pytest.mark.parametrize("fault", ["status 429", "status 503", "odd 503", "garbled 200"])
def test_what_may_pass_is_tried_again(server, fault):
    assert ask(server, f"{fault} 1") == Score(0.5, {})
    assert len(server.bodies) == 2


def test_a_dropped_connection_is_tried_again(server):
    assert ask(server, "drops").total == 5
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "told"), [("status 500", "answered 500 "), ("garbled 200", "DecodingError")]
)
def test_retries_end_and_tell_the_last_answer(server, fault, told):
    with pytest.raises(RemoteScorerError, match=rf"/score: {told}.*tried 2 times"):
        ask(server, fault, retries=1)
    assert len(server.bodies) == 2


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_what_will_not_pass_is_not_tried_again(server, status):
    with pytest.raises(RemoteScorerError, match=f"answered {status}"):
        ask(server, f"status {status}")
    assert len(server.bodies) == 1


def test_a_silent_server_times_out(server):
    start = time.monotonic()
    with pytest.raises(RemoteScorerError, match=r"no answer within 0\.2 s .*tried 2 times"):
        ask(server, "silent", timeout_s=SILENCE_S, retries=1)
    assert time.monotonic() - start >= 2 * SILENCE_S
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "which is no JSON"),
        ("", "which is no JSON"),
        ('{"score": 1', "which is no JSON"),
        ("[1]", "expected {"),
        ("0.5", "expected {"),
        ('{"scores": 1}', "expected {"),
        ('{"score": 1, "parts": [1]}', "expected {"),
    ],
)
def test_a_malformed_answer_is_shown_and_not_asked_for_again(server, text, told):
    with pytest.raises(RemoteScorerError, match=told):
        ask(server, f"raw {text}")
    assert len(server.bodies) == 1


def test_failures_are_counted_and_shown(server):
    bad = ['raw {"score": "high"}', "raw <html>", 'raw {"score": NaN}', 'raw {"score": 2}']
    result = scored(settings(url_of(server)), ["a", *bad])
    assert result.scores == [1.0, -1.0, -1.0, -1.0, 2.0]
    assert Counter(f.kind for f in result.failures) == {FailureKind.error: 3}
    reasons = [failure.reason for failure in result.failures]
    for reason, words in zip(reasons, ["returned a str", "<html>", "returned nan"], strict=True):
        assert words in reason


def test_a_refused_connection_is_a_failure_that_names_the_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = scored(settings(f"http://127.0.0.1:{port}/score", retries=1), ["a"])
    assert result.scores == [-1.0]
    (failure,) = result.failures
    for words in (f"http://127.0.0.1:{port}/score", "ConnectError", "tried 2 times"):
        assert words in failure.reason


@pytest.mark.parametrize(("processes", "concurrency"), [(1, 3), (2, 5)])
def test_concurrency_is_the_number_of_requests_under_way(server, processes, concurrency):
    responses = [f"sleeps {i}" for i in range(24)]
    result = scored(settings(url_of(server)), responses, processes, concurrency)
    assert result.scores == [1.0] * 24
    assert 2 <= server.most <= concurrency


def test_a_server_that_asks_for_time_gets_it(server):
    start = time.monotonic()
    assert ask(server, "later 429 1") == Score(0.5, {})
    assert time.monotonic() - start >= 1.0
    assert len(server.bodies) == 2


def test_waits_double_and_spread_and_depend_on_the_request_alone():
    waits = [[wait_s(b"%d" % i, attempt) for i in range(200)] for attempt in range(4)]
    for attempt, values in enumerate(waits):
        mean = FIRST_WAIT_S * 2**attempt
        assert all(0.5 * mean <= value < 1.5 * mean for value in values)
        assert sum(values) / 200 == pytest.approx(mean, rel=0.1)
        assert len(set(values)) == 200
    assert wait_s(b"7", 1) == waits[1][7]


def test_a_token_is_sent_from_the_environment_and_never_shown(server, monkeypatch, caplog):
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)
    args = settings(url_of(server), token_env="SCORER_TOKEN")
    check_reward_function("reward", SCORE, args)
    result = scored(args, ["authorized", "echoes"])
    assert result.scores == [1.0, -1.0]
    (failure,) = result.failures
    assert "who is Bearer <token>?" in failure.reason
    shown = f"{failure} {caplog.text}"
    assert "reward failed for 1 of 2, first for item 1" in shown
    assert TOKEN not in shown
    assert "hidden" not in shown  # the URL's query


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": None}, ["r.args.url = None", "http://"]),
        ({"url": "example.org/score"}, ["r.args.url = example.org/score"]),
        ({"url": "ftp://example.org"}, ["r.args.url = ftp"]),
        ({"url": "http://me:pass@example.org/x"}, ["http://example.org/x", "token_env"]),
        ({"url": "http://"}, ["r.args.url = http://"]),
        ({"url": "http://host:port/x"}, ["r.args.url = http://host:port/x"]),
        ({"url": "http://[::1/x"}, ["r.args.url = http://[::1/x"]),
        ({"url": "http://host /x"}, ["r.args.url = http://host /x"]),
        ({"timeout_s": 0}, ["r.args.timeout_s = 0", "above 0"]),
        ({"timeout_s": "1"}, ["r.args.timeout_s = 1"]),
        ({"retries": -1}, ["r.args.retries = -1"]),
        ({"retries": 1.5}, ["r.args.retries = 1.5"]),
        ({"token_env": "NO_SUCH_TOKEN"}, ["r.args.token_env = NO_SUCH_TOKEN", "export"]),
        ({"token_env": "EMPTY_TOKEN"}, ["r.args.token_env = EMPTY_TOKEN", "empty"]),
        ({"token_env": "TORN_TOKEN"}, ["r.args.token_env = TORN_TOKEN", "visible"]),
        ({"token_env": "sk-s3cret"}, ["r.args.token_env is no name"]),
    ],
)
def test_bad_settings_are_named_before_a_run(changes, words, monkeypatch):
    monkeypatch.setenv("EMPTY_TOKEN", "")
    monkeypatch.setenv("TORN_TOKEN", "s3cret\nline")
    with pytest.raises(ConfigError) as caught:
        check_reward_function("r", SCORE, settings("http://127.0.0.1:1/") | changes)
    (problem,) = caught.value.texts
    assert [word for word in words if word not in problem] == []
    assert "s3cret" not in problem and "pass@" not in problem
