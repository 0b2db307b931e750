"""Rewards as users write them for verl, TRL and hybridrl, for test_signatures.py and others."""

import asyncio
import os
import time
from typing import Any

from hybridrl.rewards.base import Score


def own(prompt, response, example, bonus=0.0):
    return float(response == example["answer"]) + bonus


async def own_later(prompt, response, example):
    await asyncio.sleep(0.2)
    return Score(float(response == example["answer"]), {"length": len(response)})


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    correct = solution_str == ground_truth
    return {"score": float(correct), "acc": correct, "pred": solution_str, "known": len(extra_info)}


def verl_source(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source)


def verl_short(solution_str, ground_truth, bonus=0.0):
    """Like verl's own functions for one data set."""
    return bonus + (solution_str == ground_truth)


async def verl_later(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0.01)
    return {"score": 2.0 * (solution_str == ground_truth)}


def verl_without_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def trl_score(prompts, completions, answer, **kwargs):
    kwargs["log_metric"]("anything", 1.0)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def trl_chat(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]


def trl_best(prompts, completions, **kwargs):
    """1 for the longest of the completions that it gets together."""
    assert len(set(prompts)) == 1
    return [float(len(text) == max(map(len, completions))) for text in completions]


def trl_ids(completion_ids, trainer_state=None, **kwargs):
    return [float(sum(ids)) for ids in completion_ids]


def trl_some(completions, **kwargs):
    return [None if text == "skip" else 1.0 for text in completions]


def trl_fails(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("a bad one")
    return [float(len(completions))] * len(completions)


def trl_no_list(completions, **kwargs):
    return 1.0


def trl_too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


async def trl_later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def openrlhf(queries, prompts, labels):
    return 0.0


def anything(*given):
    return 0.5


def keywords(**given):
    return 0.5


def renamed(p, r, e):
    return 0.5


class Caller:
    async def __call__(self, prompt, response, example):
        return 3.0


called = Caller()


async def misbehave_later(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Do what the response names, after others may have begun."""
    await asyncio.sleep(0.05)
    match response.split()[0]:
        case "raises":
            raise ValueError("no such unit")
        case "exits":
            raise SystemExit(0)
        case "cancels":
            raise asyncio.CancelledError
        case "times_out":
            raise TimeoutError("of its own")
        case "waits":
            await asyncio.sleep(600)
        case "blocks":
            time.sleep(600)
        case "swallows":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        case "dies":
            os._exit(3)
        case "threads":
            await asyncio.to_thread(time.sleep, 0.1)
    return 1.0


async def sleepy(prompt, response, example, seconds):
    await asyncio.sleep(seconds)
    return float(response)


def used_up(prompt, response, example):
    return example["left"].pop()


async def used_up_later(prompt, response, example):
    return used_up(prompt, response, example)
