"""A model's first weights: from a checkpoint, or drawn on the device from config.json alone."""

from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.distributed.attention import PACKED_ATTENTION, register_packed_attention
from hybridrl.distributed.reading_once import known_reads
from hybridrl.models.resolve import model_folder

# Others may scale logits or cap attention scores, which the forwards here would leave out.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

Auto = type[AutoModel] | type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]


class FirstWeights(Protocol):
    """Gives every rank a whole tensor, the same on all of them; calls may be collectives."""

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """The float32 tensor of a checkpoint name, on the device."""
        ...


def first_weights(
    model: ModelConfig, empty: PreTrainedModel, auto: Auto, device: torch.device
) -> FirstWeights:
    """Where the weights of an empty model come from, as model.init says.

    Args:
        model: what to load.
        empty: its model without weights.
        auto: the class that made it.
        device: of the tensors.

    Raises:
        ConfigError: the checkpoint lacks weights.
    """
    if model.init is Init.random:
        return RandomWeights(empty.config.initializer_range, model.seed, device)
    return CheckpointWeights(auto, model_folder(model), device)


class CheckpointWeights:
    """A checkpoint's weights. Rank 0 alone reads them and sends each tensor on.

    Args:
        auto: AutoModel for those of the backbone alone; others also have a head's.
        folder: of the checkpoint.
        device: of the tensors.

    Raises:
        ConfigError: the checkpoint lacks weights.
    """

    def __init__(self, auto: Auto, folder: Path, device: torch.device) -> None:
        self._device = device
        self._weights = _read_once(auto, folder) if dist.get_rank() == 0 else {}

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """The named tensor, broadcast from rank 0."""
        whole = torch.empty(shape, dtype=torch.float32, device=self._device)
        if dist.get_rank() == 0:
            whole.copy_(self._weights[name])
        dist.broadcast(whole, src=0)
        return whole


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
        """The named tensor."""
        whole = torch.empty(shape, dtype=torch.float32, device=self._device)
        if len(shape) == 1:
            return whole.fill_(0.0 if name.endswith(".bias") else 1.0)
        seed = derive_seed(self._seed, "weights", name)
        generator = torch.Generator(self._device).manual_seed(seed)
        return whole.normal_(0.0, self._std, generator=generator)


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


def _read_once(auto: Auto, folder: Path) -> dict[str, Tensor]:
    """As `read_checkpoint`, which takes tens of seconds for 7 B: roles share the last folder's."""
    known = known_reads()
    if not any(known_folder == folder for _, known_folder in known):
        known.clear()
    # A causal LM has its backbone under the names that AutoModel gives it.
    if auto is AutoModel and (AutoModelForCausalLM, folder) in known:
        return known[AutoModelForCausalLM, folder]
    if (auto, folder) not in known:
        known[auto, folder] = read_checkpoint(auto, folder)
    return known[auto, folder]


def read_checkpoint(auto: Auto, folder: Path) -> dict[str, Tensor]:
    """A model's weights in float32 on CPU, by checkpoint name; tied ones once.

    Raises:
        ConfigError: the folder lacks some.
    """
    model, report = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        weights_only=True,
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        names = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        listed = f"{folder} lacks {len(names)} of its weights: {', '.join(names[:3])}"
        if auto is AutoModelForSequenceClassification:
            raise ConfigError(
                f"reward_model.model.path = {listed}.\n"
                f"Scores would come from random numbers there.\n"
                f"Name a complete checkpoint of a reward model."
            )
        raise ConfigError(
            f"model.path = {listed}...\n"
            f"Training would start from random numbers there.\n"
            f"Set model.path to a complete checkpoint, or model.init=random."
        )
    prefix = f"{model.base_model_prefix}." if auto is AutoModel else ""
    return {prefix + name: param.detach() for name, param in model.named_parameters()}
