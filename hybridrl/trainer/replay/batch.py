"""Files of an update's batch, with all inputs of its forward passes and losses.

batch.safetensors   the responses with all fields
batch.json          step, role, schedule, config without secrets, decoded texts
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrl.config.errors import ConfigError
from hybridrl.config.load import load_resolved
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.untrusted_code import refuse_untrusted_code
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import Epochs
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.tracking.best_effort_files import replace_file, replace_text
from hybridrl.trainer.tracking.provenance import plain

REPLAY_FOLDER = "replay"
TENSORS_FILE, FACTS_FILE = "batch.safetensors", "batch.json"
FORMAT = 1
PROMPT_LENGTHS, RESPONSE_LENGTHS = "lengths.prompts", "lengths.responses"
# Ragged fields, with the lengths of prompts or responses.
_RAGGED = frozenset(f.name for f in fields(RolloutBatch) if "Ragged" in str(f.type))


class ReplayBatch(NamedTuple):
    """Update of an actor or critic that was not finite.

    Attributes:
        kl_coef: weight of the KL penalty in the loss.
        batch: the responses with all fields of the update.
        ranks: for each rank, indices into `batch` by epoch, mini-batch and micro-batch.
    """

    role: str
    step: int
    kl_coef: float
    batch: RolloutBatch
    ranks: list[Epochs]
    config: RunConfig


class Texts(NamedTuple):
    """Decoded prompt and response, special tokens left out."""

    group_id: int
    prompt: str
    response: str


def write_replay(folder: Path, replay: ReplayBatch) -> None:
    """Write both files into a new `folder`.

    Raises:
        OSError: the write failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batch = replay.batch
    tensors = {PROMPT_LENGTHS: batch.prompts.lengths, RESPONSE_LENGTHS: batch.responses.lengths}
    for name, value in vars(batch).items():
        if value is not None:
            tensors[name] = value.values if isinstance(value, Ragged) else value
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    replace_file(folder / TENSORS_FILE, lambda new: _save(tensors, new))
    facts = {
        "format": FORMAT,
        "role": replay.role,
        "step": replay.step,
        "kl_coef": replay.kl_coef,
        "config": plain(replay.config),
        "ranks": replay.ranks,
        "texts": [text._asdict() for text in texts_of(replay)],
    }
    replace_text(folder / FACTS_FILE, json.dumps(facts) + "\n")


def read_replay(folder: Path, *, runs_code: bool) -> ReplayBatch:
    """Read the files of `write_replay`.

    Args:
        folder: of the batch.
        runs_code: allow imports of code outside hybridrl that its config names.

    Raises:
        ConfigError: the batch is missing or damaged, or names foreign code.
    """
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        batch = _batch(load_file(folder / TENSORS_FILE))
        if facts["format"] != FORMAT or facts["role"] not in ("actor", "critic"):
            raise ValueError(f"format {facts['format']}, role {facts['role']}")
        step, kl_coef, ranks = int(facts["step"]), float(facts["kl_coef"]), facts["ranks"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} does not hold a batch to replay ({type(error).__name__}: {error}).\n"
            f"Name a folder <run>/{REPLAY_FOLDER}/step_<n> of a run that was stopped because its "
            "steps were not finite."
        ) from error
    if not runs_code:
        refuse_untrusted_code(facts["config"], str(folder))
    return ReplayBatch(facts["role"], step, kl_coef, batch, ranks, load_resolved(facts["config"]))


def texts_of(replay: ReplayBatch) -> list[Texts]:
    """Decode prompts and responses."""
    decode, batch = decoder(load_tokenizer(replay.config.model.path)), replay.batch
    prompts = decode(row.tolist() for row in batch.prompts.rows())
    responses = decode(row.tolist() for row in batch.responses.rows())
    rows = zip(batch.group_id.tolist(), prompts, responses, strict=True)
    return [Texts(*row) for row in rows]


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # also raised if the disk is full
        raise OSError(str(error)) from error


def _batch(tensors: dict[str, Tensor]) -> RolloutBatch:
    lengths = {"prompts": tensors.pop(PROMPT_LENGTHS)}
    responses = tensors.pop(RESPONSE_LENGTHS)
    values: dict[str, Any] = {
        name: Ragged(tensor, lengths.get(name, responses)) if name in _RAGGED else tensor
        for name, tensor in tensors.items()
    }
    return RolloutBatch(**values)
