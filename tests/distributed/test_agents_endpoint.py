"""The endpoint with real clients over a real engine: tokens, branches, refusals, lost clients."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest
import torch

from hybridrl.agents.chat import message_of, rendered
from hybridrl.agents.episode import Completion
from hybridrl.agents.server import MAX_BODY_BYTES
from tests.agents_serving import CONTEXT, Served, serving

QUESTION = {"role": "user", "content": "Tom has 3 pens and buys 4 more. How many pens are there?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("engine")) as one:
        yield one


def client_of(served: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key=key, max_retries=0, timeout=60)


def chat(client: openai.OpenAI, *messages: dict[str, str], **options):
    limited = {"max_tokens": 60} | options
    return client.chat.completions.create(model="policy", messages=[*messages], **limited)


def said(answer) -> dict[str, str]:
    return {"role": "assistant", "content": answer.choices[0].message.content}


def test_a_second_turn_continues_the_sampled_tokens(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    first = chat(client, QUESTION)
    more = {"role": "user", "content": "And if Ann has 2 more?"}
    second = chat(client, QUESTION, said(first), more)
    batch = served.batch(episode)
    assert len(batch) == 1 and batch.turns.tolist() == [2]
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    sampled = first.usage.completion_tokens + second.usage.completion_tokens
    assert int(batch.response_mask.values.sum()) == sampled
    assert (batch.rollout_log_probs.values[~batch.response_mask.values] == 0).all()
    assert batch.prompts.lengths.tolist() == [first.usage.prompt_tokens]


def test_the_same_episode_samples_the_same_streamed_or_not(served):
    """Seeds follow from the episode and the request, so the text is the same."""
    one, other = served.episode(7), served.episode(7)
    whole = chat(client_of(served, one.key), QUESTION, logprobs=True)
    options = {"stream_options": {"include_usage": True}, "logprobs": True}
    chunks = [*chat(client_of(served, other.key), QUESTION, stream=True, **options)]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert served.batch(one).responses.values.equal(served.batch(other).responses.values)
    log_probs = [token.logprob for token in whole.choices[0].logprobs.content]
    assert log_probs == pytest.approx(one.record.sequences[0].log_probs[-len(log_probs) :])


def test_equal_requests_of_an_episode_differ_and_share_their_prompt(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    answer = chat(client, QUESTION, n=6)
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts, chat(client, QUESTION).choices[0].message.content}) > 1
    batch = served.batch(episode)
    assert len(batch) == 7 and batch.episode.tolist() == [0] * 7
    assert batch.response_mask.values.all()


def test_parallel_continuations_train_a_shared_turn_once(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    first = chat(client, QUESTION)
    asked = [{"role": "user", "content": f"Ann has {k} pens, and then?"} for k in range(4)]
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda more: chat(client, QUESTION, said(first), more), asked)]
    batch = served.batch(episode)
    total = sum(answer.usage.completion_tokens for answer in [first, *answers])
    assert len(batch) == 4 and int(batch.response_mask.values.sum()) == total


def test_edited_history_and_stripped_thinking_begin_a_branch(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    first = chat(client, QUESTION)
    thought = said(first)["content"][:3]  # what a template leaves of a turn
    chat(client, QUESTION, {"role": "assistant", "content": thought + "!"}, QUESTION)
    chat(client, QUESTION | {"content": "A sub-agent's question?"})
    batch = served.batch(episode)
    assert len(batch) == 3
    assert thought in episode.record.branch and "the request has '!" in episode.record.branch


def test_a_completion_ends_at_a_stop_string_that_it_keeps_for_training(served):
    episode = served.episode(temperature=0.0)
    client = client_of(served, episode.key)
    text, ends = "<|user|>Tom has 12 pens and buys 14. How many?<|assistant|>12 +", set()
    for stop in ("=", "11 ="):  # one token, and several
        answer = client.completions.create(model="policy", prompt=text, stop=[stop])
        choice = answer.choices[0]
        assert stop not in choice.text
        ends.add((choice.text + (choice.stop_reason or ""), choice.finish_reason))
        row = episode.record.sequences[-1]
        assert row.text == text + choice.text + choice.stop_reason
    assert ends == {(" 11 =", "stop")}
    batch = served.batch(episode)
    assert batch.turns.tolist() == [1, 1]


def test_text_that_the_program_adds_is_context(served):
    """A response prefix: the assistant's message is continued, and its beginning is not trained."""
    episode = served.episode()
    client = client_of(served, episode.key)
    begun = {"role": "assistant", "content": "3 + 4 ="}
    own = {"continue_final_message": True}
    answer = chat(client, QUESTION, begun, extra_body=own, max_tokens=3)
    batch = served.batch(episode)
    assert int(batch.response_mask.values.sum()) == answer.usage.completion_tokens == 3
    assert batch.truncated.tolist() == [True] and answer.choices[0].finish_reason == "length"
    assert served.endpoint.policy.text.decode(batch.prompts.values.tolist()).endswith("3 + 4 =")


