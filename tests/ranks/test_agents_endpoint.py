"""The endpoint with real clients over a real engine: tokens, branches, refusals, lost clients."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import anthropic
import httpx
import openai
import pytest
import torch

from hybridrl.agents.chat import message_of, rendered
from hybridrl.agents.episode import Ask, Completion, Prompt
from hybridrl.agents.http import MAX_BODY_BYTES
from hybridrl.config.choices import OtherSampling
from hybridrl.config.errors import ConfigError
from hybridrl.rollout.vllm.text import load_parser
from tests.support.agents_serving import CONTEXT, Served, serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "$defs": {"term": {"type": "integer", "minimum": 0, "maximum": 99}},
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/term"}, "b": {"$ref": "#/$defs/term"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Tom", "Ann"]}, "is_even": {"type": "boolean"}},
    "required": ["who", "is_even"],
    "additionalProperties": False,
}
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
    assert len(batch) == 1 and batch.conversation.turns.tolist() == [2]
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


@pytest.mark.parametrize("strips", [False, True])
def test_a_template_that_strips_thinking_from_earlier_turns_begins_a_branch(served, strips):
    tokenizer = served.endpoint.policy.text._tokenizer
    template, content = tokenizer.chat_template, "message['content']"
    if strips:
        kept = f"({content} if loop.last else {content}.split('</think>')[-1])"
        template = template.replace(content, kept)
    episode = served.episode()
    client = client_of(served, episode.key)
    thought = {"role": "assistant", "content": "3 + 4</think>"}
    with patch.object(tokenizer, "chat_template", template):
        first = chat(client, QUESTION, thought, extra_body={"continue_final_message": True})
        thought["content"] += said(first)["content"]
        chat(client, QUESTION, thought, QUESTION)
    rows = episode.record.sequences
    assert [len(row.turns) for row in rows] == ([1, 1] if strips else [2])
    assert ("</think>" in rows[-1].text) is not strips
    assert served.batch(episode).conversation.turns.tolist() == ([1, 1] if strips else [2])


def test_a_completion_ends_at_a_stop_string_that_it_keeps_for_training(served):
    episode = served.episode(temperature=0.0)
    client = client_of(served, episode.key)
    text, ends = "<|user|>Tom has 12 pens and buys 14. How many?<|assistant|>12 +", set()
    for stop in ("=", "11 ="):  # one token, and several
        asked = {"model": "policy", "prompt": text, "stop": [stop]}
        answer = client.completions.create(**asked)
        own = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, end = client.completions.create(**asked, **own)
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
        assert end.usage == answer.usage and not end.choices
        choice = answer.choices[0]
        assert stop not in choice.text
        ends.add((choice.text + (choice.stop_reason or ""), choice.finish_reason))
        row = episode.record.sequences[-1]
        assert row.text == text + choice.text + choice.stop_reason
    assert ends == {(" 11 =", "stop")}
    batch = served.batch(episode)
    assert batch.conversation.turns.tolist() == [1, 1, 1, 1]


def test_text_that_the_program_adds_is_context(served):
    """A response prefix: the assistant's message is continued, and its beginning is not trained."""
    episode = served.episode()
    client = client_of(served, episode.key)
    begun = {"role": "assistant", "content": "3 + 4 ="}
    own = {"continue_final_message": True}
    answer = chat(client, QUESTION, begun, extra_body=own, max_tokens=3)
    batch = served.batch(episode)
    assert int(batch.response_mask.values.sum()) == answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert served.endpoint.policy.text.decode(batch.prompts.values.tolist()).endswith("3 + 4 =")


@pytest.mark.parametrize("limit", [None, 2, 3, 100])
def test_only_a_full_context_is_truncation_not_a_clients_own_limit(served, limit):
    episode, encode = served.episode(), served.endpoint.policy.text.encode
    (pen,) = encode(" pens", encode(" pens", None)[-1])
    text = served.endpoint.policy.text.decode([pen] * (CONTEXT - 3))
    assert len(encode(text, None)) == CONTEXT - 3
    asked = {"model": "policy", "prompt": text} | ({"max_tokens": limit} if limit else {})
    answer = client_of(served, episode.key).completions.create(**asked)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == (limit if limit == 2 else 3)
    assert served.batch(episode).truncated.tolist() == [limit != 2]


