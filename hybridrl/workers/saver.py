"""Saver: writes and loads the training state of all roles of its process."""

import json
import logging
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.checkpoint.files import STATE
from hybridrl.checkpoint.saved import SaveResult
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import SaverConfig
from hybridrl.distributed import position
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.distributed.storage.saving import Saver
from hybridrl.distributed.torch_compat import local_tensor
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks

logger = logging.getLogger(__name__)

# Prefix of the generators' states, followed by the rank.
RNG = "rng."
# Size of a weight's state relative to the weight: the weight and two moments.
WITH_MOMENTS = 3
# Seconds between two notes of a save's progress, and maximum wait in `close`: the pool allows five
# seconds for all roles of a process.
LOOK_S, CLOSE_S = 1.0, 2.0


class SaverWorker(Worker):
    """Worker that saves the state of all roles of its process, and its random generators.

    Keys are <role>.<key of Worker.training_state> and rng.<rank>.<generator>. Training blocks
    while the state is copied to host memory, not while the copy is written.
    """

    config_class = SaverConfig
    config: SaverConfig

    def __init__(self, config: SaverConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.device = device_of(mesh)
        self.saver = Saver(self.device)
        self.roles: dict[str, Worker] = {}
        self.noted: dict[str, Tensor] = {}
        self.saving: Future[SaveResult] | None = None

    def connect(self, roles: dict[str, Worker]) -> None:
        """Store the roles, and begin to allocate host memory for their state with moments."""
        self.roles = {name: role for name, role in roles.items() if role is not self}
        if not self.config.prepares:
            return
        tensors = [tensor for role in self.roles for tensor in self._state(role).values()]
        num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
        self.saver.staging.prepare(WITH_MOMENTS * num_bytes)

    @on_all_ranks(Dispatch.BROADCAST)
    def note_generators(self) -> None:
        """Record the random generators at the end of a step, for later saves."""
        self.noted = rng_state(self.device)

    @on_all_ranks(Dispatch.BROADCAST)
    def begin_save(self, folder: str) -> None:
        """Copy the state to host memory and begin to write it to folder/state; a collective."""
        if self.saving is not None:  # committed already, when rank 0 had all results
            wait([self.saving])
        start = time.perf_counter()
        staging = self.saver.staging
        staging.clear()
        for name, role in self.roles.items():
            with role.state_on_device():
                staging.stage(self._state(name))
        rank = dist.get_rank()
        generators = self.noted or rng_state(self.device)
        staging.stage({f"{RNG}{rank}.{name}": state for name, state in generators.items()})
        gib, seconds = staging.num_bytes / 2**30, time.perf_counter() - start
        logger.info("%.2f GiB of training state copied in %.2f s", gib, seconds)
        self.saving = self.saver.begin(Path(folder), STATE)

    @on_all_ranks(Dispatch.BROADCAST)
    def finish_save(self) -> SaveResult:
        """Wait for the last save; return its result on this rank."""
        assert self.saving is not None, "no save has begun"
        while not wait([self.saving], LOOK_S).done:
            position.at("MiB written", self.saver.written >> 20)
        return self.saving.result()

    @on_all_ranks(Dispatch.BROADCAST)
    def load(self, folder: str) -> list[str]:
        """Load a checkpoint of any number of ranks; return differences from it, a sentence each.

        Raises:
            ConfigError: the roles do not train what the checkpoint holds.
            DamagedCheckpoint: parts of a tensor are missing.
        """
        stored = StoredState(Path(folder) / STATE)
        self._check(folder, stored)
        for name in self.roles:
            with self._expecting(name, stored) as tensors:
                stored.load(tensors)
        saved = dict.fromkeys(k.partition(".")[0] for k in stored.tensors if not k.startswith(RNG))
        notes = [
            f"the state of {name} in the checkpoint is not used: the run has no such role"
            for name in saved
            if name not in self.roles
        ]
        return notes + self._load_generators(stored)

    @on_all_ranks(Dispatch.BROADCAST)
    def load_generators(self, folder: str) -> None:
        """Load only the random generators, after use since `load`."""
        self._load_generators(StoredState(Path(folder) / STATE))

    def close(self) -> None:
        """Wait briefly for a running save; `finish_save` waits for its end."""
        if self.saving is not None and not wait([self.saving], CLOSE_S).done:
            logger.warning("a checkpoint is left unfinished after %g s", CLOSE_S)

    def _state(self, name: str) -> dict[str, Tensor]:
        state = self.roles[name].training_state()
        return {f"{name}.{key}": tensor for key, tensor in state.items()}

    @contextmanager
    def _expecting(self, name: str, stored: StoredState) -> Iterator[dict[str, Tensor]]:
        """Return a role's state, with optional entries as in the checkpoint."""
        role, prefix = self.roles[name], f"{name}."
        with role.state_on_device():
            keys = [key for key in stored.tensors if key.startswith(prefix)]
            role.expect_state({key.removeprefix(prefix) for key in keys})
            yield self._state(name)

    def _check(self, folder: str, stored: StoredState) -> None:
        """Reject a checkpoint of other models or roles before loading."""
        problems = []
        for name in self.roles:
            with self._expecting(name, stored) as state:
                differing = differences(state, stored.tensors, f"{name}.") if state else []
            if differing:
                listed = "\n".join(differing)
                problems.append(
                    f"resume = {folder} holds another state than this run's {name}:\n{listed}\n"
                    f"An exact resume needs the same model, adapters and worker.\n"
                    f"Use the config of the checkpoint, or set resume=none."
                )
        if problems:
            raise ConfigError(*problems)

    def _load_generators(self, state: StoredState) -> list[str]:
        there = len({key.split(".")[1] for key in state.tensors if key.startswith(RNG)})
        ranks = dist.get_world_size()
        if there != ranks:
            return [
                f"the random generators are reseeded: the checkpoint has those of {there} ranks, "
                f"the run has {ranks}"
            ]
        own = f"{RNG}{dist.get_rank()}."
        keys = [key for key in state.tensors if key.startswith(own)]
        set_rng_state({key.removeprefix(own): state.read(key) for key in keys}, self.device)
        return []


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return states of random generators, uint8 on CPU: python and numpy as JSON, torch raw."""
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
