"""The LLM judge against a real server on the loopback that speaks /v1/chat/completions."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.rewards.judge import score
from hybridrl.rewards.remote import RemoteScorerError
from tests.support.scorers import reward_scorer
from tests.support.scoring_server import Handler, Reply, Server, serving

SCORE = "hybridrl.rewards.judge.score"
KEY = "sk-s3cret-key"
FILE = Path(__file__).parents[2] / "conf" / "reward" / "judge.yaml"


class Judge(Handler):
    """Replies with the part of the prompt behind 'reply:'; refuses the first, and delays."""

    server: "JudgeServer"

    def answer(self, body: dict, number: int) -> Reply:
        time.sleep(self.server.seconds)
        reply = body["messages"][0]["content"].partition("reply:")[2]
        if number <= self.server.refusals:
            return 429, {"error": "busy"}
        return 200, {"choices": [{"message": {"role": "assistant", "content": reply}}]}


class JudgeServer(Server):
    refusals = 0
    seconds = 0.0


@pytest.fixture
def server(monkeypatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(server := JudgeServer(Judge)):
        yield server


def settings(server: JudgeServer | None, **changes) -> dict:
    """The shipped arguments, for a server of the test."""
    port = server.server_port if server else 1
    own = {"base_url": f"http://127.0.0.1:{port}/v1/", "model": "grader"}
    args = OmegaConf.load(FILE).args
    return OmegaConf.to_container(OmegaConf.merge(args, own, changes))


def ask(server: JudgeServer, response: str, example: dict | None = None, **changes) -> float:
    row = {"answer": "4", "question": "2 + 2?"} | (example or {})
    return asyncio.run(score("<user>2 + 2?", response, row, **settings(server, **changes)))


def test_the_judge_is_asked_in_openais_format(server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    assert (
        ask(
            server, "four reply: good\nGrade: 8", api_key_env="JUDGE_API_KEY", number=r"Grade: (\d)"
        )
        == 0.8
    )
    (body,) = server.bodies
    assert server.heads == [("/v1/chat/completions", f"Bearer {KEY}")]
    text = body.pop("messages")[0]["content"]
    for name, part in {"question": "2 + 2?", "reference_answer": "4"}.items():
        assert f"<{name}>\n{part}\n</{name}>" in text
    assert "<response>\nfour reply: good\nGrade: 8\n</response>" in text
    assert body == {"model": "grader", "max_tokens": 512, "temperature": 0.0}


@pytest.mark.parametrize(
    ("example", "question"),
    [
        ({"question": "2 + 2?"}, "2 + 2?"),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
        ({"problem": "p"}, "p"),
        ({}, "rendered"),
    ],
)
def test_the_question_is_a_column_or_the_rendered_prompt(server, example, question):
    args = settings(server, template="{question}|{rubric}|{prompt} reply:1 {response}", number=".")
    row = example | {"rubric": "be kind", "answer": "4"}
    assert asyncio.run(score("rendered", "3", row, **args)) == pytest.approx(0.3)
    assert server.bodies[0]["messages"][0]["content"].startswith(f"{question}|be kind|rendered")


@pytest.mark.parametrize(
    ("reply", "number", "found"),
    [
        ("Grade: 3 or rather\nGrade: **7**", None, 0.7),
        ("<think>10</think> I say 4", "[0-9]+", 0.4),
        ("I say -2.5", "-?[0-9.]+", -0.25),
        ("grade: [8]", None, 0.8),
        ("Grade: 10.0.", None, 1.0),
        ("**Grade:** 7.25/10", None, 0.725),
    ],
)
def test_the_last_number_counts(server, reply, number, found):
    changes = {"number": number} if number else {}
    assert ask(server, f"x reply:{reply}", template="{response}", **changes) == pytest.approx(found)


@pytest.mark.parametrize("reply", ["no idea", "Grade: 85", "Grade: 10.5", "Grade: -2"])
def test_a_reply_without_number_from_0_to_10_fails_and_is_shown(server, reply):
    with pytest.raises(RemoteScorerError, match=f"no number: '{reply}'"):
        ask(server, f"reply:{reply}", template="{response}")


def test_a_busy_judge_is_asked_again(server):
    server.refusals = 2
    assert ask(server, "reply:Grade: 10", template="{response}") == 1.0
    assert len(server.bodies) == 3


def judged(server: JudgeServer, count: int, concurrency: int, processes: int) -> tuple[list, float]:
    """Scores of so many responses, and the seconds."""
    args = settings(server, template="{response}", number="[0-9]+", scale=1.0)
    with reward_scorer(
        SCORE,
        args,
        timeout_s=60.0,
        num_processes=processes,
        failed_score=-1.0,
        concurrency=concurrency,
    ) as scorer:
        scorer.score([("p", "reply:1", {})] * 2 * processes)  # its processes have started
        start = time.monotonic()
        result = scorer.score([("p", f"reply:{index}", {}) for index in range(count)])
        return result.scores, time.monotonic() - start


def test_concurrent_requests_share_the_wait(server):
    """64 responses of 0.2 s: 0.4 s at 32 at a time, 6.4 s at two processes without concurrency."""
    server.seconds = 0.2
    scores, seconds = judged(server, 64, concurrency=32, processes=2)
    assert scores == [float(index) for index in range(64)]
    assert server.most <= 32
    assert 0.4 <= seconds < 3.2


@pytest.mark.slow
def test_a_thousand_responses_of_two_seconds_take_less_than_15_s(server):
    server.seconds = 2.0
    scores, seconds = judged(server, 1024, concurrency=256, processes=2)
    assert scores == [float(index) for index in range(1024)]
    assert 8.0 <= seconds < 15.0
    print(f"1,024 responses of 2 s at concurrency 256: {seconds:.1f} s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_url": "localhost:8000"}, ["r.args.base_url = localhost:8000", "http://"]),
        ({"base_url": "http://a:b@host/v1"}, ["r.args.base_url = http://host/v1", "api_key_env"]),
        ({"model": ""}, ["r.args.model = ,", "name of a model"]),
        ({"api_key_env": "NO_SUCH_KEY"}, ["r.args.api_key_env = NO_SUCH_KEY", "export"]),
        ({"template": "grade it"}, ["r.args.template = grade it", "{response}"]),
        ({"template": '{"score": {response}'}, ["r.args.template", "{{"]),
        ({"number": "(1|"}, ["r.args.number = (1|", "regular expression"]),
        ({"number": "(a)(b)"}, ["r.args.number", "at most one group"]),
        ({"max_tokens": 0}, ["r.args.max_tokens = 0"]),
        ({"temperature": -1}, ["r.args.temperature = -1"]),
        ({"scale": "x"}, ["r.args.scale = x"]),
    ],
)
def test_bad_settings_are_named_before_a_run(changes, words):
    with pytest.raises(ConfigError) as caught:
        check_reward_function("r", SCORE, settings(None, **changes))
    (problem,) = caught.value.texts
    assert [word for word in words if word not in problem] == []