def test_responses_streamed_or_not(served):
    one, other = served.episode(9), served.episode(9)
    asked = {"model": "policy", "input": QUESTION["content"], "instructions": "Be brief."}
    client = client_of(served, one.key)
    whole = client.responses.create(**asked)
    with client_of(served, other.key).responses.stream(**asked) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_text == whole.output_text and kinds[-1] == "response.completed"
    items = [*whole.output, {"role": "user", "content": "And then?"}]
    history = [{"role": "user", "content": QUESTION["content"]}, *items]
    client.responses.create(**(asked | {"input": history}))
    assert served.batch(one).turns.tolist() == [2]
    assert served.batch(other).turns.tolist() == [1]


def test_messages_of_anthropic_streamed_or_not(served):
    one, other = served.episode(11), served.episode(11)
    clients = [
        anthropic.Anthropic(base_url=served.url[:-3], api_key=e.key, max_retries=0, timeout=60)
        for e in (one, other)
    ]
    asked = {"model": "policy", "max_tokens": 40, "system": "Be brief.", "messages": [QUESTION]}
    whole = clients[0].messages.create(**asked)
    with clients[1].messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage == whole.usage
    more = [QUESTION, {"role": "assistant", "content": whole.content}, QUESTION]
    clients[0].messages.create(**(asked | {"messages": more}))
    assert served.batch(one).turns.tolist() == [2]
    with pytest.raises(anthropic.AuthenticationError):
        clients[0].messages.create(**asked)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_body": {"max_tokens": 0}}, "max_tokens"),
    ],
)
def test_a_parameter_that_would_make_training_wrong_is_refused_by_name(served, options, names):
    client = client_of(served, served.episode().key)
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, QUESTION, **options)
    assert refused.value.param == names and names in refused.value.message
    assert chat(client, QUESTION, temperature=1.0, top_p=1.0).choices


def test_other_sampling_may_be_masked(served):
    episode = served.episode(masks_other=True)
    answer = chat(client_of(served, episode.key), QUESTION, temperature=0.2)
    batch = served.batch(episode)
    assert answer.choices and not batch.response_mask.values.any()


def test_errors_are_those_that_the_sdk_expects(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        chat(client_of(served, "another"), QUESTION)
    long = QUESTION | {"content": "pens " * CONTEXT}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, long)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as refused:
        chat(client, QUESTION | {"content": "x" * MAX_BODY_BYTES})
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        chat(client, {"role": "user", "content": [{"type": "image_url"}]})
    assert [model.id for model in client.models.list()] == ["policy"]
    assert len(served.batch(episode)) == 1  # the end token of an episode that sampled nothing
    with pytest.raises(openai.AuthenticationError):
        chat(client, QUESTION)


def test_a_repeated_episode_begins_anew(served):
    episode = served.episode(5)
    first = chat(client_of(served, f"{episode.key}.a"), QUESTION)
    again = chat(client_of(served, f"{episode.key}.b"), QUESTION)
    assert said(first) == said(again)
    assert served.batch(episode).turns.tolist() == [1]


