"""Adapters in vLLM of models that take images: as in the trainer, their towers have none."""

import pytest
from torch import nn

from hybridrl.distributed.regions import Region, Trace, TracedCopy
from hybridrl.rollout.adapters import add_adapters
from tests.support.role_configs import lora_config

pytestmark = pytest.mark.full


class Layer(nn.Linear):
    """Stands where a linear layer of vLLM would."""

    quant_method = None


@pytest.mark.parametrize("tower", [False, True])
def test_only_layers_of_the_language_model_are_adapted(tower):
    parts = {"language_model": "model.language_model.", "visual": "model.visual."}
    if not tower:
        parts = {"language_model": "model."}
    model = nn.ModuleDict({part: nn.ModuleDict({"up_proj": Layer(3, 4)}) for part in parts})
    whole = Region((0, 0), (4, 3))
    copies = [
        TracedCopy(f"{path}up_proj.weight", whole, f"{part}.up_proj.weight", (0, 0))
        for part, path in parts.items()
    ]
    shapes = {copy.parameter: (4, 3) for copy in copies}
    trace = add_adapters(model, Trace(copies, [], shapes), lora_config(rank=2), exact=False)
    added = {name: shape for name, shape in trace.parameters.items() if name not in shapes}
    layer = "language_model.up_proj.lora_"
    assert added == {f"{layer}A": (2, 3), f"{layer}B": (4, 2)}
