"""Samples of a service: requests to live engines, and answers that end at texts."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from numbers import Integral
from threading import Thread
from typing import Any

from hybridrl.config.schema import RolloutConfig
from hybridrl.controller.live_engines import LiveEngines
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.requests import STOP, Request, SamplingParams
from hybridrl.data.seeds import derive_seed
from hybridrl.service.calls import Asked, Call
from hybridrl.service.data import Sample, Sampling, ServiceError

# Highest temperature of vLLM.
HOTTEST = 2
EXPECTED = {
    "temperature": f"a number from 0 to {HOTTEST}",
    "top_p": "a number above 0, at most 1",
    "seed": "a whole number, or None",
    "stop": "texts that are not empty, and token ids",
    **dict.fromkeys(("num_samples", "max_tokens", "top_k"), "a whole number above 0"),
}
# Tokens of a character, at most; byte-level tokens may be parts of one.
TOKENS_PER_CHARACTER = 4


class Samples:
    """Sampling of a service by live engines.

    Args:
        decode: returns the text of tokens.
    """

    def __init__(
        self, rollout: WorkerGroup, config: RolloutConfig, decode: Callable[[list[int]], str]
    ) -> None:
        self._engines, self._decode = LiveEngines(rollout), decode
        self._longest = config.max_prompt_tokens + config.max_response_tokens
        self._seed, self._count = config.seed, 0
        self._open: dict[Future[Any], asyncio.Task[None]] = {}
        self._load = [0] * rollout.num_shards  # open requests of each engine
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="service samples", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for calls that can join; called in any thread."""
        self._engines.wake()

    def serve(self, first: Call, joining: Callable[[], list[Call]]) -> None:
        """Sample for a call and for those that join, until none is open.

        Raises:
            WorkerError: a rank failed; all open calls get the error.
        """

        waiting = [first]

        def is_enough() -> bool:
            for call in [*waiting, *joining()]:
                self._open[call.future] = asyncio.create_task(self._answer(call))
            waiting.clear()
            return not self._open

        try:
            self._engines.run(is_enough, self._loop)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End the calls that are open, so that `serve` returns."""

        async def fail() -> None:
            for future, task in [*self._open.items()]:
                task.cancel()
                if not future.done():
                    future.set_exception(error)
            self._open.clear()

        asyncio.run_coroutine_threadsafe(fail(), self._loop).result()
        self._engines.wake()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, call: Call) -> None:
        assert isinstance(call.work, Asked)
        try:
            requests = self._requests(call.work)
            texts = [one for one in call.work.sampling.stop if isinstance(one, str)]
            samples = await asyncio.gather(*(self._sampled(one, texts) for one in requests))
            if not call.future.done():
                call.future.set_result(samples)
        except Exception as error:  # of this call alone
            if not call.future.done():
                call.future.set_exception(error)
        finally:
            self._open.pop(call.future, None)
            self._engines.wake()

    def _requests(self, asked: Asked) -> list[Request]:
        """Return the requests of a call, all to the engine with the fewest open ones."""
        sampling, room = asked.sampling, self._longest - len(asked.prompt)
        if not 0 < room < self._longest:
            raise ServiceError(
                f"the prompt has {len(asked.prompt)} tokens, expected 1 to {self._longest - 1}: "
                f"prompt and answer have at most {self._longest}"
            )
        engine = self._load.index(min(self._load))
        self._load[engine] += asked.count
        self._count += 1
        own = ("service", self._count) if sampling.seed is None else ("seed", sampling.seed)
        is_cut = any(isinstance(one, str) for one in sampling.stop)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(one for one in sampling.stop if isinstance(one, int)),
        )
        return [
            Request(
                request_id=f"{self._count}-{index}",
                prompt=[*asked.prompt],
                seed=derive_seed(self._seed, *own, index),
                max_tokens=min(sampling.max_tokens or room, room),
                params=params,
                engine=engine,
                in_pieces=is_cut,
            )
            for index in range(asked.count)
        ]

    async def _sampled(self, request: Request, stop: Sequence[str]) -> Sample:
        """Sample one answer, to its end or the first of the texts `stop`."""
        tokens: list[int] = []
        log_probs: list[float] = []
        queue = self._engines.submit(request)
        try:
            while True:
                new = await queue.get()
                seen = len(tokens)
                tokens += new.tokens
                log_probs += new.log_probs
                if (end := self._end(tokens, seen, stop)) is not None:
                    return Sample(tokens[:end], log_probs[:end], "stop")
                if new.reason:
                    return Sample(tokens, log_probs, "stop" if new.reason == STOP else "length")
        finally:
            self._load[request.engine] -= 1
            self._engines.cancel(request)

    def _end(self, tokens: list[int], seen: int, stop: Sequence[str]) -> int | None:
        """Return the number of tokens up to the end of the first text; None: there is none."""
        if not stop:
            return None
        start = max(0, seen - TOKENS_PER_CHARACTER * max(map(len, stop)))
        for end in range(seen + 1, len(tokens) + 1):
            text = self._decode(tokens[start:end])
            if any(one in text for one in stop):
                return end
        return None


def checked(sampling: Sampling, count: int) -> Sampling:
    """Return how a call samples, with numbers of Python.

    Raises:
        ServiceError: names the first value that cannot be.
    """
    top_k, longest = sampling.top_k, sampling.max_tokens
    right = {
        "num_samples": _is_count(count),
        "max_tokens": longest is None or _is_count(longest),
        "temperature": 0 <= sampling.temperature <= HOTTEST,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": top_k is None or _is_count(top_k),
        "seed": sampling.seed is None or isinstance(sampling.seed, Integral),
        "stop": all(isinstance(one, str | Integral) and one != "" for one in sampling.stop),
    }
    values = {**sampling._asdict(), "num_samples": count}
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise ServiceError(f"{wrong[0]} = {values[wrong[0]]!r}: expected {EXPECTED[wrong[0]]}")
    return sampling._replace(
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        max_tokens=None if longest is None else int(longest),
        top_k=None if top_k is None else int(top_k),
        seed=None if sampling.seed is None else int(sampling.seed),
        stop=tuple(one if isinstance(one, str) else int(one) for one in sampling.stop),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1