def test_responses_streamed_or_not(served):
    one, other = served.episode(9), served.episode(9)
    asked = {"model": "policy", "input": QUESTION["content"], "instructions": "Be brief."}
    client = client_of(served, one.key)
    whole = client.responses.create(**asked)
    with client_of(served, other.key).responses.stream(**asked) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_text == whole.output_text and kinds[-1] == "response.completed"
    with_log_probs = client_of(served, served.episode(9).key).responses.create(
        **asked, include=["message.output_text.logprobs"]
    )
    (part,) = with_log_probs.output[0].content
    assert part.text == whole.output_text
    assert len(part.logprobs) == whole.usage.output_tokens and part.logprobs[0].logprob < 0
    items = [*whole.output, {"role": "user", "content": "And then?"}]
    history = [{"role": "user", "content": QUESTION["content"]}, *items]
    client.responses.create(**(asked | {"input": history}))
    assert served.batch(one).conversation.turns.tolist() == [2]
    assert served.batch(other).conversation.turns.tolist() == [1]


def test_a_streamed_response_with_tools_has_its_text_or_call_in_pieces(served):
    tool = {"type": "function"} | TOOLS[0]["function"]
    asked = {"model": "policy", "input": QUESTION["content"], "max_output_tokens": 60}
    for choice, kind in (("auto", "response.output_text"), ("required", "function_call_arguments")):
        client = client_of(served, served.episode(other_sampling=OtherSampling.mask).key)
        seen = [*client.responses.create(**asked, tools=[tool], tool_choice=choice, stream=True)]
        (item,) = seen[-1].response.output
        text = item.arguments if choice == "required" else item.content[0].text
        (delta,) = [one.delta for one in seen if one.type.endswith(f"{kind}.delta")]
        (done,) = [one for one in seen if one.type.endswith(f"{kind}.done")]
        assert delta == text == (done.arguments if choice == "required" else done.text)


def test_messages_of_anthropic_streamed_or_not(served):
    one, other = served.episode(11), served.episode(11)
    clients = [
        anthropic.Anthropic(base_url=served.url[:-3], api_key=e.key, max_retries=0, timeout=60)
        for e in (one, other)
    ]
    asked = {"model": "policy", "max_tokens": 40, "system": "Be brief.", "messages": [QUESTION]}
    asked |= {"cache_control": {"type": "ephemeral"}}
    whole = clients[0].messages.create(**asked)
    with clients[1].messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage == whole.usage
    more = [QUESTION, {"role": "assistant", "content": whole.content}, QUESTION]
    clients[0].messages.create(**(asked | {"messages": more}))
    assert served.batch(one).conversation.turns.tolist() == [2]
    for wrong in (
        {"messages": [QUESTION | {"content": 5}]},
        {"messages": [QUESTION | {"content": ["a"]}]},
        {"messages": [QUESTION | {"content": [{"type": "text"}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "add", "input_schema": "s"}]},
    ):
        with pytest.raises(anthropic.BadRequestError):
            clients[1].messages.create(**(asked | wrong))
    served.batch(other)
    with pytest.raises(anthropic.AuthenticationError):
        clients[0].messages.create(**asked)


def test_a_stream_begins_without_an_end_though_its_only_token_is_the_last(served):
    key, asked = served.episode().key, {"model": "policy", "stream": True}
    first, *_ = client_of(served, key).responses.create(**asked, input="?", max_output_tokens=1)
    assert (first.response.status, first.response.usage) == ("in_progress", None)
    client = anthropic.Anthropic(base_url=served.url[:-3], api_key=key, max_retries=0)
    first, *_ = client.messages.create(**asked, max_tokens=1, messages=[QUESTION])
    assert first.message.stop_reason is None


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
        ({"extra_body": {"max_tokens": 0}}, "max_tokens"),
    ],
)
def test_a_parameter_that_would_make_training_wrong_is_refused_by_name(served, options, names):
    client = client_of(served, served.episode().key)
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, QUESTION, **options)
    assert refused.value.param == names and names in refused.value.message
    assert chat(client, QUESTION, temperature=1.0, top_p=1.0).choices


