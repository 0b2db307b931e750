"""States of a rank's random number generators as tensors: Python, numpy and torch."""

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the generators' states by name, uint8 on CPU: python and numpy as JSON, torch raw.

    Args:
        device: device of the rank; a GPU has its own generator.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, np.asarray(keys).tolist(), *rest]),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore generators; a generator without a state does not change."""
    version, internal, gauss = _as_json(states["python"])
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(_as_json(states["numpy"])))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _as_tensor(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _as_json(content: Tensor) -> list:
    return json.loads(bytes(content.tolist()))
