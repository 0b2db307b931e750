"""Initial weights of a model: from a checkpoint, or drawn on the device from config.json."""

import copy
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import VISION, check_settings
from hybridrl.config.schema import ModelConfig
from hybridrl.data.seeds import derive_seed
from hybridrl.distributed.experts import (
    CheckpointTensor,
    checkpoint_tensors,
    parts_of,
    replace_experts,
)
from hybridrl.distributed.forward.attention import (
    PACKED_ATTENTION,
    TOWER_ATTENTION,
    register_packed_attention,
)
from hybridrl.distributed.forward.layers import check_layers, hand_on_bounds
from hybridrl.distributed.forward.routers import Router
from hybridrl.distributed.forward.vision import text_config, vision_parts
from hybridrl.distributed.lora import LoRALinear, checkpoint_buffers, checkpoint_parameters
from hybridrl.distributed.torch_compat import real_tensors
from hybridrl.models.resolve import model_folder
from hybridrl.models.weight_files import PICKLED, weight_files

Auto = type[AutoModel] | type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]
# Attention by part of a model as it is built; a tower gets its own after that.
ATTENTION = {"": PACKED_ATTENTION, "text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
# Shapes of whole tensors, by checkpoint name.
Shapes = Mapping[str, torch.Size]

# Prefix of names in a model with a head; a folder of a backbone has none. Folders of models that
# take images have more, before the head, too.
PREFIX, LANGUAGE_MODEL = "model.", "language_model."
TEXT_PREFIXES = (f"{PREFIX}{LANGUAGE_MODEL}", PREFIX, f"{LANGUAGE_MODEL}{PREFIX}", LANGUAGE_MODEL)
# Of two tied tensors a folder may have either.
EMBEDDING, HEADS = "embed_tokens.weight", ("lm_head.weight", f"{LANGUAGE_MODEL}lm_head.weight")


class Stack:
    """Tensors of a folder as one, along a new first dim; only what is indexed is read."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """Return a part of the stack, by one slice per dim."""
        chosen = range(len(self._parts))[where[0]]
        if not chosen:
            return self._parts[0][where[1:]][None][:0]
        return torch.stack([self._parts[index][where[1:]] for index in chosen])


class Transposed:
    """Tensor of a folder with its last two dims in the other order; reads what is indexed."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """Return a part, by one slice per dim."""
        *first, row, column = where
        part: Tensor = self._stored[*first, column, row]
        return part.mT


def stored_weights(
    folder: Path,
    lm: PreTrainedModel,
    shapes: Shapes,
    *,
    tied: bool,
    key: str = "model.path",
) -> dict[str, Any]:
    """Map the weights of a Hugging Face folder, of which each rank reads only its own parts.

    `shapes` are those of parameters of `lm`, which may be without data.
    Without *.safetensors, *.bin files are read, with weights_only; one from before torch 1.6 cannot
    be mapped. If `tied`, embedding and head are one tensor, which may have either name.

    Raises:
        ConfigError: the folder lacks weights, or they have other shapes.
    """
    stored: dict[str, Any] = {}  # tensors, or slices of safetensors
    for file in weight_files(folder) or weight_files(folder, *PICKLED):
        if file.suffix == ".safetensors":
            opened = safe_open(file, framework="pt")
            stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        else:
            can_map = zipfile.is_zipfile(file)
            stored |= torch.load(file, map_location="cpu", weights_only=True, mmap=can_map)
    mapped: dict[str, Any] = {}
    for parameter, tensors in checkpoint_tensors(lm, shapes).items():
        parts = [_stored(stored, tensor, tied=tied) for tensor in tensors]
        if all(part is not None for part in parts):
            if tensors[0].transposed:
                parts = [Transposed(part) for part in parts]
            mapped[parameter] = Stack(parts) if tensors[0].at else parts[0]
    missing = sorted(shapes.keys() - mapped.keys())
    if missing:
        raise ConfigError(
            f"{key} = {folder} lacks {len(missing)} of its weights: {', '.join(missing[:3])}...\n"
            f"The model would have random numbers there.\nSet {key} to a complete checkpoint."
        )
    return mapped


def _stored(stored: Mapping[str, Any], part: CheckpointTensor, *, tied: bool) -> Any:
    """Return a tensor of a folder under one of its names; None if it has none of this shape."""
    name = part.name
    own = name.removeprefix(LANGUAGE_MODEL).removeprefix(PREFIX).removeprefix(LANGUAGE_MODEL)
    heads = HEADS if tied and own == EMBEDDING else ()
    for other in [name, own, *(f"{prefix}{own}" for prefix in TEXT_PREFIXES), *heads]:
        if other in stored and _shape(stored[other]) == part.shape:
            return stored[other]
    return None


def _shape(stored: Any) -> torch.Size:
    return stored.shape if isinstance(stored, Tensor) else torch.Size(stored.get_shape())


@dataclass(frozen=True)
class RandomWeights:
    """Random weights, drawn tensor by tensor: normal matrices, and vectors as transformers' own.

    A tensor is a function of seed, name, shape and device type, so it is the same for every
    sharding. `std` is config.json's initializer_range, `vectors` are all vectors.
    """

    shapes: Shapes
    std: float
    seed: int
    device: torch.device
    vectors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """Draw the named tensor, float32."""
        whole = torch.empty(self.shapes[name], dtype=torch.float32, device=self.device)
        if whole.ndim == 1:
            return whole.copy_(self.vectors[name])
        seed = derive_seed(self.seed, "weights", name)
        generator = torch.Generator(self.device).manual_seed(seed)
        return whole.normal_(0.0, self.std, generator=generator)


# Initial weights by checkpoint name, the same for every sharding: tensors in their stored dtype, to
# be indexed by one slice per dim.
FirstWeights = dict[str, Any] | RandomWeights


def first_weights(
    model: ModelConfig, lm: PreTrainedModel, shapes: Shapes, device: torch.device
) -> FirstWeights:
    """Open or draw the weights of an empty model, according to model.init."""
    if model.init is Init.random:
        std = float(text_config(lm).initializer_range)
        vectors = first_vectors(lm, shapes, model.seed)
        return RandomWeights(shapes, std, model.seed, device, vectors)
    return stored_weights(model_folder(model), lm, shapes, tied=lm.config.tie_word_embeddings)


def first_vectors(lm: PreTrainedModel, shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Return each vector as transformers initialises its module, on a CPU.

    Raises:
        ConfigError: it does not.
    """
    known = dict(checkpoint_parameters(lm))
    vectors = {}
    for name, shape in shapes.items():
        own = name if name in known else name.removeprefix(PREFIX)
        if len(shape) > 1 or own not in known:  # buffers keep theirs
            continue
        owner, _, attribute = own.rpartition(".")
        layer = lm.get_submodule(owner)
        base = layer.base_layer if isinstance(layer, LoRALinear) else layer
        (base,) = getattr(base, "replaced", (base,))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights", name))
            vectors[name] = _first_values(lm, base, attribute)
        if vectors[name].isnan().any():
            raise ConfigError(
                f"model.init = random: transformers does not initialise {name} of "
                f"{type(base).__name__}.\nSet model.init=pretrained"
            )
    return vectors


def _first_values(lm: PreTrainedModel, module: nn.Module, attribute: str) -> Tensor:
    """Return the first values of a vector of a module, which stays as it is."""
    if isinstance(module, Router):  # which transformers does not know
        return torch.full(module.get_parameter(attribute).shape, float(attribute != "bias"))
    fresh = copy.copy(module)
    with real_tensors():
        sizes = {n: p.shape for n, p in module._parameters.items() if p is not None}
        values = {n: torch.zeros(size[:1]) for n, size in sizes.items()}
        values[attribute] = torch.full(tuple(sizes[attribute]), math.nan)
        fresh._parameters = {n: nn.Parameter(value) for n, value in values.items()}
        lm._init_weights(fresh)
        return fresh._parameters[attribute].detach()  # type: ignore[union-attr]


def empty_model(auto: Auto, folder: Path) -> PreTrainedModel:
    """Build a model with parameters on the meta device; buffers (rotary frequencies) are real.

    Raises:
        ConfigError: the architecture is not supported.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_settings(config.to_dict())
    register_packed_attention()
    if auto is AutoModelForCausalLM:
        auto = class_with_head(config.model_type)
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(
            settled(config),
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            trust_remote_code=False,
        )
    if vision_parts(model):
        model.config.vision_config._attn_implementation = TOWER_ATTENTION
    check_layers(model)
    replace_experts(model)
    hand_on_bounds(model)
    model.tie_weights()
    return model


def class_with_head(kind: str) -> Auto:
    """Return transformers' class that builds a family's causal language model, images included."""
    return AutoModelForImageTextToText if kind in VISION else AutoModelForCausalLM


def settled(config: Any) -> Any:
    """Return transformers' configuration, where vLLM reads another part of it than transformers."""
    if config.model_type == "mistral3":
        config.tie_word_embeddings = config.text_config.tie_word_embeddings
    return config


def checkpoint_sources(folder: Path) -> list[CheckpointTensor]:
    """Return every tensor of the causal LM's checkpoint by config.json, tied ones twice."""
    lm = empty_model(AutoModelForCausalLM, folder)
    parameters = dict(lm.named_parameters(remove_duplicate=False)) | checkpoint_buffers(lm)
    return list(parts_of(lm, parameters).values())
