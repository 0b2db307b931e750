"""Policy, critic and reward model under FSDP2: loading, sharding, and views of the shards.

FSDP2 averages gradients over ranks. Losses here are sums over tokens divided by the global token
count, so gradients must be summed. The divide factor is 1, and communication is forced to plain
sums (gloo has no pre-multiplied sum). Under hybrid sharding replicas are summed, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import FSDPConfig, LoRAConfig, ModelConfig
from hybridrl.distributed import position
from hybridrl.distributed.accumulation import free_gathered_weights
from hybridrl.distributed.forward.compiling import compile_layer
from hybridrl.distributed.forward.log_probs import KeptLogits
from hybridrl.distributed.forward.token_models import SequenceScores, TokenLogProbs, TokenValues
from hybridrl.distributed.lora import (
    adapters,
    add_adapters,
    checkpoint_parameters,
    first_factor,
)
from hybridrl.distributed.mesh import device_of, sharding_mesh
from hybridrl.distributed.regions import NamedShard
from hybridrl.distributed.torch_compat import (
    compute_local_shape_and_global_offset,
    local_tensor,
)
from hybridrl.distributed.weights import (
    CheckpointWeights,
    FirstWeights,
    Lacking,
    empty_model,
    first_weights,
)
from hybridrl.models.resolve import model_folder, resolve_model


def load_sharded_policy(
    model: ModelConfig,
    fsdp: FSDPConfig,
    mesh: DeviceMesh,
    chunk_tokens: int,
    lora: LoRAConfig | None = None,
) -> TokenLogProbs:
    """Load a causal LM, sharded, with float32 master weights; a collective over all ranks.

    Each rank reads its own shards; of random weights one whole tensor exists at a time on each
    device. Dropout is off, so that equal tokens always get equal log-probs.

    Args:
        model: the model.
        fsdp: the sharding spec; with columns=null every weight is cut by rows.
        mesh: the training mesh.
        chunk_tokens: tokens whose logits are computed at one time.
        lora: adapters; only these are then trained.

    Raises:
        ConfigError: the architecture is not supported, the checkpoint lacks weights, or
            fsdp.columns names weights that cannot be cut by columns.
    """
    lm = empty_model(AutoModelForCausalLM, model_folder(model))
    _check_columns(lm, fsdp, mesh)
    if lora is not None:
        add_adapters(lm, lora)
    keep = KeptLogits.none if fsdp.activation_checkpointing else KeptLogits.all
    root = TokenLogProbs(lm, chunk_tokens, keep)
    _shard(root, root.lm.base_model.layers, fsdp, mesh)
    _fill(root, first_weights(model, lm.config, _shapes(root), device_of(mesh)), device_of(mesh))
    if lora is not None:
        _fill_adapters(lm, lora.seed, device_of(mesh))
    return root.eval()


def load_sharded_critic(
    model: ModelConfig, fsdp: FSDPConfig, mesh: DeviceMesh, seed: int
) -> TokenValues:
    """Load a backbone with a new scalar head, sharded; a collective over all ranks.

    The head stays in float32: values in bfloat16 have only three digits.

    Args:
        model: model of the backbone.
        fsdp: the sharding spec.
        mesh: the training mesh.
        seed: seed of the head.

    Raises:
        ConfigError: the architecture is not supported, or the checkpoint lacks weights.
    """
    backbone = empty_model(AutoModel, model_folder(model))
    root = TokenValues(backbone)
    fully_shard(root.head, mesh=sharding_mesh(mesh), reshard_after_forward=False)
    _shard(root, root.backbone.layers, fsdp, mesh)
    device = device_of(mesh)
    _fill(root, first_weights(model, backbone.config, _shapes(root), device), device)
    for name, value in root.initial_head(seed).items():
        _keep_shard(root.get_parameter(name), value.to(device))
    return root.eval()


def load_sharded_reward_model(path: str, fsdp: FSDPConfig, mesh: DeviceMesh) -> SequenceScores:
    """Load a sequence classifier, sharded by rows; a collective over all ranks.

    Args:
        path: path of the checkpoint.
        fsdp: the sharding spec; its columns, which are the policy's, are ignored.
        mesh: the training mesh.

    Raises:
        ConfigError: the architecture is not supported, or the checkpoint lacks weights.
    """
    folder, device = resolve_model(path), device_of(mesh)
    root = SequenceScores(empty_model(AutoModel, folder))
    fully_shard(root.score, mesh=sharding_mesh(mesh), reshard_after_forward=False)
    _shard(root, root.backbone.layers, replace(fsdp, columns=None), mesh)
    # A head that shares the embedding's storage is no score head.
    first = CheckpointWeights(folder, _shapes(root), tied=False, lacking=Lacking.reward_model)
    _fill(root, first, device)
    return root.eval()


def named_shards(root: TokenLogProbs) -> list[NamedShard]:
    """Return this rank's shards of the causal LM by checkpoint name, tied duplicates included.

    With adapters these are frozen, and A and B of each adapted layer follow as lora_A.weight and
    lora_B.weight. The getters stay valid over optimizer steps and forwards.
    """
    free_gathered_weights(root)
    factors = [
        (f"{name}.{factor}.weight", layer.get_parameter(f"{factor}.weight"))
        for name, layer in adapters(root.lm).items()
        for factor in ("lora_A", "lora_B")
    ]
    named = checkpoint_parameters(root.lm, tied_twice=True)
    return [_named_shard(name, param, frozen=bool(factors)) for name, param in named] + [
        _named_shard(name, param, frozen=False) for name, param in factors
    ]


def adapter_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """Gather the adapters' weights under peft's names, float32 on CPU; a collective.

    Returns:
        Every weight on rank 0, nothing on the other ranks; without adapters nothing anywhere.
    """
    free_gathered_weights(root)
    is_first = dist.get_rank() == 0
    kept = {}
    for name, layer in adapters(root.lm).items():
        for factor, weight in (("lora_A", layer.lora_A.weight), ("lora_B", layer.lora_B.weight)):
            whole = weight.detach().full_tensor()
            if is_first:  # a copy: a gathered tensor may be a view of a padded, larger storage
                kept[f"base_model.model.{name}.{factor}.weight"] = whole.to("cpu", copy=True)
    return kept


def _named_shard(name: str, param: DTensor, *, frozen: bool) -> NamedShard:
    placement = param.placements[-1]
    assert isinstance(placement, Shard), param.placements
    local = partial(local_tensor, param)
    return NamedShard(name, tuple(param.shape), local, placement.dim, frozen)


def parameters_in_checkpoint(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the checkpoint by name; tied tensors once."""
    if isinstance(root, TokenLogProbs):
        return list(checkpoint_parameters(root.lm))
    assert isinstance(root, TokenValues | SequenceScores)
    prefix = root.backbone.base_model_prefix
    named = [(f"{prefix}.{name}", param) for name, param in root.backbone.named_parameters()]
    if isinstance(root, SequenceScores):
        named.append(("score.weight", root.score.weight))
    return named


