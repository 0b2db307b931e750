"""Policy of a run's checkpoint as ordinary weights, in one process without a GPU."""

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Accelerator, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.distributed.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    checkpoint_parameters,
)
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.distributed.weights import FirstWeights, empty_model, first_weights
from hybridrl.models.resolve import plain_folder

# Prefix of the policy's weights in a checkpoint.
PREFIX = "actor.weights."


class StoredPolicy:
    """Actor weights of a checkpoint, by their names in the model's own checkpoint.

    Weights are read on demand, with adapters merged.

    Args:
        state: the checkpoint's folder of shards.
        model: the trained model.
        lora: its adapters, if any.
        drawn_on: device type on which the run drew base weights, if model.init=random.

    Raises:
        ConfigError: the checkpoint is of another model, or the model does not exist.
        DamagedCheckpoint: parts of a tensor are missing.
    """

    def __init__(
        self, state: Path, model: ModelConfig, lora: LoRAConfig | None, drawn_on: Accelerator
    ) -> None:
        self._model, self._lora, self._drawn_on = model, lora, drawn_on
        self._lm = empty_model(AutoModelForCausalLM, plain_folder(model.path))
        if lora is not None:
            add_adapters(self._lm, lora)
        self._found = StoredState(state)
        trained = {
            f"{PREFIX}{name}": param
            for name, param in self._lm.named_parameters()
            if param.requires_grad
        }
        found = differences(trained, self._found.tensors, PREFIX)
        if found:
            listed = "\n".join(found)
            raise ConfigError(
                f"{state.parent} holds other weights than model.path = {model.path} "
                f"has:\n{listed}\nGive the model that was trained: --model PATH"
            )

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes by checkpoint name, tied tensors once."""
        return {name: param.shape for name, param in checkpoint_parameters(self._lm)}

    def read(self, name: str) -> Tensor:
        """Read one of the weights, merged; float32 on CPU."""
        if self._lora is None:
            return self._stored(name)
        shape = self.shapes[name]
        base = self._base.part(name, shape, (slice(None),) * len(shape)).to("cpu", torch.float32)
        layers, layer = adapters(self._lm), name.removesuffix(".weight")
        if layer not in layers:
            return base
        a, b = (self._stored(f"{layer}.{factor}.weight") for factor in ("lora_A", "lora_B"))
        return torch.addmm(base, b, a, alpha=layers[layer].scaling)

    def adapters(self) -> dict[str, Tensor]:
        """Return the adapters' weights by peft's names, float32 on CPU."""
        names = adapter_parameters(self._lm)
        return {f"base_model.model.{name}": self._stored(name) for name in names}

    def _stored(self, name: str) -> Tensor:
        return self._found.read(f"{PREFIX}{name}")

    @cached_property
    def _base(self) -> FirstWeights:
        """Open or draw the base weights."""
        on_gpu = self._drawn_on is Accelerator.gpu
        if on_gpu and self._model.init is Init.random and not torch.cuda.is_available():
            raise ConfigError(
                "model.init = random: the run drew the weights under its adapters on a GPU, whose "
                "numbers a CPU does not draw.\nExport on a machine with a GPU."
            )
        device = torch.device("cuda" if on_gpu else "cpu")
        return first_weights(self._model, self._lm.config, self.shapes, device)
