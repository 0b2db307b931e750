"""The policy of a run's checkpoint as ordinary weights, in one process without a GPU."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Accelerator, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.distributed.checkpoint import differences, read_some, stored_tensors
from hybridrl.distributed.lora import adapters, add_adapters, checkpoint_parameters
from hybridrl.distributed.weights import RandomWeights, empty_model, read_checkpoint
from hybridrl.models.resolve import model_folder, plain_folder

# Of the keys of the policy's weights in a checkpoint.
PREFIX = "actor.weights."


class StoredPolicy:
    """The weights of a checkpoint's actor by their names in the model's own checkpoint.

    Adapters are merged as their weights are read: then the model that they adapt is in memory,
    whole and in float32. Without adapters nothing is.

    Args:
        state: the checkpoint's folder of shards.
        model: what was trained.
        lora: its adapters, if it has some.
        drawn_on: where the run drew the weights under adapters, if model.init=random.

    Raises:
        ConfigError: the checkpoint holds the weights of another model, or there is no such model.
        DamagedCheckpoint: parts of a tensor are missing.
    """

    def __init__(
        self,
        state: Path,
        model: ModelConfig,
        lora: LoRAConfig | None,
        drawn_on: Accelerator,
    ) -> None:
        self._state, self._model = state, model
        self._lora, self._drawn_on = lora, drawn_on
        self._lm = empty_model(AutoModelForCausalLM, plain_folder(model.path))
        if lora is not None:
            add_adapters(self._lm, lora)
        self._found = stored_tensors(state)
        self._check()

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes by checkpoint name, tied tensors once."""
        return {name: param.shape for name, param in checkpoint_parameters(self._lm)}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some of the weights, merged; float32 on CPU."""
        if self._lora is None:
            return self._stored(names)
        return {name: self._merged(name) for name in names}

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names, float32 on CPU."""
        names = {
            f"{layer}.{factor}.weight": f"base_model.model.{layer}.{factor}.weight"
            for layer in adapters(self._lm)
            for factor in ("lora_A", "lora_B")
        }
        return {names[name]: weight for name, weight in self._stored(list(names)).items()}

    def _check(self) -> None:
        """Refuse a checkpoint of another model."""
        trained = {
            f"{PREFIX}{name}": param
            for name, param in self._lm.named_parameters()
            if param.requires_grad
        }
        found = differences(trained, self._found, PREFIX)
        if found:
            listed = "\n".join(found)
            raise ConfigError(
                f"{self._state.parent} holds other weights than model.path = {self._model.path} "
                f"has:\n{listed}\nGive the model that was trained: --model PATH"
            )

    def _stored(self, names: Sequence[str]) -> dict[str, Tensor]:
        wanted = {f"{PREFIX}{name}": self._found[f"{PREFIX}{name}"] for name in names}
        found = read_some(self._state, wanted)
        return {name: found[f"{PREFIX}{name}"] for name in names}

    @cached_property
    def _base(self) -> dict[str, Tensor]:
        """The weights under the adapters."""
        if self._model.init is Init.pretrained:
            return read_checkpoint(AutoModelForCausalLM, model_folder(self._model))
        on_gpu = self._drawn_on is Accelerator.gpu
        if on_gpu and not torch.cuda.is_available():
            raise ConfigError(
                "model.init = random: the run drew the weights under its adapters on a GPU, whose "
                "numbers a CPU does not draw.\nExport on a machine with a GPU."
            )
        device = torch.device("cuda" if on_gpu else "cpu")
        first = RandomWeights(self._lm.config.initializer_range, self._model.seed, device)
        return {name: first(name, shape).cpu() for name, shape in self.shapes.items()}

    def _merged(self, name: str) -> Tensor:
        layers, layer = adapters(self._lm), name.removesuffix(".weight")
        if layer not in layers:
            return self._base[name]
        stored = self._stored([f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"])
        a, b = stored.values()
        return torch.addmm(self._base[name], b, a, alpha=layers[layer].scaling)
