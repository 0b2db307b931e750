"""Answers to the requests of tinker's SDK, by the primitives of a service."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from hybridrl.service.data import AdamParams, Output, ServiceError
from hybridrl.service.service import Primitives
from hybridrl.service.weights import BASE
from hybridrl.tinker.clients import (
    SAMPLER_WEIGHTS,
    WEIGHTS,
    Clients,
    Model,
    Sampler,
    Served,
    path_of,
    state_of,
)
from hybridrl.tinker.conversion import (
    data_of,
    loss_settings,
    output_message,
    prompt_of,
    refuse_unsupported,
    samples_message,
    sampling_of,
)
from hybridrl.tinker.futures import PROTOBUF, Answer, Results, json_answer, known

# Answers to one prompt in a request.
MOST_SAMPLES = 4096
T = TypeVar("T")


class Numbered(Protocol):
    """A request with a number among those of a model."""

    @property
    def model_id(self) -> str | None:
        """The model's id."""

    @property
    def seq_id(self) -> int | None:
        """The number, from 1 on."""


class Answers:
    """Answers to each kind of request, in the thread of the event loop.

    A training request is checked in its turn, so that one that is refused does not hold up others.
    """

    def __init__(self, service: Primitives, served: Served) -> None:
        self._service, self._served = service, served
        self._clients, self._results = Clients(), Results()
        self.failed = self._results.failed

    async def capabilities(self) -> Answer:
        """Return the model by each of its names."""
        more = {"max_context_length": self._service.longest, "trainable": True, "sampleable": True}
        models = [{"model_name": name, **more} for name in self._served.names]
        return json_answer(supported_models=models)

    async def create_session(self, request: types.CreateSessionRequest) -> Answer:
        """Begin a session."""
        return json_answer(session_id=self._clients.open())

    async def heartbeat(self, request: types.SessionHeartbeatRequest) -> Answer:
        """Note that a client is alive."""
        self._clients.check(request.session_id)
        return json_answer()

    async def finish(self, session: str) -> Answer:
        """End a session and what it has; saved states stay."""
        for model in self._clients.close(session):
            self._results.watched(self._service.delete_model(model.name))
        self._results.drop(session)
        return json_answer()

    async def create_model(self, request: types.CreateModelRequest) -> Answer:
        """Begin a model."""
        self._clients.check(request.session_id)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"

        async def work() -> Answer:
            self._served.check(request.base_model)
            self._served.check_adapters(request)
            await self._begin(model_id, request.base_model)
            return json_answer(model_id=model_id)

        return self._submit(model_id, work)

    async def _begin(self, model_id: str, base_model: str) -> Model:
        for session in self._clients.silent():
            await self.finish(session)
        name = await self._results.done(self._service.create_model())
        self._clients.models[model_id] = model = Model(name, base_model)
        return model

    def _model(self, model_id: str) -> Model:
        return known("model", self._clients.models, model_id)

    async def get_info(self, request: types.GetInfoRequest) -> Answer:
        """Describe a model."""
        name = self._model(request.model_id).base_model
        data = {"model_name": name, "tokenizer_id": self._served.tokenizer}
        adapters = {"is_lora": True, "lora_rank": self._served.lora.rank}
        return json_answer(model_id=request.model_id, model_data=data, **adapters)

    async def forward_backward(self, request: messages.ForwardBackwardRequest) -> Answer:
        """Compute log-probs, and gradients unless only the forward is asked for."""

        def begin(model: str) -> Future[Output]:
            call = self._service.forward if request.forward_only else self._service.forward_backward
            return call(data_of(request), request.loss_fn, loss_settings(request), model=model)

        return self._train(request, begin, lambda output: Answer(output_message(output), PROTOBUF))

    async def optim_step(self, request: types.OptimStepRequest) -> Answer:
        """Take a step of AdamW."""

        def begin(model: str) -> Future[dict[str, float]]:
            if not isinstance(params := request.optim_params, types.AdamParams):
                raise ServiceError(f"optim_params = {params.type}: expected AdamParams")
            return self._service.optim_step(AdamParams(**params.model_dump()), model=model)

        def stepped(metrics: dict[str, float]) -> Answer:  # JSON has no NaN
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return json_answer(metrics=finite)

        return self._train(request, begin, stepped)

    async def save_weights(self, request: types.SaveWeightsRequest) -> Answer:
        """Save a model's weights and moments."""
        return self._save(request, WEIGHTS, request.path)

    async def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> Answer:
        """Save a model's weights for sampling; without a name name the present ones."""
        if request.path is not None:
            return self._save(request, SAMPLER_WEIGHTS, request.path)
        model_id, base_model = request.model_id, self._model(request.model_id).base_model
        sampler_id = f"{model_id.partition(':')[0]}:sample:{request.sampling_session_seq_id}"
        inflight = model_id if request.kind == "inflight" else None

        def named(weights: str) -> Answer:
            sampler = Sampler(base_model, _ready(weights), inflight=inflight)
            self._clients.add_sampler(sampler_id, sampler)
            return json_answer(sampling_session_id=sampler_id)

        def begin(model: str) -> Future[str]:
            return self._service.weights_for_sampling(model=model)

        return self._train(request, begin, named)

    def _save(self, request: Numbered, kind: str, name: str | None) -> Answer:
        def path() -> str:
            return path_of(str(request.model_id), kind, name)

        def begin(model: str) -> Future[Path]:
            return self._service.save_state(state_of(path()), model=model)

        return self._train(request, begin, lambda folder: json_answer(path=path()))

    async def load_weights(self, request: types.LoadWeightsRequest) -> Answer:
        """Load a state into a model, or begin one with it."""

        def begin(model: str) -> Future[None]:
            state = state_of(request.path)
            return self._service.load_state(state, model=model, optimizer=request.optimizer)

        if request.model_id is not None:
            return self._train(request, begin, lambda _: json_answer(path=request.path))
        self._clients.check(request.session_id)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"

        async def work() -> Answer:
            self._state(request.path)
            base = request.base_model or self._served.names[0]
            self._served.check(base)
            model = await self._begin(model_id, base)
            await self._results.done(begin(model.name))
            return json_answer(path=request.path)

        return self._submit(model_id, work)

    async def delete_state(self, path: str) -> Answer:
        """Delete a saved state."""
        await self._results.done(self._service.delete_state(self._state(path)))
        return json_answer()

    async def create_sampler(self, request: types.CreateSamplingSessionRequest) -> Answer:
        """Name weights for sampling: the base model's, or a saved state's."""
        self._clients.check(request.session_id)
        base = request.base_model or self._served.names[0]
        self._served.check(base)
        weights = _ready(BASE)
        if (path := request.model_path) is not None:
            call = self._service.weights_of_state(self._state(path))
            weights = asyncio.ensure_future(self._results.done(call))
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._clients.add_sampler(sampler_id, Sampler(base, weights, path))
        return json_answer(sampling_session_id=sampler_id)

    def _sampler(self, sampler_id: str | None) -> Sampler:
        return known("sampler", self._clients.samplers, str(sampler_id))

    async def get_sampler(self, sampler_id: str) -> Answer:
        """Describe a sampler."""
        one = self._sampler(sampler_id)
        return json_answer(sampler_id=sampler_id, base_model=one.base_model, model_path=one.path)

    async def sample(self, request: types.SampleRequest) -> Answer:
        """Sample answers, and compute the log-probs of the prompt if they are asked for."""
        sampler = self._sampler(request.sampling_session_id)
        if not 1 <= request.num_samples <= MOST_SAMPLES:
            raise ServiceError(f"num_samples = {request.num_samples}: expected 1 to {MOST_SAMPLES}")
        request_id = f"{request.sampling_session_id}:{request.seq_id}"

        async def work() -> Answer:
            refuse_unsupported(request)
            prompt, sampling = prompt_of(request.prompt), sampling_of(request.sampling_params)
            weights, row = await sampler.weights, None
            if request.prompt_logprobs:  # first: samples of several requests then wait together
                row = [math.nan]
                if len(prompt) > 1:
                    call = self._service.log_probs(prompt, weights=weights)
                    log_probs = await self._results.done(call)
                    row += log_probs
                if (last := request.prompt_logprobs_last_n) is not None:
                    row[:-last] = [math.nan] * len(row[:-last])
            count = request.num_samples
            sampled = self._service.sample(prompt, count, sampling, weights=weights)
            samples = await self._results.done(sampled)
            return Answer(samples_message(samples, row), PROTOBUF)

        names = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return self._submit(request_id, work, sample_sequence_ids=names)

    async def retrieve(self, request: types.FutureRetrieveRequest) -> Answer:
        """Return a result."""
        return await self._results.poll(request.request_id)

    def _state(self, path: str) -> str:
        if (state := state_of(path)) not in self._service.states():
            raise ServiceError(f"path = {path}: there is no such state in {self._service.folder}")
        return state

    def _train(
        self,
        request: Numbered,
        begin: Callable[[str], "Future[T]"],
        answer: Callable[[T], Answer],
    ) -> Answer:
        """Submit a call for a model, which gets the model's name in the service, in its turn."""
        model, number = self._model(str(request.model_id)), request.seq_id or 0

        async def work() -> Answer:
            call = await model.turns.begin(number, lambda: begin(model.name))
            return answer(await self._results.done(call))

        return self._submit(f"{request.model_id}:{number}", work)

    def _submit(
        self, request_id: str, work: Callable[[], Awaitable[Answer]], **fields: object
    ) -> Answer:
        self._results.submit(request_id, work)
        return json_answer(request_id=request_id, **fields)


def _ready(weights: str) -> "asyncio.Future[str]":
    """Return a future with a name of weights."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result(weights)
    return future
