"""Statistics of what the routers of a mixture of experts choose, in float32.

Shapes:  N = packed tokens   B = sequences   L = layers   E = experts   K = experts of a token

A router leaves its probabilities and choices in `seen`. The decoder layer around it sums them by
sequence and returns them beside its hidden states, through compilation and checkpointing.

Load-balancing loss of a sequence with T tokens, mean over layers; 1 if all experts are chosen
equally often:

    E * sum_e (n_e / (T K)) * (sum_t P_te / T)   P_te: the router's probabilities, scores that
                                                 add up to 1; n_e: choices of expert e

It is of a sequence, not of a micro-batch, so gradients do not depend on packing.

Source: DeepSeek-AI 2024, equations 17 to 20, https://arxiv.org/abs/2412.19437, after Fedus et al.
2021, equation 4, https://arxiv.org/abs/2101.03961
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.distributed.forward.packing import Packed
from hybridrl.distributed.forward.routers import Router


class LayerRouting(NamedTuple):
    """Sums over the tokens of each sequence in one layer.

    Attributes:
        probs: [B, E] float32, the router's probabilities; differentiable.
        load: [B, E] float32, choices of each expert.
        entropy: [B] float32, of the router's distributions, nats.
        differs: [N] bool, the router chose other experts than vLLM; [0] without vLLM's choices.
    """

    probs: Tensor
    load: Tensor
    entropy: Tensor
    differs: Tensor


class Routing(NamedTuple):
    """Statistics of all layers.

    Attributes:
        balance: [B] float32, load-balancing loss of each sequence; differentiable.
        load: [L, E] float32, choices of each expert.
        entropy: [] float32, mean over layers of the sum over tokens, nats.
        num_tokens: tokens of this rank.
        differing: [3] float32, numbers of tokens whose experts vLLM recorded; of those for which
            some router chose others; of choices that differ, over all layers.
    """

    balance: Tensor
    load: Tensor
    entropy: Tensor
    num_tokens: int
    differing: Tensor


def router_of(layer: nn.Module) -> Router | None:
    """Return the router of a decoder layer, if it has one."""
    return next((module for module in layer.modules() if isinstance(module, Router)), None)


def has_experts(layer: nn.Module) -> bool:
    """Return whether a decoder layer has a router."""
    return router_of(layer) is not None


def pick_recorded(
    index: int | None, layer: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Pick a layer's part of the recorded experts: a forward pre-hook.

    `index` is its number among the layers that have experts; None: it has none.
    """
    recorded = kwargs.pop("routed_experts", None)
    if recorded is None or index is None:
        return args, kwargs
    return args, kwargs | {"routed_experts": recorded[:, :, index].contiguous()}


def layer_forward(
    layer: Any, *states: Tensor, routed_experts: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, LayerRouting]:
    """Run a decoder layer with experts.

    `cu_seq_lens_q` [B + 1] are the bounds of sequences, `routed_experts` [1, N, K] the router's
    `recorded`.
    """
    router = router_of(layer)
    assert router is not None
    router.recorded = None if routed_experts is None else routed_experts[0]
    output = type(layer).forward(layer, *states, **kwargs)
    assert router.seen is not None
    probs, ids, differs = router.seen
    router.seen = router.recorded = None
    bounds = kwargs["cu_seq_lens_q"]
    token = torch.arange(probs.shape[0], device=probs.device)
    sequence = torch.bucketize(token, bounds[1:], right=True)

    def by_sequence(values: Tensor) -> Tensor:
        zeros = values.new_zeros(bounds.shape[0] - 1, *values.shape[1:])
        return zeros.index_add(0, sequence, values)

    known = probs.detach()
    chosen = torch.zeros_like(known).scatter(1, ids, 1.0)
    entropy = -(known * known.clamp(min=1e-30).log()).sum(-1)
    sums = by_sequence(probs), by_sequence(chosen), by_sequence(entropy)
    return output, LayerRouting(*sums, differs)


def keep_routing(layer: Any, inputs: Any, outputs: tuple[Tensor, LayerRouting]) -> Tensor:
    """Leave the statistics at the layer: a forward hook, after those of FSDP2.

    FSDP2 gathers a layer's weights when the first gradient of its outputs arrives. So the
    statistics, whose gradients may need a recomputed layer, are among its outputs.
    """
    output, layer.routing = outputs
    return output


def take_routing(layers: nn.ModuleList, packed: Packed) -> Routing | None:
    """Remove the statistics of a forward from all layers with experts; None without such.

    The loss is that of whole sequences: it means nothing if ranks share them.
    """
    routed = [layer for layer in layers if has_experts(layer)]
    if not routed:
        return None
    seen: list[LayerRouting] = [layer.routing for layer in routed]  # type: ignore[misc]
    for layer in routed:
        layer.routing = None  # type: ignore[assignment]
    probs, load = (torch.stack(x) for x in list(zip(*seen, strict=True))[:2])
    lengths = packed.cu_seq_lens.diff()[:, None]
    shares = load / load.sum(-1, keepdim=True).clamp(min=1)
    balance = load.shape[-1] * (shares * probs / lengths).sum(-1).mean(0)
    entropy = torch.stack([one.entropy.sum() for one in seen]).mean()
    num_tokens, differing = packed.input_ids.shape[1], torch.zeros(3, device=load.device)
    if packed.routed_experts is not None:
        differs, known = (
            torch.stack([one.differs for one in seen]),
            packed.routed_experts[..., 0] > 0,
        )
        differing = torch.stack([known.sum(), differs.any(0).sum(), differs.sum()]).float()
    return Routing(balance, load.sum(1), entropy, num_tokens, differing)


class RoutingTotals:
    """Sums of `Routing` over the micro-batches of an update.

    Attributes:
        compares: choices are compared with vLLM's, whose weights are those of the first mini-batch.
        shares: [L, E] float64, share of each expert in its layer's choices, over all ranks; None
            before `report`, or if nothing was added.
    """

    def __init__(self) -> None:
        self.compares = True
        self.shares: Tensor | None = None
        self._sums: list[Tensor] = []
        self._shape = torch.Size()

    def add(self, routing: Routing) -> None:
        """Add a micro-batch."""
        balance, load = routing.balance.detach(), routing.load
        counts = balance.new_tensor([len(balance), routing.num_tokens])
        sums = torch.stack([balance.sum(), routing.entropy])
        differing = routing.differing * self.compares
        self._sums.append(torch.cat([counts, sums, differing, load.flatten()]))
        self._shape = load.shape

    def report(self, *, whole_sequences: bool) -> dict[str, float]:
        """Compute metrics over all ranks; a collective. Empty if nothing was added.

        load_max, load_min: largest and smallest share of an expert in its layer's choices.
        entropy: of a token's distribution over experts, nats.
        balance_loss: mean over sequences; left out if ranks share them.
        differing_tokens: share of tokens for which some router chose other experts than vLLM.
        differing_choices: share of all routers' choices. Left out if vLLM's were not recorded.
        """
        if not self._sums:
            return {}
        sums = torch.stack(self._sums).double().sum(0)
        dist.all_reduce(sums)
        sequences, tokens, balance, entropy = sums[:4].tolist()
        known, differing_tokens, differing_choices = sums[4:7].tolist()
        load = sums[7:].view(self._shape)
        self.shares = load / load.sum(-1, keepdim=True)
        metrics = {
            "load_max": float(self.shares.max()),
            "load_min": float(self.shares.min()),
            "entropy": entropy / tokens,
        }
        if whole_sequences:
            metrics["balance_loss"] = balance / sequences
        if known:
            metrics["differing_tokens"] = differing_tokens / known
            metrics["differing_choices"] = differing_choices / (known * len(load))
        return metrics
