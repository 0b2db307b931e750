"""Weights of a policy by their names on the hub: from a checkpoint, or gathered from all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.config.choices import Accelerator, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.distributed import position
from hybridrl.distributed.experts import parts_of
from hybridrl.distributed.forward.token_models import ScalarModel, TokenLogProbs
from hybridrl.distributed.forward.vision import freeze_vision, vision_parts
from hybridrl.distributed.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    checkpoint_buffers,
    checkpoint_parameters,
)
from hybridrl.distributed.regions import free_gathered_weights
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.distributed.weights import FirstWeights, empty_model, first_weights
from hybridrl.models.resolve import plain_folder

# Prefixes of the policy's weights in a checkpoint, and of adapters in peft's.
PREFIX, PEFT = "actor.weights.", "base_model.model."
NO_HEAD: Mapping[str, nn.Parameter] = MappingProxyType({})


class PolicyWeights(ABC):
    """Tensors of a policy's checkpoint: `shapes` by name, tied ones once; adapters are merged.

    A tensor may be part of a parameter, which stays until another is read: in `shapes`, all tensors
    of one are adjacent.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        prefix: str = "",
        head: Mapping[str, nn.Parameter] = NO_HEAD,
    ) -> None:
        self._buffers = checkpoint_buffers(lm, prefix)
        own = {f"{prefix}{name}": param for name, param in checkpoint_parameters(lm)}
        self._parameters: dict[str, Tensor] = {**own, **head, **self._buffers}
        self._scaling = {f"{name}.weight": layer.scaling for name, layer in adapters(lm).items()}
        self._parts = parts_of(lm, self._parameters)
        self._last: tuple[str, Tensor] | None = None
        self.shapes = {name: torch.Size(part.shape) for name, part in self._parts.items()}

    def read(self, name: str) -> Tensor:
        """Read a tensor: float32, a view of its parameter."""
        part = self._parts[name]
        if self._last is None or self._last[0] != part.parameter:
            self._last = None  # its memory is free before the next is read
            self._last = (part.parameter, self._merged(part.parameter))
        return part.of(self._last[1][part.at])

    def _merged(self, name: str) -> Tensor:
        base = self._whole(name)
        if name not in self._scaling:
            return base
        layer = name.removesuffix(".weight")
        a, b = (self._whole(f"{layer}.{factor}.weight") for factor in ("lora_A", "lora_B"))
        return torch.addmm(base, b, a, alpha=self._scaling[name])

    @abstractmethod
    def _whole(self, name: str) -> Tensor:
        """Return a whole parameter of the model without adapters, or of an adapter; float32."""


class StoredPolicy(PolicyWeights):
    """Actor weights of a checkpoint, read on demand, on CPU.

    Random weights that were not trained are drawn again, on device type `drawn_on`.

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
        self._checkpoint = StoredState(state)
        freeze_unless_stored(self._lm, self._checkpoint)
        super().__init__(self._lm)
        trained = {
            f"{PREFIX}{name}": param
            for name, param in self._lm.named_parameters()
            if param.requires_grad
        }
        if differing := differences(trained, self._checkpoint.tensors, PREFIX):
            listed = "\n".join(differing)
            raise ConfigError(
                f"{state.parent} holds other weights than model.path = {model.path} "
                f"has:\n{listed}\nGive the model that was trained: --model PATH"
            )

    def adapters(self) -> dict[str, Tensor]:
        """Return the adapters' weights by peft's names, float32 on CPU."""
        return {f"{PEFT}{name}": self._whole(name) for name in adapter_parameters(self._lm)}

    def _whole(self, name: str) -> Tensor:
        if f"{PREFIX}{name}" in self._checkpoint.tensors:
            return self._checkpoint.read(f"{PREFIX}{name}")
        if name in self._buffers and self._model.init is Init.random:
            return self._buffers[name]
        everything = (slice(None),) * self._parameters[name].ndim
        return self._base[name][everything].to("cpu", torch.float32)

    @cached_property
    def _base(self) -> FirstWeights:
        """Open or draw the base weights."""
        on_gpu = self._drawn_on is Accelerator.gpu
        if on_gpu and self._model.init is Init.random and not torch.cuda.is_available():
            raise ConfigError(
                "model.init = random: the run drew weights that it did not train on a GPU, whose "
                "numbers a CPU does not draw.\nExport on a machine with a GPU."
            )
        device = torch.device("cuda" if on_gpu else "cpu")
        shapes = {name: param.shape for name, param in self._parameters.items()}
        return first_weights(self._model, self._lm, shapes, device)


def freeze_unless_stored(lm: PreTrainedModel, checkpoint: StoredState) -> None:
    """Freeze what makes states of images if a checkpoint has none of it: it was not trained."""
    own = {param for part in vision_parts(lm) for param in part.parameters()}
    names = (name for name, param in checkpoint_parameters(lm) if param in own)
    if not any(f"{PREFIX}{name}" in checkpoint.tensors for name in names):
        freeze_vision(lm)


class GatheredWeights(PolicyWeights):
    """Weights of an idle policy, each gathered on the device when it is read.

    Reads are collectives. All ranks read all weights in the order of `shapes`; a rank that stops
    early calls `read_rest`.
    """

    def __init__(self, root: TokenLogProbs) -> None:
        free_gathered_weights(root)
        super().__init__(root.lm)
        self._sharded = self._parameters | adapter_parameters(root.lm)
        self._rest = list(self.shapes)

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Gather the next weight: float32 on the device, perhaps a view of a larger storage."""
        assert name == self._rest.pop(0), name
        position.at("gathered weight", len(self.shapes) - len(self._rest), len(self.shapes))
        return super().read(name)

    def _whole(self, name: str) -> Tensor:
        return self._buffers[name] if name in self._buffers else self._sharded[name].full_tensor()

    def read_rest(self) -> None:
        """Join the collectives of the weights that were not read."""
        while self._rest:
            self.read(self._rest[0])


class GatheredClassifier(GatheredWeights):
    """Weights of an idle reward model, likewise, by names of transformers' sequence classifiers."""

    def __init__(self, root: ScalarModel) -> None:
        free_gathered_weights(root)
        prefix, head = f"{root.backbone.base_model_prefix}.", {"score.weight": root.head.weight}
        PolicyWeights.__init__(self, root.backbone, prefix, head)
        self._sharded, self._rest = self._parameters, list(self.shapes)


def adapter_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """Gather the adapters' float32 weights by peft's names, on rank 0's CPU; a collective."""
    free_gathered_weights(root)
    kept = {}
    for name, weight in adapter_parameters(root.lm).items():
        whole = weight.detach().full_tensor()
        if dist.get_rank() == 0:  # a copy: it may be a view of a padded, larger storage
            kept[f"{PEFT}{name}"] = whole.to("cpu", copy=True)
    return kept
