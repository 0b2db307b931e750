"""Weights with which vLLM's loader computes, so that no copy of rectangles can replace it.

    shards -> reshard -> whole weights, float32 -> vLLM's own `load_weights` -> parameters

Few are small: Mamba's A = -exp(A_log), biases that only the first rank adds. Each is counted.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Trace, gathered
from hybridrl.rollout.trace import live_tensors, trace_loader
from hybridrl.rollout.vllm import experts as vllm_experts
from hybridrl.rollout.vllm import fp8 as vllm_fp8
from hybridrl.rollout.vllm.compat import tensor_parallel_group

logger = logging.getLogger(__name__)


class LoadedWeights:
    """Whole weights that a reshard gathers on this rank, and that the loader loads after it.

    Args:
        model: vLLM's, with the loader.
        trace: of its loader on this rank.

    Attributes:
        tensors: targets of the reshard that are no parameters of the model, by their names in the
            trace.

    Raises:
        RuntimeError: the loader of these weights alone leaves a part of a parameter as it was.
    """

    def __init__(self, model: Any, trace: Trace) -> None:
        self._model, self._sources = model, trace.loaded
        names = dict.fromkeys(gathered(source.parameter) for source in trace.loaded)
        device = next(model.parameters()).device
        self.tensors = {
            name: torch.ones(trace.parameters[name], dtype=torch.float32, device=device)
            for name in names
        }
        if names:
            self._try(trace)

    @torch.no_grad()
    def _try(self, trace: Trace) -> None:
        size = sum(tensor.nbytes for tensor in self.tensors.values()) / 2**20
        logger.info("%d weights (%.1f MiB) are gathered for vLLM's loader", len(self.tensors), size)
        live = live_tensors(self._model)
        for name in trace.computed:
            live[name].fill_(math.nan)
        self.load()
        left = sorted(name for name in trace.computed if live[name].isnan().any())
        if left:
            raise RuntimeError(
                f"weight sync loads {', '.join(one.name for one in trace.loaded)} by vLLM's own "
                f"loader, which leaves a part of {', '.join(left)} as it was before: expected "
                "it to write all, or the parameter would mix old and new weights."
            )

    @torch.no_grad()
    def load(self) -> None:
        """Run the loader on the gathered weights."""
        if self._sources:
            held = ((one, self.tensors[gathered(one.parameter)][one.at]) for one in self._sources)
            self._model.load_weights((one.name, one.of(part).clone()) for one, part in held)


def loader_trace(
    llm: Any, sources: Sequence[CheckpointTensor]
) -> tuple[Trace, dict[str, Tensor], LoadedWeights]:
    """Return the trace of an `LLM`'s weight loader, its tensors by name, and what it loads itself.

    Raises:
        ConfigError: experts are not as they were loaded.
    """
    model = llm.apply_model(lambda model: model)[0]
    vllm_experts.check_experts(model)
    live = live_tensors(model)
    dtype = llm.llm_engine.model_config.dtype
    trace, loaded = trace_and_load(model, sources, dtype)
    live |= loaded.tensors
    return trace, {name: live[name] for name in trace.tensors}, loaded


def trace_and_load(
    model: Any, sources: Sequence[CheckpointTensor], dtype: torch.dtype
) -> tuple[Trace, LoadedWeights]:
    """Trace the loader of a rank of vLLM's model; a collective of the engine's ranks."""
    with vllm_fp8.as_loaded(model) as quantised:
        trace = trace_loader(model, model.load_weights, sources, dtype, _of_all_ranks)
    trace, tensors = vllm_fp8.with_scales(trace, quantised)
    loaded = LoadedWeights(model, trace)
    loaded.tensors |= tensors
    return trace, loaded


def _of_all_ranks(names: set[str]) -> set[str]:
    group = tensor_parallel_group()
    parts: list[Any] = [names] * group.size()
    dist.all_gather_object(parts, names, group=group)
    return set().union(*parts)
