"""Weight sync between the user's own FSDP2 module and vLLM, in one process per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hybridrl.distributed.experts import checkpoint_tensors
from hybridrl.distributed.mesh import AXES
from hybridrl.distributed.regions import free_gathered_weights, shards_of
from hybridrl.reshard import resharder
from hybridrl.reshard.route import Route
from hybridrl.rollout.loaded import loader_trace
from hybridrl.rollout.vllm.engine import in_process


@contextmanager
def vllm_in_process(device_type: str = "cuda") -> Iterator[None]:
    """Import and build vLLM in this block, so that its weights can be written from this process.

    The default process group exists, RANK and LOCAL_RANK are set (torchrun), and `LLM` gets
    distributed_executor_backend="external_launcher". Keep the `LLM` until the process ends.
    """
    with in_process(device_type):
        yield


class Resharder(resharder.Resharder):
    """Resharder from an FSDP2 module into vLLM's live parameters. All calls are collectives.

    Args:
        module: causal LM of transformers with float32 weights under `fully_shard`, over all ranks,
            on a mesh of one dim or of (replicate, shard).
        llm: vLLM's `LLM` of the same model, awake, built in `vllm_in_process`, not quantized.
        bucket_mb: MiB that a rank sends and receives at a time.

    Raises:
        ValueError: a weight is not a float32 DTensor of such a mesh, or the module does not have
            all weights of the engine.
        RuntimeError: vLLM's loader writes what is no weight of the module, as quantized ones do.
    """

    def __init__(self, module: nn.Module, llm: Any, *, bucket_mb: int = 256) -> None:
        self._module, self._llm = module, llm
        mesh = _mesh_of(module)
        shards = shards_of(module)
        held = checkpoint_tensors(module, {shard.name: shard.shape for shard in shards})
        sources = [tensor for parts in held.values() for tensor in parts]
        trace, tensors, self._loaded = loader_trace(llm, sources)
        super().__init__(shards, trace, tensors, Route.colocated(mesh), bucket_mb)

    def sync(self, version: int, *, verify: bool = True, kept: bool = False) -> dict[str, float]:
        """Write the module's weights into vLLM, and discard its prefix cache; see the base class.

        `version` is for messages.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still has open requests: let them end, or abort them")
        free_gathered_weights(self._module)
        metrics = super().sync(version, verify=verify, kept=kept)
        self._loaded.load()
        return metrics


def _mesh_of(module: nn.Module) -> DeviceMesh:
    """Return the mesh of a module's weights, with a dim for replicas."""
    for name, weight in module.named_parameters():
        if not isinstance(weight, DTensor) or weight.dtype is not torch.float32:
            raise ValueError(
                f"{name} is {type(weight).__name__} of {weight.dtype}: expected a "
                "float32 DTensor. Load the model in float32 and call fully_shard."
            )
    mesh = weight.device_mesh
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError(
            f"the module is sharded over ranks {mesh.mesh.tolist()}: expected all "
            f"{dist.get_world_size()} ranks in order"
        )
    shape = (1, *mesh.shape)[-2:]
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=AXES)
