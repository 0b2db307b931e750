"""Shapes that were derived from transformers' classes, kept by the hash of their config.json.

The derivation imports torch and transformers, which takes seconds, so that it has a process of its
own unless they are imported already. Files of a cache may be missing, broken or not writable: then
a shape is derived again.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ABSENT, ConfigError, Problem
from hybridrl.config.planner.cache import cache_folder
from hybridrl.config.planner.shape import (
    AttentionShape,
    ExpertShape,
    LayerShape,
    ModelShape,
    VisionShape,
)

logger = logging.getLogger(__name__)

DERIVATION = "hybridrl.distributed.description"
# What derives shapes: other code may derive others.
SOURCES = Path(__file__).parents[2] / "distributed"
# Shapes of embedded models, by `known_name`; tools/shapes.py writes them.
SHIPPED = Path(__file__).with_name("shapes.json")
# Keys of config.json that do not change a shape.
WITHOUT_EFFECT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
TIMEOUT_S = 300


def described(config: Mapping[str, object]) -> ModelShape:
    """Return the shape of a config.json's model, without `max_positions`.

    Raises:
        ConfigError: transformers does not have the model, or it is not one that is trained here.
    """
    return _described(text_of(config))


def is_described(config: Mapping[str, object]) -> bool:
    """Return whether `described` takes no time."""
    text = text_of(config)
    file = _file(text)
    return _can_derive() or known_name(text) in _shipped() or bool(file and file.exists())


def known_name(text: str) -> str:
    """Return the name of a config.json's text among the shipped shapes."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def text_of(config: Mapping[str, object]) -> str:
    """Return what of a config.json decides the shape."""
    kept = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
    return json.dumps(kept, sort_keys=True)


def _can_derive() -> bool:
    """Return whether what takes time to import is imported already."""
    return "transformers.models.auto.modeling_auto" in sys.modules


@functools.lru_cache(maxsize=64)
def _described(text: str) -> ModelShape:
    if (shipped := _shipped().get(known_name(text))) is not None:
        return from_data(shipped)
    file = _file(text)
    if file is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            return from_data(json.loads(file.read_bytes()))
    if _can_derive():
        shape: ModelShape = importlib.import_module(DERIVATION).describe(json.loads(text))
    else:
        shape = _in_a_process(text)
    if file is not None:
        with suppress(OSError):
            _keep(file, shape)
    return shape


@functools.cache
def _shipped() -> Mapping[str, Any]:
    shapes: dict[str, Any] = json.loads(SHIPPED.read_bytes())
    return shapes


def _file(text: str) -> Path | None:
    """Return the file of a shape in the cache; None if there is no home directory."""
    name = hashlib.sha256(f"{importlib.metadata.version('transformers')} {text}".encode())
    for source in (Path(__file__), *sorted(SOURCES.rglob("*.py"))):
        name.update(source.read_bytes())
    with suppress(ConfigError):
        return cache_folder() / "shapes" / f"{name.hexdigest()[:32]}.json"
    return None


def _in_a_process(text: str) -> ModelShape:
    """Derive a shape in a process, which takes some seconds."""
    kind = json.loads(text).get("model_type")
    logger.info("looking at what transformers' model of type %s computes, once", kind)
    command = [sys.executable, "-m", DERIVATION]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        reason = error if isinstance(error, OSError | subprocess.TimeoutExpired) else done.stderr
        why = f"what its model computes could not be derived: {str(reason).strip()[-500:]}"
        raise ConfigError(Problem("family", "model.path", why=why)) from error
    if "problems" in answer:
        raise ConfigError(*(Problem(**problem) for problem in answer["problems"]))
    return from_data(answer["shape"])


def from_data(data: Mapping[str, Any]) -> ModelShape:
    """Return a shape from the plain data that `dataclasses.asdict` makes of one."""
    kinds, vision = tuple(map(_layer_from_data, data["kinds"])), VisionShape(*data["vision"])
    return ModelShape(**{**data, "kinds": kinds, "order": tuple(data["order"]), "vision": vision})


def _layer_from_data(data: Mapping[str, Any]) -> LayerShape:
    attention, experts = data["attention"], data["experts"]
    return LayerShape(
        attention=None if attention is None else AttentionShape(*attention),
        recurrent=data["recurrent"],
        has_state=data["has_state"],
        experts=None if experts is None else ExpertShape(*experts),
        linear_layers={n: (sides[0], sides[1]) for n, sides in data["linear_layers"].items()},
        parameters=data["parameters"],
        kept=(data["kept"][0], data["kept"][1]),
        matrices={n: tuple(sides) for n, sides in data["matrices"].items()},
        latent=data["latent"],
    )


def as_data(problem: Problem) -> dict[str, object]:
    """Return a problem as plain data, from which `Problem(**data)` makes it again."""
    return {name: value for name, value in vars(problem).items() if value is not ABSENT}


def _keep(file: Path, shape: ModelShape) -> None:
    """Write a shape, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "w") as opened:
        json.dump(asdict(shape), opened)
    os.replace(path, file)
