"""Export of a trained model as a Hugging Face folder, and of adapters in peft's format.

weights: names and shapes -> files of 5 GB -> each tensor is read, cast, written and dropped
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.checkpoint.files import exists, put_in_place, remove, sync_folder, sync_tree
from hybridrl.config.choices import DType
from hybridrl.config.schema import LoRAConfig
from hybridrl.distributed.storage.policy_weights import GatheredWeights, PolicyWeights
from hybridrl.distributed.storage.safetensors_file import header, naming, pieces, write_parts
from hybridrl.models.export_record import RECORD, files_in, in_between
from hybridrl.models.resolve import PLAIN_FILES
from hybridrl.models.weight_files import INDEX, SINGLE

# Folder of adapters inside the folder of the merged model.
ADAPTER_FOLDER, ADAPTER_CONFIG = "adapter", "adapter_config.json"
SHARD_BYTES = 5 * 10**9
# Ends of names of tensors that vLLM keeps in float32: decays of states, offsets of routers.
IN_FLOAT32 = ("A_log", "e_score_correction_bias")
UNCHANGED: Mapping[str, Any] = MappingProxyType({})


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
            "target_modules": self._targets(),
            "inference_mode": True,
        }
        _write_json(folder / ADAPTER_CONFIG, config)
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        dtypes = dict.fromkeys(shapes, torch.float32)
        parts = _parts(shapes, self.weights.__getitem__, dtypes)
        write_parts(folder / "adapter_model.safetensors", parts)

    def _targets(self) -> list[str] | str:
        """Return peft's names of the adapted layers; not those of a tower with the same names."""
        names = sorted(self.lora.target_modules)
        is_part = any(".language_model." in name for name in self.weights)
        return rf".*\.language_model\..*\.({'|'.join(names)})" if is_part else names


def write_model(
    weights: PolicyWeights,
    source: Path,
    target: Path,
    adapter: AdapterFiles | None = None,
    *,
    dtype: DType = DType.float32,
    record: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Any] = UNCHANGED,
) -> None:
    """Write weights, tied tensors once, with configuration and tokenizer of their `source` model.

    The folder gets its name, and replaces an older one, only when it is complete on disk. Host
    memory holds one tensor at a time.

    Args:
        adapter: adapters that are merged into `weights`, written to target/adapter.
        record: provenance, written to hybridrl_export.json with a list of the files.
        shard_bytes: largest size of a weight file of several tensors.
        changes: of config.json.

    Raises:
        OSError: a write failed, or a read of a file in `source`, which is named; `target` is
            unchanged.
    """
    partial, _ = in_between(target)
    with ExitStack() as stack:
        remove(partial)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_around(source, partial, {**changes, "dtype": dtype.value})
        _write_weights(weights, partial, getattr(torch, dtype.value), shard_bytes)
        if adapter is not None:
            adapter.write(partial / ADAPTER_FOLDER)
        if record is not None:
            _write_json(partial / RECORD, {**record, "files": files_in(partial)})
        sync_tree(partial)
        _put_in_place(partial, target)


def write_gathered(weights: GatheredWeights, source: Path, folder: str, **more: Any) -> str | None:
    """Write a model that all ranks gather as `write_model` does, on rank 0; a collective.

    Returns an error message of the disk, or None.
    """
    try:
        if dist.get_rank() == 0:
            write_model(weights, source, Path(folder), **more)
    except OSError as error:
        return str(error)
    finally:
        weights.read_rest()
    return None


def _copy_around(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Copy all files except the weights, with `changes` of config.json."""
    for path in sorted(source.iterdir()):
        # With adapter_config.json transformers would look for an adapter beside the whole weights.
        is_ours = path.name in (RECORD, ADAPTER_CONFIG) or path.name.endswith(".index.json")
        if any(map(path.match, PLAIN_FILES)) and path.is_file() and not is_ours:
            with naming(path):
                content = path.read_bytes()
            (folder / path.name).write_bytes(content)
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    _write_json(folder / "config.json", config | dict(changes))
    if not (folder / GENERATION_CONFIG_NAME).is_file():  # older models keep it in their config
        read = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # As it is: save_pretrained raises an error for some values, such as pad_token_id = -1.
        generation = GenerationConfig.from_model_config(read).to_dict()
        _write_json(folder / GENERATION_CONFIG_NAME, generation)


def _write_weights(
    weights: PolicyWeights, folder: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    shapes = weights.shapes
    dtypes = {k: torch.float32 if k.endswith(IN_FLOAT32) else dtype for k in shapes}
    sizes = {k: s.numel() * dtypes[k].itemsize for k, s in shapes.items()}
    groups = _groups(sizes, shard_bytes)
    last = f"{len(groups):05d}"
    files = {f"model-{n:05d}-of-{last}.safetensors": names for n, names in enumerate(groups, 1)}
    if len(groups) == 1:
        files = {SINGLE: groups[0]}
    for file, names in files.items():
        parts = _parts({name: shapes[name] for name in names}, weights.read, dtypes)
        write_parts(folder / file, parts)
    if len(groups) > 1:
        size = sum(sizes.values())
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
    shapes: Mapping[str, torch.Size],
    read: Callable[[str], Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these tensors, piece by piece."""
    yield header({name: (dtypes[name], shape) for name, shape in shapes.items()}, {"format": "pt"})
    for name in shapes:
        yield from pieces(read(name), dtypes[name])


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename the old folder away and the new one to its final name."""
    _, aside = in_between(target)
    if exists(target):
        remove(aside)
    put_in_place(partial, target, aside)
    sync_folder(target.parent)
    remove(aside)
