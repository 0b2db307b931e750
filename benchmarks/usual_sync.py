"""The field's usual weight sync, for comparison: gather each parameter whole, give it to vLLM.

Its policy is cut as FSDP2 cuts by itself, by rows in rank order. Of shards cut by columns
`full_tensor()` would have to join the rows once more, which the usual path does not pay for.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from benchmarks.timing import seconds_of_slowest
from hybridrl.config.choices import Layout
from hybridrl.config.schema import FSDPConfig, RunConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.distributed.experts import checkpoint_tensors
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.mesh import build_mesh
from hybridrl.rollout.trace import live_tensors
from hybridrl.rollout.vllm.engine import VLLMEngine


class UsualPath(NamedTuple):
    """What the usual path took and left.

    Attributes:
        seconds: of each repetition on the slowest rank, for gathering float32 and casting first.
        parameters: copies of what vLLM's loader made of the weights, by vLLM's names.
    """

    seconds: dict[str, list[float]]
    parameters: dict[str, Tensor]


def random_policy(config: RunConfig, spec: FSDPConfig, mesh: DeviceMesh) -> TokenLogProbs:
    """A policy in which every weight is a random number, the same under every sharding spec."""
    policy = load_sharded_policy(config.model, spec, mesh, chunk_tokens=1024)
    for name, parameter in policy.lm.named_parameters():
        if parameter.dim() > 1:
            continue  # drawn by model.init=random, which leaves norms at 1 and biases at 0
        shard = parameter.detach()
        generator = torch.Generator(shard.device).manual_seed(derive_seed(0, "benchmark", name))
        whole = torch.empty(shard.shape, device=shard.device).normal_(generator=generator)
        mine = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
        shard.to_local().copy_(mine.to_local())
    return policy


def usual_path(config: RunConfig, engine: VLLMEngine, device_type: str) -> UsualPath:
    """Time the usual path into an engine's parameters; its policy is gone afterwards."""
    spec = replace(config.fsdp, layout=Layout.plain, columns=None)
    policy = random_policy(config, spec, build_mesh(spec, device_type))
    seconds = {
        how: _seconds(policy, engine, cast_first=how == "cast_first")
        for how in ("float32", "cast_first")
    }
    del policy
    gc.collect()  # FSDP2's states and their modules refer to each other
    torch.cuda.empty_cache()
    return UsualPath(seconds, {name: tensor.clone() for name, tensor in written(engine).items()})


def written(engine: VLLMEngine) -> dict[str, Tensor]:
    """What vLLM's loader writes, by vLLM's names: copies of weights, and what it computes."""
    live = live_tensors(engine._model)
    names = [*engine.trace.tensors, *engine.trace.computed]
    return {name: live[name] for name in names if name in live}


def forget(engine: VLLMEngine) -> None:
    """Fill an engine's parameters with what a sync that leaves some out would show."""
    for tensor in (engine.tensors() | written(engine)).values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _seconds(policy: TokenLogProbs, engine: VLLMEngine, *, cast_first: bool) -> list[float]:
    """Of gathering each parameter whole and giving it to vLLM's loader."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in policy.lm.named_parameters():
            cast = parameter.detach().to(torch.bfloat16) if cast_first else parameter.detach()
            whole = cast.full_tensor()  # type: ignore[attr-defined]
            for part in checkpoint_tensors(policy.lm, {name: whole.shape})[name]:
                yield part.name, part.of(whole[part.at])

    forget(engine)
    with torch.no_grad():
        return seconds_of_slowest(
            lambda: engine._model.load_weights(weights()), warmup=1, repeats=5
        )
