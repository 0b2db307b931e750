"""Weights of a policy by their names on the hub: from a checkpoint, or gathered from all ranks."""

from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Accelerator, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.distributed import position
from hybridrl.distributed.experts import PartReader, mixture_of
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    checkpoint_parameters,
)
from hybridrl.distributed.regions import free_gathered_weights
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.distributed.weights import FirstWeights, empty_model, first_weights
from hybridrl.models.resolve import plain_folder

# Prefix of the policy's weights in a checkpoint.
PREFIX = "actor.weights."


class StoredPolicy:
    """Actor weights of a checkpoint by their names in the model's own, read on demand and merged.

    If model.init=random and there are adapters, base weights are drawn again on device type
    `drawn_on`.

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
        parameters = dict(checkpoint_parameters(self._lm))
        self._shapes = {name: param.shape for name, param in parameters.items()}
        self._tensors = PartReader(parameters, mixture_of(self._lm), self._merged)
        self.shapes = self._tensors.shapes
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

    def read(self, name: str) -> Tensor:
        """Read one of the weights, merged; float32 on CPU."""
        return self._tensors.read(name)

    def _merged(self, name: str) -> Tensor:
        """Read a parameter."""
        if self._lora is None:
            return self._stored(name)
        whole = (slice(None),) * len(self._shapes[name])
        base = self._base[name][whole].to("cpu", torch.float32)
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
        return first_weights(self._model, self._lm.config, self._shapes, device)


class GatheredWeights:
    """Weights of an idle policy by checkpoint name, each gathered when it is read.

    Reads are collectives. All ranks read all weights in the order of `shapes`; a rank that stops
    early calls `read_rest`. Tied tensors appear once. Adapters are merged.
    """

    def __init__(self, root: TokenLogProbs) -> None:
        free_gathered_weights(root)
        self._adapted = {f"{name}.weight": layer for name, layer in adapters(root.lm).items()}
        self._parameters = dict(checkpoint_parameters(root.lm))
        self._tensors = PartReader(self._parameters, mixture_of(root.lm), self._gathered)
        self.shapes = self._tensors.shapes
        self._rest = list(self.shapes)

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Gather the next weight: float32 on the device, perhaps a view of a larger storage."""
        assert name == self._rest.pop(0), name
        position.at("gathered weight", len(self.shapes) - len(self._rest), len(self.shapes))
        return self._tensors.read(name)

    def _gathered(self, name: str) -> Tensor:
        """Gather a parameter."""
        base = self._parameters[name].full_tensor()
        if name not in self._adapted:
            return base
        layer = self._adapted[name]
        a, b = layer.lora_A.weight.full_tensor(), layer.lora_B.weight.full_tensor()
        return torch.addmm(base, b, a, alpha=layer.scaling)

    def read_rest(self) -> None:
        """Join the collectives of the weights that were not read."""
        while self._rest:
            self.read(self._rest[0])


def adapter_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """Gather the adapters' float32 weights by peft's names, on rank 0's CPU; a collective."""
    free_gathered_weights(root)
    kept = {}
    for name, weight in adapter_parameters(root.lm).items():
        whole = weight.detach().full_tensor()
        if dist.get_rank() == 0:  # a copy: it may be a view of a padded, larger storage
            kept[f"base_model.model.{name}"] = whole.to("cpu", copy=True)
    return kept


# Read one at a time, in the order of `shapes`.
Weights = StoredPolicy | GatheredWeights
