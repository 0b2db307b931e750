"""Environments with every kind of bad manners; imported by the processes that step them."""

import os
import time
from contextlib import suppress

from hybridrl.environments.base import StepResult


class Counts:
    """Answers turn k with "k:" and the turn's text, rewards it with k, ends after `turns`."""

    def __init__(self, example, turns):
        self.turn = 0
        self.turns = turns
        self.greeting = example["greeting"]

    def reset(self):
        return self.greeting

    def step(self, text):
        self.turn += 1
        return StepResult(f"{self.turn}:{text}", float(self.turn), self.turn == self.turns)


def make_counts(example, **args):
    """A function that makes environments."""
    return Counts(example, **args)


class Misbehaves:
    """Does what the turn's text says."""

    def __init__(self, example):
        self.example = example
        if example.get("fails") == "init":
            raise ValueError("no such example")

    def reset(self):
        return 7 if self.example.get("fails") == "reset" else self.example.get("greeting", "")

    def step(self, text):
        if text == "raises":
            raise ValueError("no such tool")
        if text == "sleeps":
            time.sleep(600)
        if text == "process":
            return StepResult(str(os.getpid()), 1.0, False)
        if text == "dies":
            os._exit(3)
        if text == "unpicklable":
            self.held = lambda: None
        if text == "surrogate":
            return StepResult("caf\ud800 \U0001f600", 1.0, False)
        if text == "raises_surrogate":
            raise ValueError("\udfff")
        if text == "garbles":
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2:
                    with suppress(OSError):
                        os.write(fd, bytes(16))
        rewards = {"nan": float("nan"), "text": "1", "large": 1.7e308, "low": -1e39}
        reward = rewards.get(text, 1.0)
        if text == "tuple":
            return "", 1.0, False
        return StepResult(3 if text == "number" else "fine", reward, 1 if text == "one" else False)


class NoStep:
    """Half an environment."""

    def reset(self):
        return ""


NOT_CALLABLE = 3
