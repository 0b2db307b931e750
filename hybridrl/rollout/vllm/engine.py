"""Rollout engine: vLLM inside this process."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Accelerator, RouterReplay, SleepMode
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Request, SamplingParams
from hybridrl.distributed.weights import checkpoint_sources
from hybridrl.models.resolve import read_model_config
from hybridrl.rollout.adapters import add_adapters
from hybridrl.rollout.engine import EnginePart, Step
from hybridrl.rollout.loaded import trace_and_load
from hybridrl.rollout.sampler import Call
from hybridrl.rollout.start import StartTimes, engine_options
from hybridrl.rollout.trace import live_tensors, places
from hybridrl.rollout.vllm import compat as vllm_compat
from hybridrl.rollout.vllm import exact as vllm_exact
from hybridrl.rollout.vllm import experts as vllm_experts
from hybridrl.rollout.vllm import recorded as vllm_recorded
from hybridrl.rollout.vllm.images import driver_processes, image_inputs
from hybridrl.rollout.vllm.multi_step import buffers_for
from hybridrl.rollout.vllm.steps import CoreSteps

logger = logging.getLogger(__name__)


# Parts that `sleep` frees.
SLEEPERS = {
    SleepMode.none: frozenset[EnginePart](),
    SleepMode.kv_cache: frozenset({EnginePart.KV_CACHE}),
    SleepMode.all: frozenset(EnginePart),
}
# Device memory that stays free after a wake, for libraries that allocate outside of torch.
SPARE_BYTES = 2**30
# Batch sizes of the first sampling: kernels are compiled for 1, for multiples of 16 and for others.
WARM_UP_SIZES = (1, 16, 17)


def prepare(device_type: str, *, enforce_eager: bool, exact: bool = False) -> None:
    """Set the switches that vLLM reads once; call before its import, any number of times.

    Raises:
        ConfigError: this installation of vLLM cannot be used.
    """
    check_installation(Accelerator.gpu if device_type == "cuda" else Accelerator.cpu)
    vllm_compat.set_environment(device_type, enforce_eager=enforce_eager, exact=exact)


@contextmanager
def in_process(
    device_type: str, *, enforce_eager: bool = True, exact: bool = False
) -> Iterator[None]:
    """Import and build vLLM in this block, to run inside this process; see VLLMEngine."""
    prepare(device_type, enforce_eager=enforce_eager, exact=exact)
    with (
        nullcontext() if device_type == "cuda" else vllm_compat.cpu_start(),
        vllm_exact.exact_start() if exact else nullcontext(),
    ):
        yield


class VLLMEngine:
    """vLLM inside this process, one process per GPU, on the existing process group.

    Methods are collectives over the ranks of a tensor-parallel group, construction over all ranks.
    Build it before other allocations of GPU memory and keep it until the process ends: a garbage-
    collected engine may destroy the default process group.

    Args:
        config: sizes, dtype, sampling and sleep mode.
        folder: the model in Hugging Face format; only its config is read.
        stop_token_ids: tokens that end a response.
        device_type: "cuda" or "cpu". On a GPU the current device is used. On a CPU no memory is
            freed, and sleeping parts are only marked.

    Attributes:
        awake: parts that have memory and keep its content.
        sources: every tensor of the model's checkpoint, without adapters.
        trace: writes of vLLM's loader and of the adapters on this rank.

    Raises:
        ConfigError: this installation of vLLM cannot be used.
    """

    def __init__(
        self,
        config: RolloutConfig,
        folder: Path,
        stop_token_ids: Sequence[int],
        device_type: str,
    ) -> None:
        self._config = config
        self._folder = folder
        self._on_gpu = device_type == "cuda"
        self._recorders: list[vllm_recorded.RoutedExperts | vllm_recorded.KeptTokens] = []
        self.awake = frozenset(EnginePart)
        times = StartTimes()
        with in_process(device_type, enforce_eager=config.enforce_eager, exact=config.exact):
            with times.part("imports"):
                from vllm import LLM

                vllm_compat.worker_class(device_type)
            with (
                times.part("rest"),
                vllm_compat.start_hooks(device_type, times.part, self._adapt),
                buffers_for(config.num_scheduler_steps, device_type),
                vllm_compat.own_class(folder),
                vllm_compat.compiled_for_all_batches(),
                vllm_compat.models_inspected_here(),
                vllm_experts.experts_as_loaded(folder, device_type) as more,
                driver_processes(folder) as of_images,
            ):
                recurrent = model_shape(read_model_config(str(folder))).recurrent
                options = engine_options(config, device_type, recurrent=recurrent)
                self._llm = LLM(model=str(folder), **options | more | of_images)
        self._model = self._llm.apply_model(lambda model: model)[0]
        self._places = places(self._model)
        self._stop_token_ids = list(stop_token_ids)
        self._core = self._llm.llm_engine.engine_core
        self._steps = CoreSteps(self._core, self._runner, exact=config.exact)
        self._most_steps = 1 if self._recorders else config.num_scheduler_steps
        for recorder in self._recorders:
            recorder.record(self._core)
        self._open: set[str] = set()
        self._syncs = 0
        with times.part("first sampling"):
            self._warm_up()
        compiling = vllm_compat.compile_seconds(self._llm)
        logger.info("vLLM started in %s; torch.compile took %.1f s of it", times, compiling)
        self.sleep()

    @property
    def keeps_weights(self) -> bool:
        """True if the content of the parameters outlives `sleep`, as it always does on a CPU."""
        return not self._on_gpu or EnginePart.WEIGHTS not in SLEEPERS[self._config.sleep]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters by vLLM's names, and the buffers that its loader writes.

        Also the weights that are gathered for it until `sync`, and the scales of those that are
        FP8. Their addresses never change.
        """
        live = live_tensors(self._model) | self._loaded.tensors
        return {name: live[name] for name in self.trace.tensors}

    def wake(self, part: EnginePart) -> None:
        """Allocate a sleeping part's memory: weights undefined, KV cache empty, weights first.

        Raises:
            RuntimeError: the address of one of `tensors` has changed.
        """
        if part is EnginePart.KV_CACHE:
            assert EnginePart.WEIGHTS in self.awake, "weights wake first"
        if part not in self.awake and self._on_gpu:
            free, _ = torch.cuda.mem_get_info()
            if free < vllm_compat.asleep_bytes(part.value) + SPARE_BYTES:
                torch.cuda.empty_cache()
            with vllm_compat.keeping_cache():
                self._llm.wake_up(tags=[part.value])
        self.awake |= {part}
        if part is EnginePart.WEIGHTS:
            now, then = places(self._model), self._places
            moved = [name for name in self.trace.tensors if now.get(name) != then.get(name)]
            if moved:
                raise RuntimeError(f"vLLM has moved these parameters since it started: {moved}")

    def sleep(self) -> None:
        """Free the parts that rollout.sleep names; the KV cache includes the prefix cache."""
        sleepers = SLEEPERS[self._config.sleep] & self.awake
        self.awake -= sleepers
        if not (self._on_gpu and sleepers):
            return
        if EnginePart.WEIGHTS in sleepers:
            self._llm.sleep(level=2)
        else:
            # The release requires a paused scheduler that knows no request.
            self._steps.forget_ended()
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()

    def sync(self) -> None:
        """Discard the prefix cache, or hide it from new requests while some are open.

        Raises:
            RuntimeError: vLLM has other open requests, or still has states of images.
        """
        self._loaded.load()
        self._syncs += 1
        if self._images is not None:
            self._images.reset(self._core)
        if not self._open and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds requests from before the reshard")

    @property
    def peers(self) -> ProcessGroup | None:
        """Group of the engine's ranks on CPUs; None if there is one rank."""
        if self._config.tensor_parallel_size == 1:
            return None
        return vllm_compat.tensor_parallel_group()

    def submit(self, requests: Sequence[Request]) -> None:
        """Open requests."""
        params: Any = None
        for index, request in enumerate(requests):
            if params is None or request.params is not requests[index - 1].params:
                params = self._params(request)
            own = copy(params)
            own.max_tokens, own.seed = request.max_tokens, request.seed
            images = self._images.features(request) if self._images else None
            self._steps.add(request.request_id, request.prompt, own, str(self._syncs), images)
            self._open.add(request.request_id)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Drop open requests."""
        self._steps.cancel(request_ids)
        self._open.difference_update(request_ids)

    def step(self, most: int = 1) -> Step:
        """Decode up to `most` tokens of each open request."""
        step = self._steps.step(min(most, self._most_steps))
        self._open.difference_update(step.ended)
        return step

    def drain(self) -> Iterator[Step]:
        """Yield the results of queued steps."""
        for step in self._steps.drain():
            self._open.difference_update(step.ended)
            yield step

    def take_recorded(self, request_ids: Sequence[str]) -> dict[str, Ragged]:
        """Return what was recorded of ended requests: fields of `RolloutBatch` by name."""
        return {k: x for one in self._recorders for k, x in one.take(request_ids).items()}

    def _params(self, request: Request) -> Any:
        """Return vLLM's parameters of a request."""
        from vllm import SamplingParams

        params = request.params
        more = dict(params.more)
        if fields := more.pop("structured_outputs", None):
            vllm_compat.enable_grammars(self._core, self._config.model)
            more["structured_outputs"] = vllm_compat.structured_outputs(fields)
        return SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=[*self._stop_token_ids, *params.stop_token_ids],
            logprobs=0,  # the sampled token's alone
            detokenize=False,
            **({"top_k": params.top_k or 0} | more),  # 0: all
        )

    def _adapt(self, runner: Any) -> None:
        """Check and trace a loaded model; add adapters and recorders before it is compiled.

        Loaders read buffers (experts on this rank), so the trace cannot wait until after `sleep`.
        """
        self._runner, model, lora = runner, runner.get_model(), self._config.lora
        vllm_experts.check_experts(model)
        if self._config.exact:
            vllm_exact.share_operations(model, self._folder)
        if self._config.router_replay is not RouterReplay.none:
            self._recorders.append(vllm_recorded.RoutedExperts(runner))
        if self._config.top_p < 1:
            self._recorders.append(vllm_recorded.KeptTokens(runner, self._config.top_p))
        self._images = image_inputs(self._config.model, runner)
        self.sources = checkpoint_sources(self._folder)
        dtype = getattr(torch, self._config.dtype.value)
        trace, self._loaded = trace_and_load(model, self.sources, dtype)
        exact = self._config.exact
        self.trace = trace if lora is None else add_adapters(model, trace, lora, exact=exact)
        if exact:
            vllm_exact.check_equality(model, self._config.tensor_parallel_size)

    def _warm_up(self) -> None:
        """Sample a few tokens from random weights, so that kernels are compiled now.

        vLLM's own warm-up of sampling computes other log-probs with other kernels.
        """
        params = SamplingParams(self._config.temperature, self._config.top_p)
        assert self._config.max_num_seqs is not None
        for size in WARM_UP_SIZES:
            if size <= self._config.max_num_seqs:
                call = Call(self)
                call.admit([Request(f"{size}-{k}", [0], k, 2, params) for k in range(size)])
                call.to_the_end()
                self.take_recorded([*call.responses])
