"""What clients of the endpoint can cost it: connections without a key, odd requests."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest

from hybridrl.agents import connections
from hybridrl.agents.episode import Episode, Settings
from hybridrl.agents.format import MAX_STOP_CHARS, MAX_STOPS
from hybridrl.agents.policy import Policy
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.server import EndpointServer
from hybridrl.agents.text import ModelText
from hybridrl.agents.training.trial import Silent
from hybridrl.config.choices import OtherSampling
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.rollout.vllm.text import Parsed
from tests.support.agents_serving import WITH_TOOLS
from tests.support.role_configs import model_config

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
QUESTION = {"role": "user", "content": "3 + 4?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def few_may_wait(monkeypatch) -> None:
    """Eight connections may wait for headers, for a second."""
    monkeypatch.setattr(connections, "MAX_WAITING", 8)
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)


@pytest.fixture
def served() -> Iterator[EndpointServer]:
    """An endpoint whose engines do not answer, with an episode whose key is mine."""
    text = ModelText(load_tokenizer(model_config("embedded")), [])
    policy = Policy(text, Silent(), lambda text, tools: Parsed(text, []))
    settings = Settings(1.0, 1.0, 1.0, 1.0, 4096, OtherSampling.mask)
    policy.open(Episode("mine", (1,), 0, settings, EpisodeRecord(text.encode)))
    with closing(EndpointServer(policy, "127.0.0.1", 0)) as server:
        yield server


def connected(served: EndpointServer, sent: bytes = b"") -> socket.socket:
    host, port = served.url.split("/")[2].split(":")
    link = socket.create_connection((host, int(port)), timeout=10)
    link.sendall(sent)
    return link


def is_closed(link: socket.socket) -> bool:
    """Whether the server has closed the connection; what it sent before is read."""
    link.settimeout(0.05)
    try:
        while link.recv(2**16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.usefixtures("few_may_wait")
def test_a_connection_without_a_whole_request_is_closed_after_a_time(served):
    with connected(served) as silent, connected(served, HEAD) as slow:
        assert not is_closed(silent) and not is_closed(slow)
        deadline = time.monotonic() + 10
        while not (is_closed(silent) and is_closed(slow)) and time.monotonic() < deadline:
            slow.sendall(b"X-More: 1\r\n") if not is_closed(slow) else None
        assert is_closed(silent) and is_closed(slow)


@pytest.mark.usefixtures("few_may_wait")
def test_of_many_connections_without_a_request_the_oldest_end_and_held_requests_stay(served):
    """Those with a key are held for as long as they last, however many they are."""
    body = json.dumps({"messages": [QUESTION]}).encode()
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: mine\r\n"
    asked += b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        held = [stack.enter_context(connected(served, asked)) for _ in range(20)]
        time.sleep(0.5)
        others = [stack.enter_context(connected(served)) for _ in range(100)]
        key = {"x-api-key": "mine"}
        assert httpx.get(f"{served.url}/models", headers=key).status_code == 200
        assert sum(map(is_closed, others)) >= 92
        time.sleep(1.5)
        assert not any(map(is_closed, held))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/other"])
def test_a_request_without_a_key_ends_its_connection(served, path):
    with connected(served, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()) as link:
        assert link.recv(12) in (b"HTTP/1.1 401", b"HTTP/1.1 404") and is_closed(link)
    request = HEAD + b"x-api-key: mine\r\n\r\n"
    with connected(served, request) as link:
        assert link.recv(12) == b"HTTP/1.1 200" and not is_closed(link)


def refused(served: EndpointServer, path: str = "chat/completions", **options: object) -> str:
    """The message with which a request is refused, which takes no time."""
    body = {"messages": [QUESTION], "max_tokens": 9} | options
    begun = time.monotonic()
    answer = httpx.post(f"{served.url}/{path}", headers={"x-api-key": "mine"}, json=body)
    assert answer.status_code == 400 and time.monotonic() - begun < 5
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name"),
    [("chat/completions", "stop"), ("completions", "stop"), ("messages", "stop_sequences")],
)
def test_too_many_or_long_stop_strings_are_refused_by_name(served, path, name):
    limits = f"expected at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters"
    for stops, has in (
        (["x" * 10 * 2**20], f"{name} has 1 strings, the longest of 10485760 characters"),
        ([str(k) for k in range(10_000)], f"{name} has 10000 strings"),
    ):
        own = {"prompt": "?", "messages": None} if path == "completions" else {}
        told = refused(served, path, **{name: stops}, **own)
        assert has in told and limits in told


def test_arguments_that_are_nested_too_deeply_are_refused(served):
    function = {"name": "add", "arguments": "[" * 10**5 + "]" * 10**5}
    call = {"id": "1", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "recursion" in refused(served, messages=[QUESTION, said])


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/x.json", "other.json#/a"])
def test_a_schema_that_refers_to_another_file_is_refused(served, reference):
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": reference}]}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert f"$ref = '{reference}'" in refused(served, response_format=form)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_tools_that_the_template_leaves_out_are_refused(served, path):
    """The model would never see them."""
    tools = {"chat/completions": TOOLS, "messages": [{"name": "add", "input_schema": {}}]}
    own = {"tools": tools.get(path, [{"type": "function", "name": "add"}])}
    own |= {"input": "3 + 4?", "messages": None} if path == "responses" else {}
    assert "chat template leaves tools out" in refused(served, path, **own)


@pytest.mark.parametrize("renders", [False, True])
def test_a_template_that_renders_tools_is_known(renders):
    tokenizer = load_tokenizer(model_config("embedded"))
    tokenizer.chat_template = WITH_TOOLS * renders + tokenizer.chat_template
    assert ModelText(tokenizer, []).has_tools is renders
    tokenizer.chat_template = None
    assert not ModelText(tokenizer, []).has_tools
