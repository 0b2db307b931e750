"""Primitives over actor and engines: gradients, optimizer steps, samples, saved states."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Self

import torch

from hybridrl.algorithms.primitive_losses import Settings, fields_of, loss_of, loss_sum
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule, update_sizes
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.service.calls import Asked, Call, Calls
from hybridrl.service.data import (
    AdamParams,
    Datum,
    Output,
    Sample,
    Sampling,
    ServiceError,
    batch_of,
    check,
)
from hybridrl.service.sampling import Samples, checked
from hybridrl.service.states import States
from hybridrl.service.weights import BASE, ServedWeights
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine

# The first model.
FIRST = "model-1"
# Of each datum's log-probs, [N] with graph: the value to minimise, and metrics.
CustomLoss = Callable[[Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


class Primitives:
    """Models that are trained and sampled by calls, which are done in their order.

    Each method returns a future, so that the next calls can wait while one is done. A call that is
    at fault itself gets a ServiceError. Any other failure ends the service.

    Args:
        workers: rollout, actor (of class PrimitiveActor) and saver.
        folder: of the run; saved states are below.

    Attributes:
        longest: tokens of a datum, and of a prompt and its answer, at most.
        tokenizer: of the model.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        workers: Mapping[str, WorkerGroup],
        folder: Path,
    ) -> None:
        self.config, self.folder = config, folder
        self.longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
        self._shape = shape
        self._actor = workers["actor"]
        self._states = States(config, workers["saver"], folder)
        self._sizes = update_sizes(config.actor, self._actor.num_shards, shape)
        engine = HybridEngine(workers["rollout"], config.fsdp.offload)
        self._weights = ServedWeights(self._actor, engine, has_adapters=config.lora is not None)
        self.tokenizer = load_tokenizer(config.model)
        self._samples = Samples(workers["rollout"], config.rollout, self.tokenizer.decode)
        self._numbers = count(1)
        self._calls = Calls(self._sample, self._samples.wake)

    def create_model(self) -> Future[str]:
        """Begin a model, with the base model's weights and new adapters; return its name."""
        name = f"model-{next(self._numbers)}"

        def create() -> str:
            self._weights.create(name)
            return name

        return self._calls.add(create)

    def delete_model(self, model: str = FIRST) -> Future[None]:
        """End a model."""
        return self._calls.add(lambda: self._weights.delete(model))

    def forward(
        self,
        data: Sequence[Datum],
        loss: str | None = None,
        settings: Mapping[str, float] | None = None,
        *,
        model: str = FIRST,
    ) -> Future[Output]:
        """Compute the log-probs of each datum's targets; with a loss its sum, too."""
        if loss is not None:
            return self._add(data, loss, settings, model, lambda scheduled, _: self._run(scheduled))
        plain = self._plain(data)

        def compute() -> Output:
            self._weights.begin(model)
            return Output(self._forward(plain), {})

        return self._calls.add(compute)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str | CustomLoss = "cross_entropy",
        settings: Mapping[str, float] | None = None,
        *,
        model: str = FIRST,
    ) -> Future[Output]:
        """Add the gradient of a loss (algorithms/primitive_losses.py) to a model's.

        Gradients add up until `optim_step`. The loss is a sum over tokens; its value is the metric
        loss:sum. A function takes the log-probs of all data; it costs one more forward.
        """
        if not isinstance(loss, str):
            return self._calls.add(partial(self._custom, [*data], loss, model))
        return self._add(data, loss, settings, model, partial(self._backward, loss))

    def _add(
        self,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float] | None,
        model: str,
        run: Callable[[ScheduledBatch, Settings], Ragged],
    ) -> Future[Output]:
        """Add a call that runs a model on data; its result is with the sum of a loss."""
        try:
            kind, whole = loss_of(loss, settings or {})
        except ValueError as error:
            raise ServiceError(str(error)) from error
        data = self._checked(data, kind.inputs)

        def compute() -> Output:
            self._weights.begin(model)
            scheduled = self._scheduled(data, kind.inputs)
            log_probs = run(scheduled, whole)
            total = loss_sum(kind, whole, log_probs.values, fields_of(kind, scheduled.batch))
            return Output(self._rows(log_probs, data), {"loss:sum": float(total)})

        return self._calls.add(compute)

    def _custom(self, data: Sequence[Datum], loss: CustomLoss, model: str) -> Output:
        """Add the gradient of a function of log-probs: a sum over tokens, weighted by it."""
        plain = self._plain(data)
        self._weights.begin(model)
        rows = self._forward(plain)
        log_probs = [torch.tensor(row, requires_grad=True) for row in rows]
        try:
            value, metrics = loss(data, log_probs)
            metrics = {**metrics, "loss:sum": float(value.detach())}
            gradients = torch.autograd.grad(value, log_probs, materialize_grads=True)
        except Exception as error:  # of the caller's function
            raise ServiceError(f"the loss raised {type(error).__name__}: {error}") from error
        weighted = [
            Datum(one.tokens, one.targets, {"weights": (-gradient).tolist()})
            for one, gradient in zip(data, gradients, strict=True)
        ]
        scheduled = self._scheduled(self._checked(weighted, ["weights"]), ["weights"])
        self._backward("cross_entropy", scheduled, {})
        return Output(rows, metrics)

    def _backward(self, loss: str, scheduled: ScheduledBatch, settings: Settings) -> Ragged:
        """Add a gradient to that of the model on the device; return log-probs."""
        log_probs: Ragged = self._actor.call("forward_backward", scheduled, loss, settings)
        self._weights.add_gradients()
        return log_probs

    def optim_step(self, params: AdamParams, *, model: str = FIRST) -> Future[dict[str, float]]:
        """Take an AdamW step with a model's gradients; return their norm, and 1 if skipped.

        A step whose gradients are not finite is skipped.
        """

        def step() -> dict[str, float]:
            self._weights.begin(model)
            if not self._weights.has_gradients(model):
                raise ServiceError("optim_step: there is no gradient.\nCall forward_backward first")
            lr, betas = params.learning_rate, (params.beta1, params.beta2)
            rest = params.eps, params.weight_decay, params.grad_clip_norm
            metrics: dict[str, float] = self._actor.call("optim_step", lr, betas, *rest)
            self._weights.change()
            return metrics

        return self._calls.add(step)

    def weights_for_sampling(self, *, model: str = FIRST) -> Future[str]:
        """Return a name of a model's present weights for `sample`."""

        def name() -> str:
            self._weights.begin(model)
            return self._weights.name_present()

        return self._calls.add(name)

    def sample(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, *, weights: str = BASE
    ) -> Future[list[Sample]]:
        """Sample answers to a prompt, token ids, by the weights of a name."""
        ids = [int(token) for token in prompt]
        self._checked([Datum(ids, ids, {})], ())
        return self._calls.add(Asked(ids, num_samples, checked(sampling, num_samples), weights))

    def log_probs(self, tokens: Sequence[int], *, weights: str = BASE) -> Future[list[float]]:
        """Compute the log-probs of tokens[1:], nats, by the weights of a name."""
        data = self._checked([Datum(tokens[:-1], tokens[1:], {})], ())

        def compute() -> list[float]:
            self._weights.load(weights)
            return self._forward(data)[0]

        return self._calls.add(compute)

    def save_state(self, name: str, *, model: str = FIRST) -> Future[Path]:
        """Save a model's weights and moments as a state, whole or not at all; return its folder."""
        self._states.free(name)

        def save() -> Path:
            self._weights.begin(model)
            return self._states.save(name)

        return self._calls.add(save)

    def load_state(self, name: str, *, model: str = FIRST, optimizer: bool = True) -> Future[None]:
        """Load a state into a model; without its moments unless `optimizer`."""

        def load() -> None:
            self._states.existing(name)
            self._weights.begin(model)
            self._actor.call("drop_gradients")
            try:
                self._states.load(name)
                if not optimizer:
                    self._actor.call("forget_optimizer")
            finally:  # a damaged state may have been loaded in part
                self._weights.change()

        return self._calls.add(load)

    def weights_of_state(self, name: str) -> Future[str]:
        """Return a name of a saved state's weights for `sample`."""

        def load() -> str:
            self._weights.leave()
            self._states.load(name)
            return self._weights.name_other(f"state-{name}")

        return self._calls.add(load)

    def states(self) -> list[str]:
        """Return the names of the saved states."""
        return self._states.names()

    def delete_state(self, name: str) -> Future[None]:
        """Delete a saved state."""
        return self._calls.add(lambda: self._states.delete(name))

    def close(self) -> None:
        """End the service; calls that wait get a ServiceError."""
        closed = ServiceError("the service was closed")
        self._calls.refuse(closed)
        self._samples.fail(closed)
        self._calls.join()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self, call: Call) -> None:
        assert isinstance(call.work, Asked)
        name = call.work.weights
        self._weights.wake(name)
        self._samples.serve(call, lambda: self._calls.joining(name))

    def _scheduled(self, data: Sequence[Datum], names: Sequence[str]) -> ScheduledBatch:
        """Return the schedule of a call's data as one mini-batch over all ranks."""
        batch = batch_of(data, names, self._sizes.num_shards)
        sizes = replace(self._sizes, mini_batch_size=len(batch), epochs=1)
        return schedule(batch, sizes, seed=0, step=0)

    def _checked(self, data: Sequence[Datum], names: Sequence[str]) -> list[Datum]:
        """Return a copy of a call's list, which the caller may change meanwhile; see `check`."""
        check(data, names, self.longest, self._shape.vocab)
        return [*data]

    def _plain(self, data: Sequence[Datum]) -> list[Datum]:
        """Return data without what losses take."""
        return self._checked([Datum(datum.tokens, datum.targets, {}) for datum in data], ())

    def _forward(self, data: Sequence[Datum]) -> list[list[float]]:
        return self._rows(self._run(self._scheduled(data, ())), data)

    def _run(self, scheduled: ScheduledBatch) -> Ragged:
        values: Ragged = self._actor.call("compute_log_probs", scheduled)
        return values

    @staticmethod
    def _rows(values: Ragged, data: Sequence[Datum]) -> list[list[float]]:
        return [row.tolist() for row in values.rows()[: len(data)]]
