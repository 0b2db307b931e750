"""Policy, critic and reward model under FSDP2: loading, sharding, gathering, views of the shards.

FSDP2 averages gradients over ranks. Losses here are sums over tokens divided by the global token
count, so gradients must be summed. The divide factor is 1, and communication is forced to plain
sums (gloo has no pre-multiplied sum). Under hybrid sharding replicas are summed, too.

By default FSDP2 reduce-scatters after every backward and gathers weights in every forward. The sum
over micro-batches can be reduced once if every rank has memory for the gradients of the whole
model. That memory is also enough for the gathered weights of a forward.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hybridrl.config.choices import Accumulation
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import FSDPConfig, LoRAConfig, ModelConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.distributed import position
from hybridrl.distributed.experts import column_dim
from hybridrl.distributed.forward.attention import warn_of_padding
from hybridrl.distributed.forward.exact import share_operations, use_fixed_products
from hybridrl.distributed.forward.layers import layer_function
from hybridrl.distributed.forward.routing import has_experts, keep_routing, pick_recorded
from hybridrl.distributed.forward.token_models import ScalarModel, TokenLogProbs, compile_layer
from hybridrl.distributed.forward.vision import decoder, freeze_vision, tower_blocks
from hybridrl.distributed.lora import (
    adapters,
    add_adapters,
    checkpoint_buffers,
    checkpoint_parameters,
)
from hybridrl.distributed.mesh import device_of, sharding_mesh
from hybridrl.distributed.regions import free_gathered_weights
from hybridrl.distributed.torch_compat import local_part
from hybridrl.distributed.weights import FirstWeights, empty_model, first_weights, stored_weights
from hybridrl.models.resolve import model_folder, resolve_model


def load_sharded_policy(
    model: ModelConfig,
    fsdp: FSDPConfig,
    mesh: DeviceMesh,
    chunk_tokens: int,
    lora: LoRAConfig | None = None,
    *,
    train_vision: bool = False,
) -> TokenLogProbs:
    """Load a causal LM, sharded, with float32 master weights; a collective over all ranks.

    Each rank reads its own shards; of random weights one whole tensor exists at a time on each
    device. Dropout is off, so that equal tokens always get equal log-probs. Logits are computed for
    `chunk_tokens` at one time. With `lora` only the adapters are trained; a tower is frozen or not.

    Raises:
        ConfigError: the architecture is not supported, the checkpoint lacks weights, or
            fsdp.columns names weights that cannot be cut by columns.
    """
    lm = empty_model(AutoModelForCausalLM, model_folder(model))
    _check_columns(lm, fsdp, mesh)
    if lora is not None:
        add_adapters(lm, lora)
    if not train_vision:
        freeze_vision(lm)
    if fsdp.exact:
        use_fixed_products()
        share_operations(lm, fsdp.tensor_parallel_size)
    keeps = not fsdp.activation_checkpointing
    root = TokenLogProbs(lm, chunk_tokens, keep_logits=keeps, exact=fsdp.exact)
    _shard(root, root.lm, fsdp, mesh)
    device = device_of(mesh)
    _fill(root, first_weights(model, lm, _shapes(root), device), device)
    if lora is not None:
        _fill_adapters(lm, lora.seed, device)
    return root.eval()


def load_sharded_critic(
    model: ModelConfig, fsdp: FSDPConfig, mesh: DeviceMesh, seed: int
) -> ScalarModel:
    """Load a backbone as `load_sharded_policy`, with a new scalar head drawn from the seed."""
    root = _empty_scalar_model(model_folder(model), fsdp, mesh, bias=True)
    device = device_of(mesh)
    _fill(root, first_weights(model, root.backbone, _shapes(root), device), device)
    hidden_size = root.head.in_features
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)  # values near 0
    _keep_shard(root.head.weight, head.to(device))
    _keep_shard(root.head.bias, torch.zeros(1, device=device))
    return root.eval()


def load_sharded_reward_model(path: str, fsdp: FSDPConfig, mesh: DeviceMesh) -> ScalarModel:
    """Load a sequence classifier as `load_sharded_policy`, without its columns."""
    folder = resolve_model(path)
    root = _empty_scalar_model(folder, replace(fsdp, columns=None), mesh, bias=False)
    # A head that shares the embedding's storage is no score head.
    key = "reward_model.model.path"
    first = stored_weights(folder, root.backbone, _shapes(root), tied=False, key=key)
    _fill(root, first, device_of(mesh))
    return root.eval()


def _empty_scalar_model(
    folder: Path, fsdp: FSDPConfig, mesh: DeviceMesh, *, bias: bool
) -> ScalarModel:
    """Shard an empty model, with its head in float32: bfloat16 has only three digits."""
    root = ScalarModel(empty_model(AutoModel, folder), bias=bias)
    freeze_vision(root.backbone)
    fully_shard(root.head, mesh=sharding_mesh(mesh), reshard_after_forward=False)
    _shard(root, root.backbone, fsdp, mesh)
    return root


def parameters_in_checkpoint(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the checkpoint by name; tied tensors once."""
    if isinstance(root, TokenLogProbs):
        return list(checkpoint_parameters(root.lm))
    assert isinstance(root, ScalarModel)
    prefix = root.backbone.base_model_prefix
    named = [(f"{prefix}.{name}", param) for name, param in root.backbone.named_parameters()]
    if root.head.bias is None:  # a reward model's; a critic's head is new
        named.append(("score.weight", root.head.weight))
    return named


