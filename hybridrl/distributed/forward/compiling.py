"""Compiled layers (fsdp.compile): one graph for all of them and every packed length.

torch.compile generates different code for forwards with and without gradients, and the two round
differently. Old log-probs must equal those of the update's first forward bit for bit. Therefore a
compiled layer always runs the code with gradients; unneeded saved tensors are dropped. Its input
always counts as differentiable; the input of the first layer, from a frozen embedding, is not.

Token counts, sequence counts and the longest length differ from call to call. They are symbols
from the first call on, so nothing is recompiled. A graph break is an error.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridrl.distributed.torch_compat import mark_dynamic, tree_leaves


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer's forward; call before FSDP2 wraps it, whose hooks stay outside.

    The layer maps hidden states, its first argument, to hidden states. The tokens of its tensor
    arguments are in dim 1, or in their only dim.
    """
    layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    # A plain int would first be compiled as a constant; a tensor's size is a symbol at once.
    sizes = {name: torch.empty(n, 0) for name, n in kwargs.items() if type(n) is int}
    rest = {name: value for name, value in kwargs.items() if name not in sizes}
    needs_grad = torch.is_grad_enabled()
    differentiable = hidden_states.requires_grad
    states = hidden_states if differentiable else hidden_states.detach().requires_grad_()
    for leaf in tree_leaves((states, rest)):
        if isinstance(leaf, Tensor):
            mark_dynamic(leaf, min(leaf.dim() - 1, 1))
    for size in sizes.values():
        mark_dynamic(size, 0)
    with torch.enable_grad():
        output = _compiled(layer, states, sizes, rest)
    return output if needs_grad else output.detach()


@torch.compile(fullgraph=True)
def _compiled(
    layer: nn.Module, states: Tensor, sizes: dict[str, Tensor], rest: dict[str, Any]
) -> Tensor:
    ints = {name: size.shape[0] for name, size in sizes.items()}
    return type(layer).forward(layer, states, **rest, **ints)
