"""A model's first weights: from a checkpoint, or drawn on the device from config.json alone."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.distributed.forward.attention import PACKED_ATTENTION, register_packed_attention
from hybridrl.distributed.storage.mapped_weights import MappedWeights, Part
from hybridrl.models.resolve import model_folder

# Others may scale logits or cap attention scores, which the forwards here would leave out.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

Auto = type[AutoModel] | type[AutoModelForCausalLM]
# Of whole tensors, by checkpoint name.
Shapes = Mapping[str, torch.Size]


class Lacking(Enum):
    """What the user is told of a folder that lacks weights."""

    policy = (
        "model.path = {}...\n"
        "Training would start from random numbers there.\n"
        "Set model.path to a complete checkpoint, or model.init=random."
    )
    reward_model = (
        "reward_model.model.path = {}.\n"
        "Scores would come from random numbers there.\n"
        "Name a complete checkpoint of a reward model."
    )


class FirstWeights(Protocol):
    """Gives parts of a model's weights, the same for every way of cutting them."""

    def part(self, name: str, shape: torch.Size, where: Part) -> Tensor:
        """Give a part of the tensor of a checkpoint name, in the dtype that it is stored in."""
        ...


def first_weights(
    model: ModelConfig, lm: PreTrainedConfig, shapes: Shapes, device: torch.device
) -> FirstWeights:
    """Open or draw the weights of an empty model, as model.init says.

    Args:
        model: what to load.
        lm: its config.json.
        shapes: of the weights that will be asked for, by checkpoint name.
        device: where random ones are drawn.

    Raises:
        ConfigError: the checkpoint lacks weights.
    """
    if model.init is Init.random:
        return RandomWeights(lm.initializer_range, model.seed, device)
    return CheckpointWeights(model_folder(model), shapes, tied=lm.tie_word_embeddings)


class CheckpointWeights:
    """A checkpoint's weights, of which each rank reads its own parts and no others.

    No rank reads for others: on a local disk or a shared one the parts of all ranks together are
    one checkpoint, and nothing waits for the slowest of them or passes through one process.

    Args:
        folder: of the checkpoint.
        shapes: of the weights that will be asked for, by checkpoint name.
        tied: whether embedding and head are one tensor, which may have either's name.
        lacking: what the user is told of a folder without some of them, after its name.

    Raises:
        ConfigError: the folder lacks some, or they have other shapes.
    """

    def __init__(
        self, folder: Path, shapes: Shapes, *, tied: bool, lacking: Lacking = Lacking.policy
    ) -> None:
        self._files = MappedWeights(folder)
        self._names = self._files.names(shapes, tied=tied)
        missing = sorted(shapes.keys() - self._names.keys())
        if missing:
            listed = f"{folder} lacks {len(missing)} of its weights: {', '.join(missing[:3])}"
            raise ConfigError(lacking.value.format(listed))

    def part(self, name: str, shape: torch.Size, where: Part) -> Tensor:
        """Map a part of the named tensor: a view of its file."""
        return self._files.part(self._names[name], where)


class RandomWeights:
    """Weights drawn tensor by tensor: normal matrices, norms of 1 and biases of 0.

    A tensor is a function of the seed, its name and its shape (and of the kind of device), so that
    it is the same on all ranks and for every way of sharding. Nothing passes through host memory.

    Args:
        std: standard deviation of matrices: config.json's initializer_range.
        seed: of all tensors.
        device: where they are drawn.
    """

    def __init__(self, std: float, seed: int, device: torch.device) -> None:
        self._std = std
        self._seed = seed
        self._device = device

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """The named tensor, float32."""
        whole = torch.empty(shape, dtype=torch.float32, device=self._device)
        if len(shape) == 1:
            return whole.fill_(0.0 if name.endswith(".bias") else 1.0)
        seed = derive_seed(self._seed, "weights", name)
        generator = torch.Generator(self._device).manual_seed(seed)
        return whole.normal_(0.0, self._std, generator=generator)

    def part(self, name: str, shape: torch.Size, where: Part) -> Tensor:
        """Draw the named tensor and give a part of it."""
        return self(name, shape)[where]


def empty_model(auto: Auto, folder: Path) -> PreTrainedModel:
    """The model with parameters on the meta device; buffers (rotary frequencies) are computed.

    Raises:
        ConfigError: the architecture is not supported.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model.path = {folder} is a {config.model_type} model; supported are "
            f"{', '.join(MODEL_TYPES)}.\nThe packed forward has been checked for these only.\n"
            f"Set model.path to one of them."
        )
    register_packed_attention()
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            trust_remote_code=False,
        )
    model.tie_weights()
    return model


def checkpoint_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the causal LM by checkpoint name, tied duplicates included.

    Raises:
        ConfigError: the architecture is not supported.
    """
    empty = empty_model(AutoModelForCausalLM, model_folder(model))
    named = empty.named_parameters(remove_duplicate=False)
    return {name: tuple(param.shape) for name, param in named}