def _check_columns(lm: nn.Module, fsdp: FSDPConfig, mesh: DeviceMesh) -> None:
    """Raise if fsdp.columns names unknown weights, or columns that dp_shard does not divide."""
    shapes = {name: param.shape for name, param in lm.named_parameters()}
    shards = mesh["dp_shard"].size()
    for name in fsdp.columns or []:
        shape = shapes.get(name)
        if shape is None or len(shape) < 2 or shape[1] % shards:
            found = "names no weight" if shape is None else f"names a weight of {tuple(shape)}"
            raise ConfigError(
                f"fsdp.columns = {name} {found}, expected one whose columns fsdp.dp_shard = "
                f"{shards} divides: FSDP2 cuts columns evenly only.\n"
                f"Set fsdp.columns=null to have them found."
            )


def _shard(
    root: nn.Module, layers: Iterable[nn.Module], fsdp: FSDPConfig, mesh: DeviceMesh
) -> None:
    """Wrap each layer, then the root with the rest (embedding, final norm, head)."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=getattr(torch, fsdp.reduce_dtype)
    )
    wrap = partial(
        fully_shard,
        mesh=sharding_mesh(mesh),
        mp_policy=policy,
        shard_placement_fn=_placement(root, fsdp),
    )
    for layer in layers:
        if fsdp.compile:
            compile_layer(layer)
        if fsdp.activation_checkpointing:
            _checkpoint_activations(layer)
        wrap(layer, reshard_after_forward=fsdp.reshard_after_forward)
    # Backward begins with the root, so its weights stay gathered after forward.
    wrap(root, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _placement(root: nn.Module, fsdp: FSDPConfig) -> Callable[[nn.Parameter], Shard]:
    """Place by columns the weights in fsdp.columns and A of their adapters; others by rows."""
    names = set(fsdp.columns or [])
    by_columns = {param for name, param in parameters_in_checkpoint(root) if name in names}
    by_columns |= {
        layer.lora_A.weight
        for layer in adapters(root).values()
        if layer.base_layer.weight in by_columns
    }
    return lambda param: Shard(1 if param in by_columns else 0)


def _checkpoint_activations(layer: nn.Module) -> None:
    """Recompute the layer in backward, inside FSDP2's hooks and independent of train mode."""
    layer.forward = partial(  # type: ignore[method-assign]
        checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
    )


def _shapes(root: nn.Module) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in parameters_in_checkpoint(root)}


@torch.no_grad()
def _fill(root: nn.Module, first: FirstWeights, device: torch.device) -> None:
    """Move an empty model to the device and fill this rank's shards, one tensor at a time."""
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    for number, (name, param) in enumerate(parameters_in_checkpoint(root), 1):
        position.at("loaded weight", number)
        lengths, offsets = compute_local_shape_and_global_offset(
            param.shape, param.device_mesh, param.placements
        )
        where = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        # Copied in the stored dtype, cast to float32 on the device.
        param.to_local().copy_(first.part(name, param.shape, where).to(device))


def _fill_adapters(lm: nn.Module, seed: int, device: torch.device) -> None:
    """Set A from the seed and B = 0, so that the adapters have no effect at first."""
    for name, layer in adapters(lm).items():
        _keep_shard(layer.lora_A.weight, first_factor(layer, name, seed, device))
        layer.lora_B.weight.detach().to_local().zero_()


def _keep_shard(param: DTensor, whole: Tensor) -> None:
    """Set this rank's shard from a tensor that every rank has, without communication."""
    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.detach().to_local().copy_(mine.to_local())
