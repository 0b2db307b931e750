"""Whether the adapters that `lora` asks for fit the model."""

import difflib
from collections.abc import Iterator

from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import RunConfig


def lora_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Names of layers that the model does not have, and ranks that would save nothing."""
    lora, layers = config.lora, shape.linear_layers
    if lora is None:
        return
    if not lora.target_modules:
        yield (
            "lora.target_modules = [], expected names of linear layers: without one nothing would "
            f"be trained.\nName some of {', '.join(layers)}, or set lora=none."
        )
    unknown = [name for name in lora.target_modules if name not in layers]
    for name in unknown:
        near = difflib.get_close_matches(name, layers, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        yield (
            f"lora.target_modules names {name}, which is no linear layer of the decoder.{meant}\n"
            f"Name some of {', '.join(layers)}."
        )
    if unknown or not lora.target_modules:
        return
    smallest, name = min((min(layers[name]), name) for name in lora.target_modules)
    if lora.rank > smallest:
        yield (
            f"lora.rank = {lora.rank}, expected at most {smallest}, the smaller side of {name}: a "
            f"higher rank has more numbers than the weight and can express no more.\n"
            f"Lower lora.rank, or leave {name} out of lora.target_modules."
        )