@pytest.mark.parametrize("options", [{"temperature": 0.2}, {"extra_body": {"top_k": 1}}])
def test_other_sampling_may_be_masked(served, options):
    episode = served.episode(other_sampling=OtherSampling.mask)
    answer = chat(client_of(served, episode.key), QUESTION, **options)
    batch = served.batch(episode)
    assert answer.choices and not batch.response_mask.values.any()


def test_biased_tokens_are_sampled_and_not_trained(served):
    episode = served.episode(other_sampling=OtherSampling.mask)
    client = client_of(served, episode.key)
    (wanted,) = served.endpoint.policy.text.encode("7", None)
    answer = chat(client, QUESTION, logit_bias={str(wanted): 100}, max_tokens=4)
    assert said(answer)["content"] == "7777"
    assert not served.batch(episode).response_mask.values.any()


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"99999": 1}},
        {"logit_bias": {"seven": 1}},
        {"logit_bias": {"5": 1e39}},
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"presence_penalty": 3.0},
        {"extra_body": {"top_k": -2}},
        {"extra_body": {"min_p": 2.0}},
    ],
)
def test_sampling_that_vllm_refuses_is_an_error_of_the_request(served, options):
    """In the engine it would end the run."""
    client = client_of(served, served.episode(other_sampling=OtherSampling.mask).key)
    with pytest.raises(openai.BadRequestError):
        chat(client, QUESTION, **options)
    assert chat(client, QUESTION).choices


def test_what_vllm_cannot_sample_by_fails_alone(served):
    """A grammar that accepts nothing is known to vLLM only when it samples."""
    client = client_of(served, served.episode(other_sampling=OtherSampling.mask).key)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    for count in (1, 2):
        with pytest.raises(openai.BadRequestError, match="cannot sample by these parameters"):
            chat(client, QUESTION, response_format=form, n=count)
        with pytest.raises(openai.APIError, match="cannot sample by these parameters"):
            [*chat(client, QUESTION, response_format=form, n=count, stream=True)]
    assert chat(client, QUESTION).choices


