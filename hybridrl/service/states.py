"""Saved states of a service: weights and moments of a model, each in a folder of its own."""

import json
import os
import re
import shutil
from pathlib import Path

from hybridrl.checkpoint.files import STATE, sync_folder, sync_tree
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.distributed.storage.checkpoint import StoredState
from hybridrl.service.data import ServiceError

# Folder of the states, the file that a whole one has, and the prefix of one that is being written.
STATES, ABOUT, PARTIAL = "states", "state.json", ".partial-"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class States:
    """States below a run's folder; a state is there whole or not at all."""

    def __init__(self, config: RunConfig, saver: WorkerGroup, folder: Path) -> None:
        self._saver, self._folder = saver, folder / STATES
        lora = config.lora
        kind = None if lora is None else [lora.rank, lora.alpha, sorted(lora.target_modules)]
        self._about = {"model": config.model.path, "lora": kind}

    def names(self) -> list[str]:
        """Return the names of the states."""
        return sorted(about.parent.name for about in self._folder.glob(f"[!.]*/{ABOUT}"))

    def free(self, name: str) -> Path:
        """Return the folder of a state that is not there yet."""
        if (folder := self._of(name)).exists():
            raise ServiceError(f"state {name}: there is one.\nUse another name, or delete it")
        return folder

    def existing(self, name: str) -> Path:
        """Return the folder of a state."""
        if not (folder := self._of(name)).joinpath(ABOUT).is_file():
            known = ", ".join(self.names()) or "none, as no state is saved"
            raise ServiceError(f"state {name}: expected one of {known}")
        return folder

    def save(self, name: str) -> Path:
        """Save what the actor has on the device; return the folder."""
        final = self.free(name)
        partial = final.with_name(PARTIAL + name)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._saver.call("begin_save", str(partial))
            result = self._saver.call("finish_save")[0]
            if result.error is not None:
                raise OSError(result.error)
            (partial / ABOUT).write_text(json.dumps(self._about))
            sync_tree(partial)
            os.rename(partial, final)
            sync_folder(final.parent)
        except OSError as error:  # of the disk
            shutil.rmtree(partial, ignore_errors=True)
            raise ServiceError(f"state {name} could not be saved: {error}") from error
        return final

    def load(self, name: str) -> None:
        """Load a state into the actor."""
        folder = self.existing(name)
        try:
            about = json.loads((folder / ABOUT).read_text())
            StoredState(folder / STATE)  # damage is found before a rank loads a part
        except (OSError, ValueError, DamagedCheckpoint) as error:
            raise ServiceError(f"state {name} is damaged: {error}") from error
        if about != self._about:
            raise ServiceError(
                f"state {name} is of {json.dumps(about)}, the service has "
                f"{json.dumps(self._about)}.\nStart the service with the state's model and lora"
            )
        try:
            self._saver.call("load", str(folder))
        except ConfigError as error:  # other sizes, though of the same name
            raise ServiceError(f"state {name} cannot be loaded: {error}") from error

    def delete(self, name: str) -> None:
        """Delete a state."""
        shutil.rmtree(self.existing(name))

    def _of(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ServiceError(f"state {name!r}: expected letters, digits, '.', '_' and '-'")
        return self._folder / name