def _buffers_in_checkpoint(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of the checkpoint by name."""
    if isinstance(root, TokenLogProbs):
        return checkpoint_buffers(root.lm)
    assert isinstance(root, ScalarModel)
    return checkpoint_buffers(root.backbone, f"{root.backbone.base_model_prefix}.")


def begin_micro_batch(root: nn.Module, fsdp: FSDPConfig, *, last: bool) -> None:
    """Set which collectives the next forward and backward postpone to the last micro-batch.

    full: gradients accumulate unsharded, in reduce_dtype, and the last backward reduces their sum.
    sharded: every backward reduce-scatters; under hybrid sharding the last one sums over replicas.
    Weights that stay gathered after forward also stay so between micro-batches.
    """
    assert isinstance(root, FSDPModule)
    if fsdp.accumulation is Accumulation.full:
        root.set_requires_gradient_sync(last)
    else:
        root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or fsdp.reshard_after_forward)


@contextmanager
def gathered_once(root: nn.Module, fsdp: FSDPConfig) -> Iterator[None]:
    """Gather each weight once for all forwards within this context, which have no backward.

    Only with accumulation=full, whose update needs more memory. In the end all weights are sharded
    again; without a backward, FSDP2 would keep at least the root's.
    """
    assert isinstance(root, FSDPModule)
    changes = fsdp.accumulation is Accumulation.full and fsdp.reshard_after_forward
    if changes:
        root.set_reshard_after_forward(False)
    yield
    free_gathered_weights(root)
    if changes:
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)  # backward begins with the root


def _check_columns(lm: nn.Module, fsdp: FSDPConfig, mesh: DeviceMesh) -> None:
    """Raise if fsdp.columns names unknown weights, or columns that dp_shard does not divide."""
    shapes = {name: param.shape for name, param in lm.named_parameters()}
    shards = mesh["dp_shard"].size()
    for name in fsdp.columns or []:
        shape = shapes.get(name)
        if shape is None or len(shape) < 2 or shape[column_dim(name)] % shards:
            named = "no weight" if shape is None else f"a weight of {tuple(shape)}"
            raise ConfigError(
                f"fsdp.columns = {name} names {named}, expected one whose columns fsdp.dp_shard = "
                f"{shards} divides: FSDP2 cuts columns evenly only.\n"
                f"Set fsdp.columns=null to have them found."
            )


def _shard(root: nn.Module, model: PreTrainedModel, fsdp: FSDPConfig, mesh: DeviceMesh) -> None:
    """Wrap each layer, then the root with the rest (embedding, final norm, head)."""
    param_dtype, reduce_dtype = getattr(torch, fsdp.param_dtype), getattr(torch, fsdp.reduce_dtype)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    wrap = partial(
        fully_shard,
        mesh=sharding_mesh(mesh),
        mp_policy=policy,
        shard_placement_fn=_placement(root, fsdp),
    )
    uncast = replace(policy, cast_forward_inputs=False)  # rotations of a tower stay in float32
    for block in tower_blocks(model):
        trained = next(block.parameters()).requires_grad
        if trained and fsdp.activation_checkpointing:
            _checkpoint(block)
        # Nothing goes back through a frozen block and frees what stayed gathered.
        again = fsdp.reshard_after_forward or not trained
        wrap(block, reshard_after_forward=again, mp_policy=uncast)
    num_routed = 0
    for layer in decoder(model).layers:
        if (attention := dict(layer.named_children()).get("self_attn")) is not None:
            size = vars(attention).get("qk_head_dim", vars(attention).get("head_dim"))
            warn_of_padding(device_of(mesh), param_dtype, size)
        _set_forward(layer, fsdp)
        wrap(layer, reshard_after_forward=fsdp.reshard_after_forward)
        index = num_routed if has_experts(layer) else None
        layer.register_forward_pre_hook(partial(pick_recorded, index), with_kwargs=True)
        if has_experts(layer):
            layer.register_forward_hook(keep_routing)
            num_routed += 1
    # Backward begins with the root, so its weights stay gathered after forward.
    wrap(root, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _checkpoint(layer: Any) -> None:
    """Compute a layer's forward again in backward: inside FSDP2's hooks, whatever its mode."""
    layer.forward = partial(
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
    )


def _set_forward(layer: Any, fsdp: FSDPConfig) -> None:
    """Set a decoder layer's forward: compiled, checkpointed, returning what its router did."""
    if fsdp.compile:
        compile_layer(layer)
    elif has_experts(layer):
        layer.forward = partial(layer_function(layer), layer)
    if fsdp.activation_checkpointing:
        _checkpoint(layer)


def _placement(root: nn.Module, fsdp: FSDPConfig) -> Callable[[nn.Parameter], Shard]:
    """Place by columns the weights in fsdp.columns and A of their adapters; others by rows."""
    names = set(fsdp.columns or [])
    by_columns = {param for name, param in parameters_in_checkpoint(root) if name in names}
    by_columns |= {
        layer.lora_A.weight
        for layer in adapters(root).values()
        if layer.base_layer.weight in by_columns
    }
    dims = {param: column_dim(name) for name, param in parameters_in_checkpoint(root)}
    return lambda param: Shard(dims.get(param, 1) if param in by_columns else 0)


def _shapes(root: nn.Module) -> dict[str, torch.Size]:
    named = [*parameters_in_checkpoint(root), *_buffers_in_checkpoint(root).items()]
    return {name: tensor.shape for name, tensor in named}


@torch.no_grad()
def _fill(root: nn.Module, first: FirstWeights, device: torch.device) -> None:
    """Move an empty model to the device and fill this rank's shards, one tensor at a time."""
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    for number, (name, param) in enumerate(parameters_in_checkpoint(root), 1):
        position.at("loaded weight", number)
        local, offsets = local_part(param)
        where = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
        # Copied in the stored dtype, cast to float32 on the device.
        local.copy_(first[name][where].to(device))
    for name, buffer in _buffers_in_checkpoint(root).items() if isinstance(first, dict) else ():
        buffer.copy_(first[name][(slice(None),) * buffer.ndim])


def _fill_adapters(lm: nn.Module, seed: int, device: torch.device) -> None:
    """Set A, uniform within 1 / sqrt(in) as in peft, and B = 0: no effect at first."""
    for name, layer in adapters(lm).items():
        shape = layer.lora_A.weight.shape
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "lora", name))
        bound = 1 / math.sqrt(shape[1])
        whole = torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)
        _keep_shard(layer.lora_A.weight, whole)
        layer.lora_B.weight.detach().to_local().zero_()


def _keep_shard(param: DTensor, whole: Tensor) -> None:
    """Set this rank's shard from a tensor that every rank has, without communication."""
    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.detach().to_local().copy_(mine.to_local())
