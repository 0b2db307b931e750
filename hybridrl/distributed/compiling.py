"""Compiled layers (fsdp.compile): one graph for every packed length, with and without gradients.

torch.compile makes different code for a forward that will be differentiated and for one that will
not, and the two round differently. Old log-probs must have the very bits of the update's first
forward, so a compiled layer always runs the former; without gradients it forgets at once what
backward would need.

Token counts, sequence counts and the longest length differ from call to call; they are symbols in
the compiled code. Anything that would break the graph is an error.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def compile_layer(layer: nn.Module) -> None:
    """Compile the layer's forward. To be called before FSDP2 wraps it, whose hooks stay outside.

    Args:
        layer: takes its hidden states first and returns nothing but the next ones.
    """
    layer.forward = _same_code(  # type: ignore[method-assign]
        torch.compile(layer.forward, dynamic=True, fullgraph=True)
    )


def _same_code(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        if torch.is_grad_enabled():
            return compiled(hidden_states, *args, **kwargs)
        with torch.enable_grad():
            states = hidden_states.detach().requires_grad_()
            return compiled(states, *args, **kwargs).detach()

    return forward
