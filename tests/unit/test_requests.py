"""Requests: dealt to engines and back; what an engine gets is what was sent; messages."""

import pickle
from dataclasses import replace

import pytest
import torch

from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.requests import (
    ANY,
    Request,
    Requests,
    SamplingParams,
    decode_message,
    encode,
)
from hybridrl.data.seeds import sample_seed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.sampling.source import Generation
from tests.support.fake_engine import CONFIG, FakeEngines

PARAMS = SamplingParams(0.5, 0.9, 3, (7, 8))


def wanted(lengths: list[int], **more) -> Wanted:
    """Prompts of these lengths, with ids from 0 on, two responses each."""
    prompts = [Prompt(k, [0] * length, "", "", {}, {}) for k, length in enumerate(lengths)]
    return Wanted(prompts, 1, PARAMS, 2, **more)


def spelled(request: Request) -> list[int]:
    """Responses that spell 10 * prompt_id + sample."""
    _, number, sample = map(int, request.request_id.split("-"))
    return [10 * number + sample]


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
@pytest.mark.parametrize("expected", [None, [7.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0]])
def test_dealt_prompts_come_back_in_order(engines, expected):
    lengths = [1, 9, 4, 4, 2, 30, 7]
    requests = wanted(lengths, expected_tokens=expected).requests(CONFIG)
    parts = requests.shard(engines)
    assert {len(part) for part in parts} <= {2 * (7 // engines), 2 * (7 // engines + 1)}
    joined = FakeEngines(spelled, engines).generate(requests)
    assert joined.responses.values.tolist() == [10 * i + k for i in range(7) for k in range(2)]
    assert joined.prompts.lengths.tolist() == [length for length in lengths for _ in range(2)]
    assert joined.group_id.tolist() == [i for i in range(7) for _ in range(2)]
    assert [engine.tokens for engine in joined.engines] == [len(part) for part in parts]
    for engine, part in enumerate(parts):
        rows = torch.isin(joined.group_id, part.group_id)
        assert (joined.engine[rows] == engine).all() and rows.sum() == len(part)


def test_prompts_are_dealt_by_expected_tokens():
    """Greedy, longest first: 9 | 8, 7 to the second, 2 to the first."""
    asked = wanted([50, 1, 1, 1], expected_tokens=[2.0, 9.0, 7.0, 8.0])
    first, second = asked.requests(CONFIG).shard(2)
    assert (first.group_id.tolist(), second.group_id.tolist()) == ([1, 1, 0, 0], [3, 3, 2, 2])
    assert asked.engines(2) == [0, 0, 1, 1]


def test_engines_begin_with_what_the_source_expects_to_cost_most():
    """A source's own cost stands before known lengths, by which prompt 2 is the first."""
    lengths, begun = ResponseLengths(), list[str]()
    lengths.learn(range(3), [1, 1, 90])

    def script(request: Request) -> list[int]:
        begun.append(request.request_id)
        return spelled(request)

    engines = FakeEngines(script)
    generate = Generation(lambda asked: engines.generate(asked.requests(CONFIG)), engines, lengths)
    for cost, first in ((None, "1-2-0"), ([1.0, 3.0, 2.0], "1-1-0")):
        begun.clear()
        generate(wanted([1, 1, 1], expected_tokens=cost))
        assert begun[0] == first


def test_long_answers_are_spread_over_engines():
    """Prompts 0 and 1 are known to be answered at length, 2 and 3 in few words."""
    lengths = ResponseLengths()
    lengths.learn(range(4), [90, 80, 2, 3])
    asked = replace(wanted([1, 1, 5, 6]), each=1).balanced(lengths)
    dealt = [part.group_id.tolist() for part in asked.requests(CONFIG).shard(2)]
    assert dealt == [[0, 2], [1, 3]]


def test_conversations_stay_on_their_engines():
    requests = [
        Request(f"1-{k}-0", [0] * length, 20 + k, 7 + k, PARAMS, engine, must_finish=k == 2)
        for k, (length, engine) in enumerate([(3, 2), (1, 0), (2, 2), (5, 0)])
    ]
    batch = Requests(requests, torch.arange(4), token_budget=9.0)
    parts = [pickle.loads(pickle.dumps(part)) for part in batch.shard(3)]
    assert [part.group_id.tolist() for part in parts] == [[1, 3], [], [0, 2]]
    for part, rows in zip(parts, ([1, 3], [], [0, 2]), strict=True):
        assert part.requests == [requests[row]._replace(engine=ANY) for row in rows]
        assert part.token_budget == 9.0
    joined = FakeEngines(spelled, 3).generate(batch)
    assert joined.responses.values.tolist() == [0, 10, 20, 30]
    assert joined.engine.tolist() == [2, 0, 2, 0]


def test_a_prompt_that_responses_share_travels_once():
    requests = wanted([1000, 1000], first=3).requests(CONFIG)
    (piece,) = requests.pieces(1)[0]
    assert len(pickle.dumps(piece(), protocol=5)) < 1.2 * 2 * 1000 * 4
    assert [one.seed for one in requests.requests] == [
        sample_seed(CONFIG.seed, 1, number, sample) for number in (0, 1) for sample in (3, 4)
    ]


def test_a_live_request_survives_its_message():
    more = {"logit_bias": {3: -1.5}, "structured_outputs": {"json": {"type": "object"}}}
    params = SamplingParams(0.1, stop_token_ids=(4,), more=more)
    request = Request("live-1", [1, 2], 2**63 - 1, 9, params, 1, True, True)
    for message in (request, "live-1", None):
        assert decode_message(encode(message)) == message