def test_a_seed_repeats_a_completion(served):
    client = client_of(served, served.episode(11).key)  # whose completions differ by seed
    first, again, other = (chat(client, QUESTION, seed=seed, n=2) for seed in (5, 5, 6))
    texts = [[choice.message.content for choice in one.choices] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and len({*texts[0]}) == 2
    assert len({first.id, again.id, other.id}) == 3  # rewards of turns name them


def test_other_sampling_may_be_ignored(served):
    """As if the request had none; the policy's own tool calls are still found."""
    one, other = (served.episode(13, other_sampling=OtherSampling.ignore) for _ in range(2))
    own = {"temperature": 0.1, "response_format": {"type": "json_object"}}
    first = chat(client_of(served, one.key), QUESTION, **own)
    assert said(first) == said(chat(client_of(served, other.key), QUESTION))
    assert served.batch(one).response_mask.values.all()


def answer_in_json(served: Served, key: str, api: str) -> str:
    """The text of an answer that the schema constrains, by the parameter of an API."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if api == "messages":
        own = anthropic.Anthropic(base_url=served.url[:-3], api_key=key, max_retries=0, timeout=60)
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        asked = {"model": "policy", "max_tokens": 60, "messages": [QUESTION]}
        return own.messages.create(**asked, output_config=form).content[0].text
    client = client_of(served, key)
    if api == "responses":
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        asked = {"model": "policy", "input": QUESTION["content"], "text": {"format": form}}
        return client.responses.create(**asked).output_text
    if api == "chat":
        return said(chat(client, QUESTION, response_format=named))["content"]
    pieces = chat(client, QUESTION, response_format=named, stream=True, stop=["zebra"])
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


@pytest.mark.parametrize("api", ["chat", "streamed chat", "responses", "messages"])
def test_json_of_a_schema_is_recorded_as_it_was_constrained_and_not_trained(served, api):
    episode = served.episode(other_sampling=OtherSampling.mask)
    answer = json.loads(answer_in_json(served, episode.key, api))
    assert answer.keys() == SCHEMA["properties"].keys() and answer["who"] in ("Tom", "Ann")
    (row,) = episode.record.sequences
    sampled = row.log_probs[row.turns[0].start :]
    assert max(sampled) == 0.0 and sum(sampled) > -30  # the policy itself would not write this
    assert not any(row.trained)
    chat(client_of(served, episode.key), QUESTION | {"content": "And Ann?"})
    assert [any(row.trained) for row in episode.record.sequences] == [False, True]
    served.batch(episode)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"add", "stop"}), ({"type": "function", "function": {"name": "add"}}, {"add"})],
)
def test_a_forced_tool_call_fits_its_schema_and_is_continued(served, choice, names):
    episode = served.episode(other_sampling=OtherSampling.mask)
    client = client_of(served, episode.key)
    answer = chat(client, QUESTION, tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in names and answer.finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "stop" or all(0 <= arguments[name] < 100 for name in "ab")
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    chat(client, QUESTION, answer.message, result, tools=TOOLS)
    batch = served.batch(episode)
    assert batch.conversation.turns.tolist() == [2]
    assert 0 < int(batch.response_mask.values.sum()) <= 60
    assert not episode.record.branch


@pytest.mark.parametrize(
    ("schema", "why"),
    [({"type": "nonsense"}, "nonsense"), ({"type": "array", "uniqueItems": True}, "not supported")],
)
def test_a_schema_that_cannot_be_followed_is_refused(served, schema, why):
    client = client_of(served, served.episode(other_sampling=OtherSampling.mask).key)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        chat(client, QUESTION, response_format=form)
    assert refused.value.param == "response_format"
    form["json_schema"]["schema"] = SCHEMA
    with pytest.raises(openai.BadRequestError, match="cannot call tools"):
        chat(client, QUESTION, response_format=form, tools=TOOLS)


def test_errors_are_those_that_the_sdk_expects(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        chat(client_of(served, "another"), QUESTION)
    long = QUESTION | {"content": "pens " * CONTEXT}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, long)
    assert refused.value.code == "context_length_exceeded"
    text = served.endpoint.policy.text
    with (
        patch.object(text, "encode", side_effect=AssertionError("others would wait")),
        pytest.raises(openai.BadRequestError, match="characters"),
    ):
        chat(client, QUESTION | {"content": "x" * (text.longest * CONTEXT)})
    with pytest.raises(openai.APIStatusError) as refused:
        chat(client, QUESTION | {"content": "x" * MAX_BODY_BYTES})
    assert refused.value.status_code == 413
    parts = [[{"type": "image_url"}], ["text"], [{"type": "text", "text": None}]]
    nameless = {"type": "function", "function": {"parameters": {}}}
    formless = {"type": "function", "function": {"name": "add", "parameters": "x"}}
    for content, options in (
        *((content, {}) for content in parts),
        ("?", {"tools": [nameless]}),
        ("?", {"tools": [formless]}),
        ("?", {"extra_body": {"chat_template_kwargs": {"tokenize": True}}}),
        ("?", {"extra_body": {"chat_template_kwargs": {"self": True}}}),
    ):
        with pytest.raises(openai.BadRequestError):
            chat(client, {"role": "user", "content": content}, **options)
    for calls in (["a"], {"a": 1}, [{"function": "x"}]):
        with pytest.raises(openai.BadRequestError, match="tool_calls"):
            chat(client, QUESTION, {"role": "assistant", "tool_calls": calls})
    assert [model.id for model in client.models.list()] == ["policy"]
    assert len(served.batch(episode)) == 1  # the end token of an episode that sampled nothing
    with pytest.raises(openai.AuthenticationError):
        chat(client, QUESTION)


def test_an_error_of_the_endpoint_is_told_and_the_connection_kept(served):
    connection = http.client.HTTPConnection(served.url.split("/")[2])
    headers = {"authorization": f"bearer {served.episode().key}"}
    text = served.endpoint.policy.text
    with patch.object(text, "render", side_effect=KeyError("roles")):
        connection.request("POST", "/v1/chat/completions", '{"messages": [{}]}', headers)
        connected, answer = connection.sock, connection.getresponse()
        assert answer.status == 500 and b"KeyError: 'roles'" in answer.read()
    for path in ("/v1/models", "/chat/completions"):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        found = answer.read().decode()
        assert connection.sock is connected
    assert answer.status == 404 and f"base URL {served.url}," in found
    connection.close()


@pytest.mark.slow
def test_a_connection_that_is_idle_between_turns_is_kept(served):
    """httpx uses one again until 5 s after its last request."""
    connection = http.client.HTTPConnection(served.url.split("/")[2])
    headers = {"Authorization": f"Bearer {served.episode().key}"}
    for _ in range(2):
        connection.request("GET", "/v1/models", headers=headers)
        connected = connection.sock
        assert connection.getresponse().read() and connection.sock is connected
        time.sleep(7)
    connection.close()


def test_a_repeated_episode_begins_anew(served):
    episode = served.episode(5)
    first = chat(client_of(served, episode.key), QUESTION)
    again = chat(client_of(served, served.repeat(episode, "b")), QUESTION)
    assert said(first) == said(again)
    assert served.batch(episode).conversation.turns.tolist() == [1]


@pytest.mark.parametrize("path", ["models", "transcript", "chat/completions"])
def test_a_key_that_the_pool_did_not_name_is_refused_and_changes_nothing(served, path):
    """A policy with a shell could hide its bad turns otherwise."""
    episode = served.episode()
    client = client_of(served, episode.key)
    first = chat(client, QUESTION)
    for key in (f"{episode.key}.x", f"{episode.key}.", f".{episode.key}", "", "."):
        send = httpx.post if path.startswith("chat") else httpx.get
        found = send(f"{served.url}/{path}", headers={"x-api-key": key})
        assert found.status_code == 401
    more = chat(client, QUESTION, said(first), QUESTION)
    assert more.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert served.batch(episode).conversation.turns.tolist() == [2]


def test_late_requests_of_an_earlier_attempt_change_nothing(served):
    """One of which the body was still to come, one that is being sampled, and a new one."""
    episode = served.episode()
    client = client_of(served, episode.key)
    with connected(served) as link, chat(client, QUESTION, stream=True, n=64) as stream:
        next(stream)
        link.sendall(posted(episode.key)[:-20])
        again = client_of(served, served.repeat(episode, "b"))
        chat(again, QUESTION)
        link.sendall(posted(episode.key)[-20:])
        assert b"401" in read_all(link)
        for _ in stream:
            pass
    with pytest.raises(openai.AuthenticationError):
        chat(client, QUESTION)
    assert not episode.is_open and not episode.open
    assert served.batch(episode).conversation.turns.tolist() == [1]


def test_a_client_that_goes_away_frees_the_engine_and_the_rest_goes_on(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    before = set(served.sampled.requests)
    with connected(served) as link:
        link.sendall(posted(episode.key, n=2, stream=True))
        received = b""
        while b"data:" not in received:
            received += link.recv(1)
    assert chat(client, QUESTION).choices
    new = set(served.sampled.requests) - before
    deadline = time.monotonic() + 10
    while episode.open and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(new) == 3 and not episode.open
    assert len(served.batch(episode)) >= 2  # what had come of the lost stream is trained


def connected(served: Served, receive_bytes: int | None = None) -> socket.socket:
    """A connection to the endpoint, with a small receive buffer if wished."""
    host, port = served.url.split("/")[2].split(":")
    link = socket.socket()
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(60)
    link.connect((host, int(port)))
    return link


def posted(key: str, **options: object) -> bytes:
    """A request for the question, after which the connection is closed."""
    body = json.dumps({"messages": [QUESTION], "max_tokens": 60} | options)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
    head += "Connection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def read_all(link: socket.socket) -> bytes:
    """What is received until the connection ends."""
    parts = [b""]
    while part := link.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def test_a_client_that_reads_slowly_holds_up_no_other_and_loses_nothing(served):
    """It reads only when all has been sampled, which does not fit into its connection."""
    slow, other = served.episode(), served.episode()
    with connected(served, receive_bytes=2048) as link:
        link.sendall(posted(slow.key, n=64, stream=True, logprobs=True))
        assert chat(client_of(served, other.key), QUESTION).choices
        deadline = time.monotonic() + 60
        while len(slow.record.sequences) < 64 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not slow.open
        received = read_all(link)
    assert received.count(b'"finish_reason": "stop"') + received.count(b'"length"') == 64
    assert b"data: [DONE]" in received
    batch = served.batch(slow)
    tokens = int(batch.response_mask.values.sum())
    assert len(batch) == 64 and received.count(b'"top_logprobs": []') == tokens


def test_pieces_that_wait_for_their_reader_end_once(served):
    policy, episode, found = served.endpoint.policy, served.episode(temperature=0.0), []

    async def read_late() -> str:
        ask = Ask(Prompt("<|user|>", []), max_tokens=30)
        begun = policy.begin(episode, ask, 1, in_pieces=True)
        async for one, piece in policy.pieces(episode, begun):
            found.append((one.has_ended, piece))
            while not one.has_ended:
                await asyncio.sleep(0.01)
        return one.text

    reading = asyncio.run_coroutine_threadsafe(read_late(), served.endpoint.server.loop)
    text = reading.result(30)
    assert [has_ended for has_ended, _ in found] == [False, True]
    assert "".join(piece for _, piece in found) == text


def test_a_client_that_sends_slowly_is_answered_and_one_that_stops_is_forgotten(served):
    slow, stopped = served.episode(), served.episode()
    with connected(served) as link, connected(served) as never:
        for key, each in ((slow.key, link), (stopped.key, never)):
            each.sendall(posted(key)[:-20])
        assert chat(client_of(served, slow.key), QUESTION).choices
        link.sendall(posted(slow.key)[-20:])
        assert b"200 OK" in read_all(link)
        assert len(served.batch(slow)) == 2
        served.batch(stopped)
        never.sendall(posted(stopped.key)[-20:])
        assert b"401" in read_all(never)
        assert not stopped.record.sequences and not stopped.open


def test_a_turn_that_is_asked_for_before_the_last_ones_end(served):
    """A part of its text is another history; the turn itself goes on to its end."""
    episode = served.episode(21)
    client = client_of(served, episode.key)
    with chat(client, QUESTION, stream=True) as stream:
        pieces = [next(stream).choices[0].delta.content]
        part = {"role": "assistant", "content": pieces[0]}
        chat(client, QUESTION, part, QUESTION)
        pieces += [piece.choices[0].delta.content or "" for piece in stream]
    whole = {"role": "assistant", "content": "".join(pieces)}
    chat(client, QUESTION, whole, QUESTION)
    assert len(whole["content"]) > len(part["content"])
    assert sorted(served.batch(episode).conversation.turns.tolist()) == [1, 2]


def test_turns_may_come_in_any_order(served):
    """A turn after an old one begins a branch with its tokens; the newest may still go on."""
    episode = served.episode()
    client, history = client_of(served, episode.key), [QUESTION]
    for _ in range(3):
        history += [said(chat(client, *history)), QUESTION]
    back = chat(client, *history[:2], {"role": "user", "content": "Once more?"})
    chat(client, *history)
    batch = served.batch(episode)
    assert batch.conversation.turns.tolist() == [4, 1] and not episode.record.branch
    first, branch = episode.record.sequences
    shared = first.turns[0].end
    assert branch.ids[:shared] == first.ids[:shared] and not any(branch.trained[:shared])
    assert sum(branch.trained) == back.usage.completion_tokens


def test_a_transcript_has_the_messages_of_each_conversation(served):
    episode = served.episode()
    client = client_of(served, episode.key)
    first = said(chat(client, QUESTION))
    second = said(chat(client, QUESTION, first, QUESTION))
    client.responses.create(
        model="policy", input="Apart?", instructions="Be brief.", max_output_tokens=9
    )
    found = client.get("/transcript", cast_to=httpx.Response).json()
    assert found[0] == [QUESTION, first, QUESTION, second]
    assert [message["role"] for message in found[1]] == ["system", "user", "assistant"]
    assert found[1][1]["content"] == "Apart?"
    with pytest.raises(openai.AuthenticationError):
        client_of(served, "another").get("/transcript", cast_to=httpx.Response)


def test_a_request_goes_on_after_each_cut(served):
    """The prefix is computed anew, the tokens stay; greedily they are those without a cut."""
    whole, cut = served.episode(temperature=0.0), served.episode(temperature=0.0)

    def asked_of(episode) -> str:
        create = client_of(served, episode.key).completions.create
        return create(model="policy", prompt="<|user|>", max_tokens=50).choices[0].text

    text = asked_of(whole)
    before = set(served.sampled.requests)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(asked_of, cut)
        while not asked.done():
            seen = served.sampled.runs
            with served.cut():
                pass
            while served.sampled.runs == seen and not asked.done():
                time.sleep(0.001)
    (name,) = set(served.sampled.requests) - before
    assert served.sampled.admitted[name] > 2
    assert asked.result() == text
    one, other = served.batch(whole), served.batch(cut)
    assert one.responses.values.equal(other.responses.values)
    log_probs = one.rollout_log_probs.values, other.rollout_log_probs.values
    assert torch.allclose(*log_probs, atol=1e-4)
    assert other.token_versions.values.equal(torch.zeros_like(other.token_versions.values))


def test_what_cannot_go_on_is_sampled_to_its_end_before_a_cut(served):
    """A penalty counts the tokens of one request of the engine."""
    episode = served.episode(other_sampling=OtherSampling.mask)
    before = set(served.sampled.requests)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(
            chat, client_of(served, episode.key), QUESTION, presence_penalty=0.5, n=4
        )
        while len(new := set(served.sampled.requests) - before) < 4:
            time.sleep(0.001)
        with served.cut():
            assert len(asked.result(10).choices) == 4
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
    assert len(batch) == max(1, len(episode.record.sequences))


def test_with_tools_a_text_without_a_call_is_as_without_them(served):
    """Up to its stop string; a call in it is text where tools are forbidden."""
    policy, episode = served.endpoint.policy, served.episode(temperature=0.0)
    plain, with_tools = (
        chat(client_of(served, episode.key), QUESTION, stop=["pen"], seed=1, **options)
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"})
    )
    assert said(plain) == said(with_tools)
    raw = "I add.<|end|>Observation: 7"
    one = Completion(0, "1", 5, "I add.", raw, "stop", "Observation:", [5], [-1.0])
    for tools in (TOOLS, None):
        message, reason = message_of(policy, episode, one, tools)
        assert (message["content"], reason) == ("I add.", "stop")


def test_a_tool_call_is_parsed_and_rendered_again_as_it_was_sampled(served):
    """Whatever form a client gives the JSON of its arguments."""
    policy, episode = served.endpoint.policy, served.episode()
    raw = 'Well.\n<tool_call>\n{"name": "add",   "arguments": {"b": 4, "a": 3}}\n</tool_call>'
    tokens = [*policy.text.encode(raw, None), served.endpoint.end_token]
    one = Completion(0, "1", 5, raw, raw, "stop", None, tokens, [-1.0] * len(tokens))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    message, reason = message_of(policy, episode, one, tools)
    (call,), plain = message["tool_calls"], {"role": "assistant", "content": "4"}
    assert reason == "tool_calls" and message["content"].strip() == "Well."
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}
    call["function"]["arguments"] = '{"a":3,"b":4}'
    history = [QUESTION, message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    text = rendered(policy, episode, history, tools).text
    assert f"<|assistant|>{raw}<|end|><|tool|>7<|assistant|>" in text
    changed = message | {"content": "Well!"}
    assert raw not in rendered(policy, episode, [QUESTION, changed], tools).text
    for none in (None, []):
        callless = plain | {"tool_calls": none}
        assert rendered(policy, episode, [QUESTION, callless], tools).messages[1] == plain


def test_what_a_parser_cannot_read_is_text_and_one_without_texts_is_refused(served):
    tokenizer, malformed = served.endpoint.policy.text._tokenizer, '<|action_start|><|plugin|>{"a"'
    assert load_parser("internlm", tokenizer)(malformed, TOOLS) == (malformed, [])
    with pytest.raises(ConfigError, match="= openai does not read"):
        load_parser("openai", tokenizer)
    broken = patch("vllm.tool_parsers.hermes_tool_parser.Hermes2ProToolParser.extract_tool_calls")
    with broken as extract, pytest.raises(RuntimeError, match="at any text"):
        extract.side_effect = RuntimeError("at any text")
        load_parser("hermes", tokenizer)


def test_arguments_that_are_no_object_are_text(served):
    policy, episode = served.endpoint.policy, served.episode()
    for arguments in ("[1, 2]", '"3"', "{"):
        raw = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        one = Completion(0, "1", 5, raw, raw, "stop", None, [5], [-1.0])
        assert message_of(policy, episode, one, TOOLS) == (
            {"role": "assistant", "content": raw},
            "stop",
        )