def test_a_client_that_goes_away_frees_the_engine_and_the_rest_goes_on(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    before = set(served.sampled.requests)
    body = json.dumps({"messages": [QUESTION], "n": 2, "stream": True, "extra_ids": None})
    host, port = served.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as link:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {episode.key}\r\n"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while b"data:" not in received:
            received += link.recv(1)
    assert chat(client, QUESTION).choices
    new = set(served.sampled.requests) - before
    deadline = time.monotonic() + 10
    while episode.open and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(new) == 3 and not episode.open
    served.batch(episode)


def test_a_request_goes_on_after_each_cut(served):
    """The prefix is computed anew, the tokens stay; greedily they are those without a cut."""
    whole, cut = served.episode(temperature=0.0), served.episode(temperature=0.0)
    said_whole = said(chat(client_of(served, whole.key), QUESTION))
    before = set(served.sampled.requests)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(chat, client_of(served, cut.key), QUESTION)
        while not asked.done():
            seen = served.sampled.calls
            while served.sampled.calls == seen and not asked.done():
                time.sleep(0.001)
            with served.cut():
                pass
    (name,) = set(served.sampled.requests) - before
    assert served.sampled.admitted[name] > 2
    assert said(asked.result()) == said_whole
    one, other = served.batch(whole), served.batch(cut)
    assert one.responses.values.equal(other.responses.values)
    log_probs = one.rollout_log_probs.values, other.rollout_log_probs.values
    assert torch.allclose(*log_probs, atol=1e-4)
    assert other.token_versions.values.equal(torch.zeros_like(other.token_versions.values))


def test_what_cannot_go_on_is_sampled_to_its_end_before_a_cut(served):
    """A penalty counts the tokens of one request of the engine."""
    episode = served.episode(masks_other=True)
    before = set(served.sampled.requests)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(
            chat, client_of(served, episode.key), QUESTION, presence_penalty=0.5, n=4
        )
        while not episode.open:
            time.sleep(0.001)
        with served.cut():
            assert len(asked.result(10).choices) == 4
    new = set(served.sampled.requests) - before
    assert [served.sampled.admitted[name] for name in new] == [1] * 4
    served.batch(episode)


def test_a_client_that_goes_away_during_an_update_is_not_sampled_for(served):
    episode = served.episode()
    with served.cut():
        before = dict(served.sampled.admitted)
        client = client_of(served, episode.key).with_options(timeout=0.5)
        with pytest.raises(openai.APITimeoutError):
            chat(client, QUESTION)
        deadline = time.monotonic() + 10
        while episode.open and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not episode.open
    other = served.episode()
    assert chat(client_of(served, other.key), QUESTION).choices
    assert len(served.sampled.admitted) == len(before) + 1
    served.batch(other)


def test_a_closed_episode_ends_its_open_requests(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(chat, client, QUESTION, n=100)
        while not episode.open:
            time.sleep(0.001)
        batch = served.batch(episode)
        with pytest.raises((openai.AuthenticationError, openai.APIStatusError)):
            waiting.result(30)
    assert len(batch) <= 101


def test_a_tool_call_is_parsed_and_rendered_again_as_it_was_sampled(served):
    """Whatever form a client gives the JSON of its arguments."""
    policy, episode = served.endpoint.policy, served.episode()
    raw = 'Well.\n<tool_call>\n{"name": "add",   "arguments": {"b": 4, "a": 3}}\n</tool_call>'
    tokens = [*policy.text.encode(raw, False), served.endpoint.end_token]
    one = Completion(0, "1", 5, raw, "stop", None, tokens, [-1.0] * len(tokens))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    message, reason = message_of(policy, episode, one, tools)
    (call,) = message["tool_calls"]
    assert reason == "tool_calls" and message["content"].strip() == "Well."
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}
    call["function"]["arguments"] = '{"a":3,"b":4}'
    history = [QUESTION, message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    text = rendered(policy, episode, history, tools)
    assert f"<|assistant|>{raw}<|end|><|tool|>7<|assistant|>" in text
    changed = message | {"content": "Well!"}
    assert raw not in rendered(policy, episode, [QUESTION, changed], tools)
