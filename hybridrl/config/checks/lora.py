"""Checks of the adapters against the model."""

import difflib
from collections.abc import Iterator

from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import RunConfig


def lora_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Find unknown layers and ranks above the size of a weight."""
    lora, layers = config.lora, shape.linear_layers
    if lora is None:
        return
    if not lora.target_modules:
        yield (
            "lora.target_modules = [], expected at least one linear layer: otherwise nothing is "
            f"trained.\nUse some of {', '.join(layers)}, or set lora=none."
        )
    unknown = [name for name in lora.target_modules if name not in layers]
    for name in unknown:
        near = difflib.get_close_matches(name, layers, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        yield (
            f"lora.target_modules contains {name}, which is not a linear layer of the decoder."
            f"{meant}\nUse some of {', '.join(layers)}."
        )
    if unknown or not lora.target_modules:
        return
    smallest, name = min((min(layers[name]), name) for name in lora.target_modules)
    if lora.rank > smallest:
        yield (
            f"lora.rank = {lora.rank}, expected at most {smallest}, the smaller dimension of "
            f"{name}: a higher rank adds parameters without effect.\n"
            f"Set lora.rank={smallest}, or remove {name} from lora.target_modules."
        )
