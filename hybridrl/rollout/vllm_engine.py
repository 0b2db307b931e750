"""Rollout engine: vLLM inside this process."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import Accelerator, RouterReplay, SleepMode
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import PromptBatch
from hybridrl.data.live import DriverAddress, Served
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Trace
from hybridrl.distributed.weights import checkpoint_sources
from hybridrl.rollout import vllm_compat, vllm_experts, vllm_routing
from hybridrl.rollout.adapters import add_adapters
from hybridrl.rollout.live import LiveRequests, connected
from hybridrl.rollout.requests import Generated, Requests
from hybridrl.rollout.sampling import check_ranks_agree, sample_seeds
from hybridrl.rollout.start import StartTimes, engine_options
from hybridrl.rollout.trace import live_tensors, places, trace_loader
from hybridrl.rollout.vllm_scheduler import relieve_scheduler

logger = logging.getLogger(__name__)


class EnginePart(Enum):
    """Parts of an engine that wake separately; weights first."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


# Parts that `sleep` frees.
SLEEPERS = {
    SleepMode.none: frozenset[EnginePart](),
    SleepMode.kv_cache: frozenset({EnginePart.KV_CACHE}),
    SleepMode.all: frozenset(EnginePart),
}
# Device memory that stays free after a wake, for libraries that allocate outside of torch.
SPARE_BYTES = 2**30
# Batch sizes of the first sampling: kernels are compiled separately for size 1, for multiples of 16
# and for others.
WARM_UP_SIZES = (1, 16, 17)


def prepare(device_type: str, *, enforce_eager: bool) -> None:
    """Set the switches that vLLM reads once; call before its import, any number of times.

    Raises:
        ConfigError: this installation of vLLM cannot be used.
    """
    check_installation(Accelerator.gpu if device_type == "cuda" else Accelerator.cpu)
    vllm_compat.set_environment(device_type, enforce_eager=enforce_eager)


@contextmanager
def in_process(device_type: str, *, enforce_eager: bool = True) -> Iterator[None]:
    """Import and build vLLM in this block, to run inside this process; see VLLMEngine."""
    prepare(device_type, enforce_eager=enforce_eager)
    with nullcontext() if device_type == "cuda" else vllm_compat.cpu_start():
        yield


def loader_trace(llm: Any, sources: Sequence[CheckpointTensor]) -> tuple[Trace, dict[str, Tensor]]:
    """Return the trace of an `LLM`'s weight loader, and the tensors that it would write, by name.

    Raises:
        ConfigError: experts are not as they were loaded.
    """
    model = llm.apply_model(lambda model: model)[0]
    vllm_experts.check_experts(model)
    live = live_tensors(model)
    dtype = llm.llm_engine.model_config.dtype
    trace = trace_loader(model, model.load_weights, sources, dtype)
    return trace, {name: live[name] for name in trace.parameters}


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
        self._experts: vllm_routing.RoutedExperts | None = None
        self.awake = frozenset(EnginePart)
        times = StartTimes()
        with in_process(device_type, enforce_eager=config.enforce_eager):
            with times.part("imports"):
                from vllm import LLM

                vllm_compat.worker_class(device_type)
            with (
                times.part("rest"),
                vllm_compat.start_hooks(device_type, times.part, self._adapt),
                vllm_compat.own_class(folder),
                vllm_compat.compiled_for_all_batches(),
                vllm_compat.models_inspected_here(),
                vllm_experts.experts_as_loaded(folder, device_type) as more,
            ):
                options = engine_options(config, device_type) | more
                self._llm = LLM(model=str(folder), **options)
        self._model = self._llm.apply_model(lambda model: model)[0]
        self._places = places(self._model)
        self._stop_token_ids = stop_token_ids
        core = vllm_compat.engine_core(self._llm)
        relieve_scheduler(core)
        self._requests = Requests(core, stop_token_ids, self._experts)
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

        Their addresses never change.
        """
        live = live_tensors(self._model)
        return {name: tensor for name, tensor in live.items() if name in self.trace.parameters}

    def check(self) -> None:
        """Raise RuntimeError if the address of one of `tensors` has changed."""
        found = places(self._model)
        moved = [name for name in self.trace.parameters if found.get(name) != self._places[name]]
        if moved:
            raise RuntimeError(f"vLLM has moved these parameters since it started: {moved}")

    def wake(self, part: EnginePart) -> None:
        """Allocate a sleeping part's memory: weights undefined, KV cache empty, weights first."""
        if part in self.awake:
            return
        if part is EnginePart.KV_CACHE:
            assert EnginePart.WEIGHTS in self.awake, "weights wake first"
        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info()
            if free < vllm_compat.asleep_bytes(part.value) + SPARE_BYTES:
                torch.cuda.empty_cache()
            with vllm_compat.keeping_cache():
                self._llm.wake_up(tags=[part.value])
        self.awake |= {part}

    def reset_prefix_cache(self, version: int) -> None:
        """Discard the prefix cache, or hide it from new requests while some are held.

        `version` is that of the weights from now on.

        Raises:
            RuntimeError: vLLM has other open requests.
        """
        self._requests.salt += 1
        self._requests.version = version
        if not self._requests.held and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds requests from before the reshard")

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
            vllm_compat.forget_ended(vllm_compat.engine_core(self._llm))
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()

    def generate(self, prompts: PromptBatch) -> Generated:
        """Sample `responses_per_prompt` responses of each prompt.

        Raises:
            RuntimeError: the engine is asleep (vLLM would wait forever), or its ranks sampled
                different tokens.
            ValueError: a prompt is longer than rollout.max_prompt_tokens.
        """
        self._check_awake()
        self._check_lengths(prompts)
        generated = self._sample(prompts)
        rows = generated.responses.values, generated.responses.lengths
        check_ranks_agree(self._config.tensor_parallel_size, *rows)
        return generated

    def serve(self, driver: DriverAddress, version: int) -> Served:
        """Sample the driver's requests by weights number `version`; raise as `generate`."""
        self._check_awake()
        core, config = vllm_compat.engine_core(self._llm), self._config
        live = LiveRequests(core, config.model, self._stop_token_ids, version)
        with connected(driver, config.tensor_parallel_size) as channel:
            return live.serve(channel)

    def _check_awake(self) -> None:
        if self.awake != set(EnginePart):
            raise RuntimeError("the rollout engine is asleep; reshard wakes it")

    def _sample(self, prompts: PromptBatch) -> Generated:
        seeds = sample_seeds(self._config.seed, prompts)
        return self._requests.generate(prompts, seeds, self._max_tokens(prompts).tolist())

    def _adapt(self, runner: Any) -> None:
        """Check and trace a loaded model; add adapters and recorder, if any, before it is compiled.

        Loaders read buffers (experts on this rank), so the trace cannot wait until after `sleep`.
        """
        model, lora = runner.get_model(), self._config.lora
        vllm_experts.check_experts(model)
        if self._config.router_replay is not RouterReplay.none:
            self._experts = vllm_routing.RoutedExperts(runner)
        self.sources = checkpoint_sources(self._folder)
        dtype = getattr(torch, self._config.dtype.value)
        trace = trace_loader(model, model.load_weights, self.sources, dtype)
        self.trace = trace if lora is None else add_adapters(model, trace, lora)

    def _warm_up(self) -> None:
        """Sample a few tokens from random weights, so that kernels are compiled now.

        vLLM's own warm-up of sampling computes other log-probs with other kernels.
        """
        one = PromptBatch(
            prompts=Ragged.from_rows([[0]], torch.int32),
            prompt_id=torch.zeros(1, dtype=torch.int64),
            step=0,
            responses_per_prompt=1,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            max_tokens=torch.tensor([2]),
        )
        assert self._config.max_num_seqs is not None
        for size in WARM_UP_SIZES:
            if size <= self._config.max_num_seqs:
                self._sample(replace(one, responses_per_prompt=size))

    def _max_tokens(self, prompts: PromptBatch) -> Tensor:
        """Return the length limit of the responses to each prompt."""
        if prompts.max_tokens is None:
            return torch.full((len(prompts),), self._config.max_response_tokens)
        return prompts.max_tokens

    def _check_lengths(self, prompts: PromptBatch) -> None:
        limit, lengths = self._config.max_prompt_tokens, prompts.prompts.lengths
        max_tokens = self._max_tokens(prompts)
        assert (lengths > 0).all(), "an empty prompt"
        assert (max_tokens > 0).all(), "no token may be sampled"
        # Later prompts of a conversation include the part of its response that is used up.
        first = (lengths + max_tokens - self._config.max_response_tokens).tolist()
        long = [
            f"prompt {prompt} has {length}"
            for prompt, length in zip(prompts.prompt_id.tolist(), first, strict=True)
            if length > limit
        ]
        if long:
            raise ValueError(f"rollout.max_prompt_tokens={limit}, but {', '.join(long)} tokens")
