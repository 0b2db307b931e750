"""vLLM as a rollout engine on one rank: what it samples, what sleeps when, what its log says.

What needs a reshard or tensor parallelism stands in test_reshard_equality.py. On a CPU sleeping
parts only count as gone: tests/ranks/test_rollout_gpu.py looks at the memory.
"""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import DType, SleepMode
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Generate, Requests
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.rollout.engine import EnginePart
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.vllm.engine import VLLMEngine
from tests.support.code_in_checkpoints import bring_code
from tests.support.held_requests import in_parts, joined, over_a_change
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import (
    MAX_PROMPT,
    MAX_RESPONSE,
    Case,
    error_of,
    prompts,
    rollout_config,
    write_folders,
)
from tests.support.scheduler_runs import CASES, PAIRS, assert_same, both_ways, ends, vllms_own

# An engine that is collected takes the process group with it.
KEPT: list[VLLMEngine] = []


class Lines(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def look(folder: Path) -> dict[str, Any]:
    """What an engine with the folder's weights shows; its config decides what sleeps."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    log = Lines()
    logging.getLogger("hybridrl.rollout").addHandler(log)
    logging.getLogger("hybridrl.rollout").setLevel(logging.INFO)
    config = rollout_config(Case("qwen2", DType.float32, tp=1), folder)
    engine = VLLMEngine(config, folder, stop_token_ids(folder), "cpu")
    KEPT.append(engine)
    generate = partial(Sampler(engine, config).generate, version=0)
    seen: dict[str, Any] = {"log": log.lines, "built": engine.awake}
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    engine.wake(EnginePart.WEIGHTS)
    engine._model.load_weights(weights.items())
    seen["half"] = error_of(lambda: generate(prompts()))
    engine.wake(EnginePart.KV_CACHE)
    seen["first"] = generate(prompts())
    seen["nothing"] = generate(prompts(count=0))
    seen["turns"] = in_turns(generate)
    seen["budget"] = with_budget(engine, generate)
    seen["long"] = error_of(lambda: generate(longest(MAX_RESPONSE)))
    seen["schedulers"] = both_ways(engine, generate)
    seen["ends"] = {
        (case, most): ends(engine, *case, most) for case in [*CASES, PAIRS] for most in (1, 7)
    }
    seen["multi_step"] = in_several_steps(engine, generate)
    seen["plain"] = plain_generate(engine, folder)
    for mode in (SleepMode.none, SleepMode.kv_cache, SleepMode.all):
        config.sleep = mode
        engine.sleep()
        seen[f"asleep_{mode}"] = engine.awake
        seen[f"error_{mode}"] = error_of(lambda: generate(prompts()))
        engine.sleep()
        for part in EnginePart:
            engine.wake(part)
        engine.sync()
        seen[f"after_{mode}"] = generate(prompts())
    seen["held"] = in_parts(engine)
    other = AutoModelForCausalLM.from_pretrained(folder.parent / "B", dtype=torch.float32)
    seen["changed"] = over_a_change(engine, other.state_dict())
    return seen


def in_several_steps(engine: VLLMEngine, generate: Generate) -> dict[str, Any]:
    """Responses with up to five steps of a submission, and the steps of each."""
    multi_step, steps = engine._steps._multi_step, []
    submit = multi_step.submit

    def note(scheduled: Any, requests: Any, count: int) -> None:
        steps.append(count)
        submit(scheduled, requests, count)

    with patch.object(engine, "_most_steps", 5), patch.object(multi_step, "submit", note):
        engine.sync()
        found = {"first": generate(prompts()), "steps": steps, "turns": in_turns(generate)}
        rows = [[length] * length for length in (10, 16, 117, 122)]
        return found | {"blocks": generate(prompts(rows=rows)).responses.values}


def longest(max_tokens: int) -> Requests:
    """A prompt that leaves no more than five tokens of the context."""
    return prompts(rows=[[1] * (MAX_PROMPT + MAX_RESPONSE - 5)], max_tokens=max_tokens, each=1)


def in_turns(generate: Generate) -> dict[str, Any]:
    """Greedy responses at once and in two parts, and sampled ones cut by length and token."""
    greedy = prompts(temperature=0.0, each=1)
    whole = generate(greedy)
    first = generate(prompts(temperature=0.0, each=1, max_tokens=[3, 4, 5]))
    pairs = zip(greedy.requests, first.responses.rows(), strict=True)
    grown = [request.prompt + row.tolist() for request, row in pairs]
    rest = [MAX_RESPONSE - count for count in (3, 4, 5)]
    second = generate(prompts(temperature=0.0, each=1, rows=grown, max_tokens=rest))
    stop = int(whole.responses.rows()[2][6])
    stopped = generate(prompts(temperature=0.0, each=1, stop=(stop,)))
    return {
        "whole": whole,
        "parts": (first, second),
        "most_probable": generate(prompts(each=1, top_k=1)),
        "stop": stop,
        "stopped": stopped,
        "to_the_end": generate(longest(5)),
    }


def with_budget(engine: VLLMEngine, generate: Generate) -> dict[str, Any]:
    """Responses at once, and cut by a budget of which the second takes no notice; then at once."""
    request = prompts(each=1)
    whole = generate(request)
    cut = generate(prompts(each=1, token_budget=2.5, must_finish=[False, True, False]))
    early = generate(replace(request, token_budget=2.5))
    engine.sync()
    return {"whole": whole, "cut": cut, "early": early, "again": generate(request)}


def plain_generate(engine: VLLMEngine, folder: Path) -> list[Any]:
    """The same responses by the method that vLLM's users call."""
    from vllm import SamplingParams, TokensPrompt

    requests = prompts().requests
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=MAX_RESPONSE,
            stop_token_ids=stop_token_ids(folder),
            seed=one.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for one in requests
    ]
    inputs = [TokensPrompt(prompt_token_ids=one.prompt) for one in requests]
    with vllms_own(engine):
        outputs = [done.outputs[0] for done in engine._llm.generate(inputs, params, use_tqdm=False)]
    return [(list(o.token_ids), o.logprobs.logprobs, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_folders(root, ["qwen2"])
    folder = root / "qwen2" / "A"
    marker = bring_code(folder)
    return run_on_ranks(look, 1, folder)[0] | {"code_has_run": marker.exists()}


def test_code_in_the_models_folder_is_not_run(seen):
    """Neither by vLLM nor by transformers, though both configs point to it."""
    assert not seen["code_has_run"]


def test_same_tokens_and_log_probs_as_vllm_generate(seen):
    ours = seen["first"]
    for index, (tokens, log_probs, reason) in enumerate(seen["plain"]):
        assert ours.responses.rows()[index].tolist() == tokens
        torch.testing.assert_close(
            ours.rollout_log_probs.rows()[index], torch.tensor(log_probs), rtol=0, atol=1e-5
        )
        assert bool(ours.truncated[index]) == (reason == "length")


def test_the_scheduler_does_what_vllms_own_does(seen):
    """Which looks at every sequence with each token."""
    assert_same(seen["schedulers"])


def test_several_steps_at_once_sample_the_same(seen):
    """Wherever responses end, and over the ends of blocks of the cache."""
    several = seen["multi_step"]
    steps = several["steps"]
    assert max(steps) == 5 and min(steps) < 5
    assert_equal(several["first"], seen["first"])
    for name in ("whole", "most_probable", "stopped", "to_the_end"):
        assert_equal(several["turns"][name], seen["turns"][name])
    assert torch.equal(several["blocks"], seen["schedulers"][0]["generated"]["tokens"])


def assert_equal(one: RolloutBatch, other: RolloutBatch) -> None:
    """Compare tokens, log-probs and ends."""
    assert torch.equal(one.responses.values, other.responses.values)
    assert torch.equal(one.responses.lengths, other.responses.lengths)
    assert torch.equal(one.truncated, other.truncated)
    log_probs = one.rollout_log_probs.values, other.rollout_log_probs.values
    torch.testing.assert_close(*log_probs, rtol=0, atol=1e-5)


def test_requests_that_come_and_go_get_the_same_tokens_from_several_steps(seen):
    """With a step or submission queued behind another, too, as on a GPU.

    Where all places are taken, also beside requests that wait for one.
    """
    for depth, scarce in [*CASES, PAIRS]:
        one, several = (seen["ends"][(depth, scarce), most] for most in (1, 7))
        assert several["submitted"] > 30 and one["submitted"] == 0
        assert one["ended"] == several["ended"] and len(one["ended"]) > 100
        assert bool(several["preempted"]) == (scarce == "blocks")
        assert several["beside"] > 30 or scarce == "blocks"
    pairs, places = (seen["ends"][case, 7]["beside"] for case in (PAIRS, (2, "places")))
    assert pairs > 2 * places  # more waits for longer


def test_an_engine_without_prompts_returns_nothing(seen):
    """A round of resampling may have fewer prompts than there are engines."""
    assert len(seen["nothing"].responses) == len(seen["nothing"].rollout_log_probs) == 0
    assert seen["nothing"].truncated.tolist() == []


def test_the_one_most_probable_token_is_the_greedy_one(seen):
    turns = seen["turns"]
    assert torch.equal(turns["most_probable"].responses.values, turns["whole"].responses.values)


def test_a_response_in_two_parts_is_the_response(seen):
    """Tokens and log-probs, whatever of the first part is cached."""
    whole, (first, second) = seen["turns"]["whole"], seen["turns"]["parts"]
    assert first.responses.lengths.tolist() == [3, 4, 5] and first.truncated.all()
    for field in ("responses", "rollout_log_probs"):
        rows = zip(vars(first)[field].rows(), vars(second)[field].rows(), strict=True)
        joined = torch.cat([torch.cat(row) for row in rows])
        torch.testing.assert_close(joined, vars(whole)[field].values, rtol=0, atol=1e-5)
    assert torch.equal(whole.truncated, second.truncated)


def test_a_response_ends_at_a_further_stop_token_and_keeps_it(seen):
    turns = seen["turns"]
    for whole, stopped, cut, log_probs in zip(
        turns["whole"].responses.rows(),
        turns["stopped"].responses.rows(),
        turns["stopped"].truncated,
        turns["stopped"].rollout_log_probs.rows(),
        strict=True,
    ):
        tokens = whole.tolist()
        end = tokens.index(turns["stop"]) + 1 if turns["stop"] in tokens else len(tokens)
        assert stopped.tolist() == tokens[:end] and len(log_probs) == end
        assert not (cut and turns["stop"] in tokens)


def test_a_budget_ends_responses_but_those_that_must_finish(seen):
    whole, cut, early, again = (seen["budget"][name] for name in ("whole", "cut", "early", "again"))
    assert not whole.unfinished.any()
    assert not cut.unfinished[1] and early.unfinished.all() and not early.truncated.any()
    assert cut.responses.lengths[1] == whole.responses.lengths[1]
    assert early.responses.lengths.tolist() == [3, 3, 3]  # decoded together, 7.5 tokens in all
    for part in (cut, early, again):
        for field in ("responses", "rollout_log_probs"):
            rows = zip(vars(part)[field].rows(), vars(whole)[field].rows(), strict=True)
            for row, other in rows:
                torch.testing.assert_close(row, other[: len(row)], rtol=0, atol=1e-5)
    assert torch.equal(again.responses.lengths, whole.responses.lengths)


def test_a_held_response_is_the_response(seen):
    """It keeps its place in the random stream, whatever the seeds of later calls."""
    whole, parts = seen["held"]["whole"], seen["held"]["parts"]
    old = [part.engines[0].old_kv_tokens > 0 for _, part in parts]
    assert len(parts) > 2 and old == [False, True, True, True]
    for field in ("responses", "rollout_log_probs"):
        for row, other in zip(joined(parts, field), vars(whole)[field].rows(), strict=True):
            torch.testing.assert_close(row, other, rtol=0, atol=1e-5)


def test_only_held_responses_see_keys_and_values_of_earlier_weights(seen):
    """The new response's prompt is longer than a block, which the prefix cache has of them."""
    mixed, anew = (seen["changed"][name].rollout_log_probs.rows() for name in ("mixed", "anew"))
    for row, other in zip(mixed[:3], anew[:3], strict=True):
        assert abs(row[0] - other[0]) > 1e-3
    torch.testing.assert_close(mixed[3], anew[3], rtol=0, atol=1e-5)
    held = int(seen["changed"]["mixed"].responses.lengths[:3].sum())
    old = [seen["changed"][name].engines[0].old_kv_tokens for name in ("mixed", "anew")]
    assert old == [held, 0]
    assert not seen["changed"]["open"]


def test_a_conversation_may_fill_the_context_but_not_exceed_it(seen):
    assert 1 <= int(seen["turns"]["to_the_end"].responses.lengths) <= 5
    assert (
        f"max_prompt_tokens={MAX_PROMPT}, but the prompt of response 1-40-0 has 151" in seen["long"]
    )


def test_the_first_token_comes_before_the_last(seen):
    (stats,) = seen["first"].engines
    assert 0 < stats.first_token_s < stats.seconds


def test_what_sleeps_is_what_the_config_names(seen):
    weights, cache = EnginePart
    assert seen["built"] == frozenset()  # rollout.sleep = all
    assert seen["asleep_none"] == {weights, cache}
    assert seen["asleep_kv_cache"] == {weights}
    assert seen["asleep_all"] == frozenset()


def test_an_engine_that_sleeps_in_part_refuses_to_generate(seen):
    assert "asleep" in seen["half"]
    assert "asleep" in seen["error_kv_cache"]
    assert "asleep" in seen["error_all"]
    assert seen["error_none"] == ""


@pytest.mark.parametrize("mode", SleepMode)
def test_the_same_weights_sample_the_same_after_sleep(seen, mode):
    """On a CPU weights outlive every mode; requests of earlier calls are not mixed in."""
    assert torch.equal(seen[f"after_{mode}"].responses.values, seen["first"].responses.values)


def test_the_log_says_what_the_start_consisted_of(seen):
    (line,) = [line for line in seen["log"] if line.startswith("vLLM started in")]
    for part in ("imports", "device", "model", "KV cache", "warm-up", "first sampling", "rest"):
        assert f"{part} " in line
