"""vLLM in this process as a rollout engine."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.installation import check_installation
from hybridrl.config.schema import Accelerator, RolloutConfig
from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.regions import Trace
from hybridrl.rollout import compat
from hybridrl.rollout.engine import EnginePart, Generated
from hybridrl.rollout.sampling import sample_seeds
from hybridrl.rollout.trace import trace_loader

logger = logging.getLogger(__name__)


class VLLMEngine:
    """vLLM inside this process, one process per GPU, on the process group that exists.

    Methods are collectives over the ranks of a tensor-parallel group, construction over all ranks.
    Build it before anything else takes GPU memory, and keep it as long as the process lives:
    an engine that is collected may destroy the default process group with it.

    Args:
        config: sizes, dtype and sampling.
        folder: the model in Hugging Face format; only its config is read.
        stop_token_ids: tokens that end a response.
        device_type: "cuda" or "cpu". On a GPU the current device is used.

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
        self._stop_token_ids = list(stop_token_ids)
        self._on_gpu = device_type == "cuda"
        self._awake: set[EnginePart] = set()
        check_installation(Accelerator.gpu if self._on_gpu else Accelerator.cpu)
        compat.set_environment(
            device_type,
            tensor_parallel=config.tensor_parallel_size > 1,
            enforce_eager=config.enforce_eager,
        )
        self._llm = self._start(folder)
        self._model = self._llm.apply_model(lambda model: model)[0]
        self._places = self._current_places()
        if self._on_gpu:
            self._llm.sleep(level=2)

    def _start(self, folder: Path) -> Any:
        """vLLM's `LLM` with dummy weights. Imported here: its environment must be set first."""
        from vllm import LLM

        options = _gpu_options(self._config) if self._on_gpu else _cpu_options(self._config)
        with nullcontext() if self._on_gpu else compat.cpu_start():
            llm = LLM(
                model=str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=self._config.dtype.value,
                tensor_parallel_size=self._config.tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                max_model_len=self._config.max_prompt_tokens + self._config.max_response_tokens,
                max_num_seqs=self._config.max_num_seqs,
                enforce_eager=self._config.enforce_eager,
                logprobs_mode="processed_logprobs",
                seed=0,
                **options,
            )
        return llm

    def trace(self, sources: Sequence[tuple[str, tuple[int, ...]]]) -> Trace:
        """What vLLM's loader would write on this rank; the parameters are not touched."""
        dtype = getattr(torch, self._config.dtype.value)
        return trace_loader(self._model, self._model.load_weights, sources, dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters by vLLM's names."""
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Run vLLM's `load_weights`."""
        self._model.load_weights(weights)

    def check(self) -> None:
        """Raise RuntimeError if vLLM has replaced a parameter's storage."""
        moved = [n for n, place in self._current_places().items() if place != self._places[n]]
        if moved:
            raise RuntimeError(f"vLLM has moved these parameters since it started: {moved}")

    def wake(self, part: EnginePart) -> None:
        """Map a part's memory; the KV cache after the weights, and with an empty prefix cache."""
        if part is EnginePart.KV_CACHE:
            assert EnginePart.WEIGHTS in self._awake, "weights wake first"
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM still holds requests from before the reshard")
        if self._on_gpu:
            torch.cuda.empty_cache()  # what the trainer has cached would not fit beside it
            self._llm.wake_up(tags=[part.value])
        self._awake.add(part)

    def sleep(self) -> None:
        """Discard weights and KV cache (level 2). Without a GPU only `generate` is refused."""
        self._awake.clear()
        if self._on_gpu:
            self._llm.sleep(level=2)

    def generate(self, prompts: PromptBatch) -> Generated:
        """Sample `responses_per_prompt` responses of each prompt.

        Raises:
            RuntimeError: the engine is asleep (vLLM itself would wait for ever), or its ranks
                sampled different tokens.
            ValueError: a prompt is longer than max_prompt_tokens.
        """
        if self._awake != set(EnginePart):
            raise RuntimeError("the rollout engine is asleep; reshard wakes it")
        self._check_lengths(prompts)
        outputs = self._run(prompts)
        generated = Generated(
            Ragged.from_rows([output.token_ids for output in outputs], torch.int64),
            Ragged.from_rows([output.logprobs.logprobs for output in outputs], torch.float32),
            torch.tensor([output.finish_reason == "length" for output in outputs]).bool(),
        )
        assert torch.equal(generated.responses.lengths, generated.log_probs.lengths)
        self._check_ranks_agree(generated.responses)
        return generated

    def _run(self, prompts: PromptBatch) -> list[Any]:
        """vLLM's completion for each response, in order."""
        from vllm import SamplingParams, TokensPrompt

        if not len(prompts):
            return []
        repeated = [
            TokensPrompt(prompt_token_ids=row.tolist())
            for row in prompts.prompts.rows()
            for _ in range(prompts.responses_per_prompt)
        ]
        params = [
            SamplingParams(
                temperature=prompts.temperature,
                top_p=prompts.top_p,
                max_tokens=self._config.max_response_tokens,
                stop_token_ids=self._stop_token_ids,
                seed=seed,
                logprobs=0,  # the sampled token's alone
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in sample_seeds(self._config.seed, prompts)
        ]
        return [done.outputs[0] for done in self._llm.generate(repeated, params, use_tqdm=False)]

    def _check_lengths(self, prompts: PromptBatch) -> None:
        limit = self._config.max_prompt_tokens
        long = [
            f"prompt {prompt} has {length}"
            for prompt, length in zip(
                prompts.prompt_id.tolist(), prompts.prompts.lengths.tolist(), strict=True
            )
            if length > limit
        ]
        if long:
            raise ValueError(f"rollout.max_prompt_tokens={limit}, but {', '.join(long)} tokens")

    def _check_ranks_agree(self, responses: Ragged) -> None:
        """Raise if a rank of the tensor-parallel group sampled other tokens."""
        from vllm.distributed.parallel_state import get_tp_group

        tokens = responses.values.numpy().tobytes() + responses.lengths.numpy().tobytes()
        own = int.from_bytes(hashlib.blake2b(tokens, digest_size=7).digest(), "big")
        extremes = torch.tensor([own, -own])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
        if extremes.tolist() != [own, -own]:
            raise RuntimeError("the ranks of one rollout engine sampled different tokens")

    def _current_places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {n: (p.data_ptr(), tuple(p.shape)) for n, p in self._model.named_parameters()}


def _gpu_options(config: RolloutConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if config.kv_cache_mb is not None:
        options["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
    if config.tensor_parallel_size > 1:
        # FlashInfer's fused all-reduce would use NVLink multicast (compat.NO_MULTICAST).
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        if torch.cuda.device_count() < config.tensor_parallel_size:
            logger.warning(
                "vLLM's custom all-reduce is off, which slows generation: this process sees "
                "%d of its engine's %d GPUs",
                torch.cuda.device_count(),
                config.tensor_parallel_size,
            )
            options["disable_custom_all_reduce"] = True
    return options


def _cpu_options(config: RolloutConfig) -> dict[str, Any]:
    assert config.kv_cache_mb is not None, "rollout.kv_cache_mb is needed without a GPU"
    return {
        # Without a given size scheduling, and with it rounding, varies from run to run.
        "kv_cache_memory_bytes": config.kv_cache_mb << 20,
        # Seeded sampling dies in a chunked prefill: "CPU Generator does not use offset".
        "enable_chunked_prefill": False,
    }
