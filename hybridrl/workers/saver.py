"""Saves and loads what all roles of the process train, beside them."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.names import STATE
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import SaverConfig
from hybridrl.distributed import position
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.rng_state import rng_state, set_rng_state
from hybridrl.distributed.storage.checkpoint import (
    StoredState,
    StoredTensor,
    differences,
    load_in_place,
)
from hybridrl.distributed.storage.saving import Saver, SaveResult
from hybridrl.workers.base import Worker
from hybridrl.workers.dispatch import Dispatch, on_all_ranks

logger = logging.getLogger(__name__)

# Prefix of the generators' states; then the rank.
RNG = "rng."
# Bytes of a trained weight's state in those of the weight: itself and two moments.
WITH_MOMENTS = 3
# Seconds between two looks at a save that is waited for, and for which the end waits for one: the
# pool gives all roles of a process five.
LOOK_S, CLOSE_S = 1.0, 2.0


class SaverWorker(Worker):
    """Keeps the training state of all roles of its process, and the process's random generators.

    Keys are <role>.<key of Worker.training_state> and rng.<rank>.<generator>. Training waits while
    the state is copied to host memory, and goes on while that copy is written.
    """

    config_class = SaverConfig
    config: SaverConfig

    def __init__(self, config: SaverConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.device = device_of(mesh)
        self.saver = Saver(self.device)
        self.roles: dict[str, Worker] = {}
        self.noted: dict[str, Tensor] = {}

    def connect(self, roles: dict[str, Worker]) -> None:
        """Know the roles, and begin to have host memory for their state with AdamW's moments."""
        self.roles = {name: role for name, role in roles.items() if role is not self}
        if not self.config.prepares:
            return
        tensors = [tensor for role in self.roles for tensor in self._state(role).values()]
        self.saver.staging.prepare(WITH_MOMENTS * sum(map(_local_bytes, tensors)))

    @on_all_ranks(Dispatch.BROADCAST)
    def note_generators(self) -> None:
        """Let later saves hold the random generators as they are now, at the end of a step.

        Weights and moments stay until the next update; sampling before it draws from these.
        """
        self.noted = rng_state(self.device)

    @on_all_ranks(Dispatch.BROADCAST)
    def begin_save(self, folder: str) -> None:
        """Copy the state to host memory and begin to write it below a folder; a collective.

        The copy uses one and the same host memory each time, as large as this rank's state.

        Args:
            folder: of the checkpoint; the shards go into its state/.
        """
        assert not self.saver.is_writing, "one save at a time"
        start = time.perf_counter()
        staging = self.saver.staging
        staging.clear()
        for name, role in self.roles.items():
            with role.state_at_hand():
                staging.stage(self._state(name))
        rank = dist.get_rank()
        generators = self.noted or rng_state(self.device)
        staging.stage({f"{RNG}{rank}.{name}": state for name, state in generators.items()})
        blocked_s = time.perf_counter() - start
        gib = staging.num_bytes / 2**30
        logger.info("%.2f GiB of training state copied in %.2f s", gib, blocked_s)
        self.saver.begin(Path(folder), STATE, blocked_s)

    @on_all_ranks(Dispatch.BROADCAST)
    def poll_save(self) -> SaveResult | None:
        """What became of the last save on this rank; None while it goes on.

        Raises:
            RuntimeError: it failed for another reason than a disk.
        """
        return self.saver.poll()

    @on_all_ranks(Dispatch.BROADCAST)
    def finish_save(self) -> SaveResult:
        """Wait for the last save; what became of it on this rank."""
        while True:
            self.saver.wait(LOOK_S)
            result = self.saver.poll()
            if result is not None:
                return result
            position.at("MiB written", self.saver.written >> 20)

    @on_all_ranks(Dispatch.BROADCAST)
    def load(self, folder: str) -> list[str]:
        """Take the state up from a checkpoint, written by any number of ranks; a collective.

        Args:
            folder: of the checkpoint.

        Returns:
            What is not as it was, a sentence each.

        Raises:
            ConfigError: the roles do not train what the checkpoint holds.
            DamagedCheckpoint: parts of a tensor are missing.
        """
        state = Path(folder) / STATE
        found = StoredState(state)
        stored = found.tensors
        self._check(folder, stored)
        for name in self.roles:
            with self._expecting(name, stored) as tensors:
                if tensors:
                    load_in_place(tensors, state, self.saver.group)
        return self._roles_left_out(stored) + self._load_generators(found)

    @on_all_ranks(Dispatch.BROADCAST)
    def load_generators(self, folder: str) -> None:
        """Take the random generators up alone, after what has drawn from them since `load`."""
        self._load_generators(StoredState(Path(folder) / STATE))

    def close(self) -> None:
        """Wait for a save that goes on, but not long; who wants it whole calls `finish_save`."""
        self.saver.wait(CLOSE_S)
        if self.saver.is_writing:
            logger.warning("left a checkpoint unfinished that took more than %g s", CLOSE_S)

    def _state(self, name: str) -> dict[str, Tensor]:
        state = self.roles[name].training_state()
        return {f"{name}.{key}": tensor for key, tensor in state.items()}

    @contextmanager
    def _expecting(self, name: str, stored: dict[str, StoredTensor]) -> Iterator[dict[str, Tensor]]:
        """A role's state, with what a checkpoint has of what may or may not be there."""
        role, prefix = self.roles[name], f"{name}."
        with role.state_at_hand():
            keys = {key.removeprefix(prefix) for key in stored if key.startswith(prefix)}
            role.expect_state(keys)
            yield self._state(name)

    def _check(self, folder: str, stored: dict[str, StoredTensor]) -> None:
        """Refuse a checkpoint of something else before anything is loaded."""
        problems = []
        for name in self.roles:
            with self._expecting(name, stored) as state:
                found = differences(state, stored, f"{name}.") if state else []
            if found:
                listed = "\n".join(found)
                problems.append(
                    f"resume = {folder} holds another state than this run's {name}:\n{listed}\n"
                    f"Training goes on exactly only where model, adapters and worker are those "
                    f"that were saved.\n"
                    f"Use the config that the checkpoint was made with, or resume=none."
                )
        if problems:
            raise ConfigError(*problems)

    def _roles_left_out(self, stored: dict[str, StoredTensor]) -> list[str]:
        there = dict.fromkeys(key.partition(".")[0] for key in stored if not key.startswith(RNG))
        return [
            f"the state of {name} in the checkpoint is not used: the run has no such role"
            for name in there
            if name not in self.roles
        ]

    def _load_generators(self, state: StoredState) -> list[str]:
        there = len({key.split(".")[1] for key in state.tensors if key.startswith(RNG)})
        ranks = dist.get_world_size()
        if there != ranks:
            return [
                f"random generators of the ranks start anew: the checkpoint has those of {there} "
                f"ranks, the run has {ranks}"
            ]
        own = f"{RNG}{dist.get_rank()}."
        keys = [key for key in state.tensors if key.startswith(own)]
        set_rng_state({key.removeprefix(own): state.read(key) for key in keys}, self.device)
        return []


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize
