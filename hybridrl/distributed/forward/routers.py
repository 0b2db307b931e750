"""Routers of mixtures of experts: they choose and weigh the experts of each token.

Shapes:  N = packed tokens   E = experts   K = experts of a token   H = hidden size

A router leaves what it chose in `seen`, for the statistics of routing.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Choice(NamedTuple):
    """Rule by which a router chooses and weighs experts.

    Attributes:
        top_k: K.
        normalises: the weights of a token's experts add up to 1.
        sigmoid: scores are sigmoids of the logits, not their softmax.
        groups, top_groups: experts come from so many groups of them, those with the best two.
        scale: factor on the weights.
    """

    top_k: int
    normalises: bool
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


class Router(nn.Module):
    """Linear layer, scores and choice of the best experts.

    Args:
        weight: [E, H]; under mixed precision it arrives rounded to param_dtype, as in vLLM.
        choice: how experts are chosen and weighed.
        bias: [E], of the linear layer.
        offset: [E] float32, added to the scores for the choice alone; a buffer, which is frozen.

    Attributes:
        recorded: [N, K], 1 + the experts that vLLM chose, 0 where it chose none; None: not known.
        replays: the tokens pass these, with the weights that this router gives them.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        choice: Choice,
        *,
        bias: nn.Parameter | None = None,
        offset: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.register_buffer("e_score_correction_bias", offset)
        self.choice = choice
        self.recorded: Tensor | None = None
        self.replays = False
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [N, E] float32, weights [N, K] and ids of the chosen experts [N, K]."""
        states = states.flatten(0, -2)
        logits = self.logits(states)
        scores = logits.sigmoid() if self.choice.sigmoid else logits.softmax(-1)
        ids = self._best(scores)
        differs = torch.zeros(0, dtype=torch.bool, device=ids.device)
        if self.recorded is not None:
            known, recorded = self.recorded[:, :1] > 0, self.recorded.long() - 1
            own, other = ids.sort(-1).values, recorded.sort(-1).values
            differs = (own != other).any(-1) & known[:, 0]
            if self.replays:
                ids = torch.where(known, recorded, ids)
        weights = scores.gather(-1, ids)
        if self.choice.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        probs = scores / scores.sum(-1, keepdim=True) if self.choice.sigmoid else scores
        self.seen = probs, ids, differs
        return logits, (weights * self.choice.scale).to(states.dtype), ids

    def _best(self, scores: Tensor) -> Tensor:
        """Return the experts with the best scores, [N, K], from the best groups."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.choice.groups > 1:
            groups = scores.unflatten(-1, (self.choice.groups, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(self.choice.top_groups, dim=-1)
            others = torch.ones_like(groups[..., 0], dtype=torch.bool)
            others = others.scatter(-1, best.indices, False)
            scores = groups.masked_fill(others[..., None], -torch.inf).flatten(-2)
        return scores.topk(self.choice.top_k, dim=-1).indices

    def logits(self, states: Tensor) -> Tensor:
        """Return the products of the linear layer, [N, E] float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(states.float(), self.weight.float(), bias)


class ScaledRouter(Router):
    """Router of normed and scaled states, whose experts have factors, too (Gemma 4).

    `gate` is transformers' own. Weights keep its names.
    """

    def __init__(self, gate: nn.Module, choice: Choice) -> None:
        super().__init__(gate.get_parameter("proj.weight"), choice)
        del self.weight
        self.norm, self.proj = gate.get_submodule("norm"), gate.get_submodule("proj")
        self.scale = gate.get_parameter("scale")
        self.per_expert_scale = gate.get_parameter("per_expert_scale")

    def logits(self, states: Tensor) -> Tensor:
        """Return the products of the linear layer, [N, E] float32."""
        scaled = self.norm(states) * self.scale * len(self.scale) ** -0.5
        return F.linear(scaled.float(), self.proj.get_parameter("weight").float())

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a `Router` does, weights times the factors of their experts."""
        logits, weights, ids = super().forward(states)
        return logits, weights * self.per_expert_scale[ids], ids
