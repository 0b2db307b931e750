"""Policy and critic under FSDP2: loading, sharding, and views of the shards.

FSDP2 averages gradients over ranks. Losses here are sums over tokens divided by the global token
count, so gradients must be summed: the divide factor is 1, and communication is forced to plain
sums (gloo has no pre-multiplied sum). Under hybrid sharding replicas are summed too.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import FSDPConfig, ModelConfig
from hybridrl.distributed.attention import PACKED_ATTENTION, register_packed_attention
from hybridrl.distributed.compiling import compile_layer
from hybridrl.distributed.log_probs import KeptLogits
from hybridrl.distributed.mesh import device_of, sharding_mesh
from hybridrl.distributed.shards import NamedShard
from hybridrl.distributed.token_models import TokenLogProbs, TokenValues
from hybridrl.models.resolve import resolve_model

# Others may scale logits or cap attention scores, which the forwards here would leave out.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

Auto = type[AutoModel] | type[AutoModelForCausalLM]


def load_sharded_policy(
    model: ModelConfig, fsdp: FSDPConfig, mesh: DeviceMesh, chunk_tokens: int
) -> TokenLogProbs:
    """The model's causal LM, sharded, with float32 master weights; a collective over all ranks.

    Rank 0 alone reads the checkpoint and sends each tensor on; the others build the model without
    weights. Dropout is off, so that the same tokens always get the same log-probs.

    Args:
        model: what to load.
        fsdp: the sharding spec.
        mesh: the training mesh.
        chunk_tokens: tokens whose logits are computed at one time.

    Raises:
        ConfigError: the architecture is not supported, or the checkpoint lacks weights.
    """
    folder = resolve_model(model.path)
    keep = KeptLogits.none if fsdp.activation_checkpointing else KeptLogits.all
    root = TokenLogProbs(_empty_model(AutoModelForCausalLM, folder), chunk_tokens, keep)
    _shard(root, root.lm.base_model.layers, fsdp, mesh)
    _fill(root, mesh, lambda: _read_weights(AutoModelForCausalLM, folder, prefix="lm."))
    return root.eval()


def load_sharded_critic(
    model: ModelConfig, fsdp: FSDPConfig, mesh: DeviceMesh, seed: int
) -> TokenValues:
    """The model's backbone with a new scalar head, sharded; a collective over all ranks.

    The head stays in float32: values in bfloat16 would have three digits.

    Args:
        model: where the backbone comes from.
        fsdp: the sharding spec.
        mesh: the training mesh.
        seed: of the head.

    Raises:
        ConfigError: the architecture is not supported, or the checkpoint lacks weights.
    """
    folder = resolve_model(model.path)
    root = TokenValues(_empty_model(AutoModel, folder))
    fully_shard(root.head, mesh=sharding_mesh(mesh), reshard_after_forward=False)
    _shard(root, root.backbone.layers, fsdp, mesh)
    head = root.initial_head(seed)
    _fill(root, mesh, lambda: _read_weights(AutoModel, folder, prefix="backbone.") | head)
    return root.eval()


def reshard(root: nn.Module) -> None:
    """Drop all gathered weights. After a forward without backward FSDP2 keeps the root's."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def defer_all_reduce(root: nn.Module, defer: bool) -> None:
    """Under hybrid sharding, leave (or do) the sum over replicas in the next backward.

    Gradients are reduce-scattered in every backward all the same, so that only shards of them
    accumulate; replicas need to be summed only once per optimizer step.
    """
    assert isinstance(root, FSDPModule)
    root.set_requires_all_reduce(not defer)


def named_shards(root: TokenLogProbs) -> list[NamedShard]:
    """This rank's shards of the causal LM under their checkpoint names, tied duplicates included.

    The getters stay valid over optimizer steps and forwards.
    """
    reshard(root)
    return [
        NamedShard(name, tuple(param.shape), partial(_local_rows, param))
        for name, param in root.lm.named_parameters(remove_duplicate=False)
    ]


def full_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """The causal LM's weights under checkpoint names, float32 on CPU; a collective.

    Tied tensors appear once, as in a checkpoint.

    Returns:
        Every weight on rank 0, nothing on the other ranks.
    """
    reshard(root)
    is_first = dist.get_rank() == 0
    full = {}
    for name, param in root.lm.named_parameters():
        gathered = param.detach().full_tensor()
        if is_first:
            # A copy: the gathered tensor may be a view of a padded, larger storage.
            full[name] = gathered.to("cpu", copy=True)
    return full


def _local_rows(param: DTensor) -> Tensor:
    assert param.placements[-1] == Shard(0), param.placements
    return param.detach().to_local()


def _empty_model(auto: Auto, folder: Path) -> PreTrainedModel:
    """The model with parameters on the meta device; buffers (rotary frequencies) are computed."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model.path = {folder} is a {config.model_type} model; supported are "
            f"{', '.join(MODEL_TYPES)}.\nThe packed forward has been checked for these only.\n"
            f"Set model.path to one of them."
        )
    register_packed_attention()
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    model.tie_weights()
    return model


def _read_weights(auto: Auto, folder: Path, prefix: str) -> dict[str, Tensor]:
    """The checkpoint's weights in float32 on CPU, under the root's names."""
    model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["mismatched_keys"]:
        names = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        raise ConfigError(
            f"model.path = {folder} lacks {len(names)} of its weights: {', '.join(names[:3])}...\n"
            f"Training would start from random numbers there.\n"
            f"Set model.path to a complete checkpoint."
        )
    return {prefix + name: param.detach() for name, param in model.named_parameters()}


def _shard(
    root: nn.Module, layers: Iterable[nn.Module], fsdp: FSDPConfig, mesh: DeviceMesh
) -> None:
    """Wrap each layer, then the root with what is left (embedding, final norm, head)."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=getattr(torch, fsdp.reduce_dtype)
    )
    for layer in layers:
        if fsdp.compile:
            compile_layer(layer)
        if fsdp.activation_checkpointing:
            _checkpoint_activations(layer)
        fully_shard(
            layer,
            mesh=sharding_mesh(mesh),
            mp_policy=policy,
            reshard_after_forward=fsdp.reshard_after_forward,
        )
    # Backward begins with the root, so its weights stay gathered after forward.
    fully_shard(root, mesh=sharding_mesh(mesh), mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _checkpoint_activations(layer: nn.Module) -> None:
    """Recompute the layer in backward, inside FSDP2's hooks and independent of train mode."""
    layer.forward = partial(  # type: ignore[method-assign]
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
    )


def _fill(root: nn.Module, mesh: DeviceMesh, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give every rank its shard of the weights that rank 0 reads, one tensor at a time."""
    device = device_of(mesh)
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    weights = read() if dist.get_rank() == 0 else {}
    for name, param in root.named_parameters():
        full = torch.empty(param.shape, dtype=torch.float32, device=device)
        if dist.get_rank() == 0:
            full.copy_(weights[name])
        dist.broadcast(full, src=0)
        # Every rank has the whole tensor, so nothing needs to be sent to cut it.
        mine = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.detach().to_local().copy_(mine.to_local())
