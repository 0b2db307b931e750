"""Export of a trained model as a Hugging Face folder, and of adapters in peft's format.

weights: names and shapes -> files of 5 GB -> each tensor is read, cast, written and dropped
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.checkpoint.files import exists, put_in_place, remove, sync_file, sync_folder
from hybridrl.config.choices import Accelerator, DType, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.distributed import position
from hybridrl.distributed.experts import expert_names, parts_of
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    checkpoint_parameters,
)
from hybridrl.distributed.regions import free_gathered_weights
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.distributed.storage.safetensors_file import header, naming, pieces, write_parts
from hybridrl.distributed.weights import FirstWeights, empty_model, first_weights
from hybridrl.models.export_record import RECORD, files_in, in_between
from hybridrl.models.resolve import plain_folder
from hybridrl.models.weight_files import INDEX

# Folder of adapters inside the folder of the merged model.
ADAPTER_FOLDER = "adapter"
# Files beside the weights: tokenizer, chat template, generation config.
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# Prefix of the policy's weights in a checkpoint.
PREFIX = "actor.weights."
SHARD_BYTES = 5 * 10**9


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
        self._parts = parts_of(parameters, expert_names(self._lm))
        self.shapes = {name: torch.Size(part.shape) for name, part in self._parts.items()}
        self._found = StoredState(state)
        self._last = ("", torch.empty(0))
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
        parameter, index = self._parts[name][2:]
        if self._last[0] != parameter:  # all experts of a layer, one after the other
            self._last = ("", torch.empty(0))
            self._last = (parameter, self._merged(parameter))
        return self._last[1][index]

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
        self._parts = parts_of(self._parameters, expert_names(root.lm))
        self._rest = list(self._parts)
        self.shapes = {name: torch.Size(part.shape) for name, part in self._parts.items()}
        self._last = ("", torch.empty(0))

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Gather the next weight: float32 on the device, perhaps a view of a larger storage."""
        assert name == self._rest.pop(0), name
        position.at("gathered weight", len(self.shapes) - len(self._rest), len(self.shapes))
        parameter, index = self._parts[name][2:]
        if self._last[0] != parameter:  # all experts of a layer, one after the other
            self._last = ("", torch.empty(0))
            self._last = (parameter, self._gathered(parameter))
        return self._last[1][index]

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


@dataclass(frozen=True)
class AdapterFiles:
    """Adapters in peft's format: float32 weights by peft's names; name or folder of the base."""

    weights: dict[str, Tensor]
    lora: LoRAConfig
    base: str

    def write(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors into a new folder."""
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": sorted(self.lora.target_modules),
            "inference_mode": True,
        }
        _write_json(folder / "adapter_config.json", config)
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        parts = _parts(shapes, self.weights.__getitem__, torch.float32)
        write_parts(folder / "adapter_model.safetensors", parts)


def write_model(
    weights: Weights,
    source: Path,
    target: Path,
    adapter: AdapterFiles | None = None,
    *,
    dtype: DType = DType.float32,
    record: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, tied tensors once, with configuration and tokenizer of their `source` model.

    The folder gets its name, and replaces an older one, only when it is complete on disk. Host
    memory holds one tensor at a time.

    Args:
        adapter: adapters that are merged into `weights`, written to target/adapter.
        record: provenance, written to hybridrl_export.json with a list of the files.
        shard_bytes: largest size of a weight file of several tensors.

    Raises:
        OSError: a write failed, or a read of a file in `source`, which is named; `target` is
            unchanged.
    """
    partial, _ = in_between(target)
    with ExitStack() as stack:
        remove(partial)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_around(source, partial, dtype)
        _write_weights(weights, partial, getattr(torch, dtype.value), shard_bytes)
        if adapter is not None:
            adapter.write(partial / ADAPTER_FOLDER)
        if record is not None:
            _write_json(partial / RECORD, {**record, "files": files_in(partial)})
        for at, _, names in os.walk(partial):
            for name in names:
                sync_file(Path(at, name))
            sync_folder(Path(at))
        _put_in_place(partial, target)


def _copy_around(source: Path, folder: Path, dtype: DType) -> None:
    """Copy all files except the weights."""
    for path in sorted(source.iterdir()):
        is_ours = path.name == RECORD or path.name.endswith(".index.json")
        if path.suffix in COPIED_SUFFIXES and path.is_file() and not is_ours:
            with naming(path):
                content = path.read_bytes()
            (folder / path.name).write_bytes(content)
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype.value
    _write_json(folder / "config.json", config)
    if not (folder / GENERATION_CONFIG_NAME).is_file():  # older models keep it in their config
        read = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        GenerationConfig.from_model_config(read).save_pretrained(folder)


def _write_weights(weights: Weights, folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    shapes = weights.shapes
    groups = _groups({k: s.numel() * dtype.itemsize for k, s in shapes.items()}, shard_bytes)
    if len(groups) == 1:
        files = {"model.safetensors": groups[0]}
    else:
        last = f"{len(groups):05d}"
        files = {f"model-{n:05d}-of-{last}.safetensors": g for n, g in enumerate(groups, 1)}
    for file, names in files.items():
        parts = _parts({name: shapes[name] for name in names}, weights.read, dtype)
        write_parts(folder / file, parts)
    if len(groups) > 1:
        size = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        places = {name: file for file, names in files.items() for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _groups(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names, in order, into groups of at most `limit` bytes or a single name."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def _parts(
    shapes: Mapping[str, torch.Size], read: Callable[[str], Tensor], dtype: torch.dtype
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these tensors, piece by piece."""
    yield header({name: (dtype, shape) for name, shape in shapes.items()}, {"format": "pt"})
    for name in shapes:
        yield from pieces(read(name), dtype)


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename the old folder away and the new one to its final name."""
    _, aside = in_between(target)
    if exists(target):
        remove(aside)
    put_in_place(partial, target, aside)
    sync_folder(target.parent)
    remove(aside)
