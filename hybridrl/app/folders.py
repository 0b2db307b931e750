"""Folders of runs and sweeps: made when all checks have passed, a new one for each start."""

import copy
import os
import shutil
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from hybridrl.app.launch import LOCK_FILE
from hybridrl.config.command.command_line import Precomposed

# Link beside the runs to the one that was started last.
LATEST = "latest"


class Claim(NamedTuple):
    """Folder of this start alone; `made` are it and its parents that did not exist, inner first."""

    folder: Path
    made: list[Path]

    def release(self, *written: str) -> None:
        """Remove what was made, unless a folder holds more than files that were `written`."""
        for folder in self.made:
            names = os.listdir(folder)
            if not {*names} <= {*written, LOCK_FILE}:
                return
            shutil.rmtree(folder)


def template(found: Precomposed, key: str) -> str:
    """Return the value of hydra.run.dir or hydra.sweep.dir, links unresolved."""
    tree = OmegaConf.to_container(found.hydra, resolve=False)
    assert isinstance(tree, dict)
    _, section, name = key.split(".")
    return str(tree[section][name])


def set_up_hydra(found: Precomposed, key: str) -> Path:
    """Set Hydra's settings for the config's links to read; return the value of `key`, absolute.

    Raises:
        OmegaConfBaseException: it cannot be resolved.
    """
    cfg = copy.deepcopy(found.cfg)
    assert cfg is not None
    with open_dict(cfg):
        cfg.hydra = found.hydra
        folder = Path(str(OmegaConf.select(cfg, key))).absolute()
        cfg.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(cfg)
    return folder


def claim(folder: Path, *, is_new: bool) -> Claim:
    """Make a folder; if it must be new and exists, folder_2, folder_3, and so on.

    Raises:
        OSError: it cannot be made, or not be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        try:
            folder.mkdir(exist_ok=not is_new)
            break
        except FileExistsError:
            if not is_new:
                raise
            made = made[folder in made :]
            folder = folder.with_name(f"{folder.name.removesuffix(f'_{number - 1}')}_{number}")
            made.insert(0, folder)
    claimed = Claim(folder, made)
    try:
        with TemporaryFile(dir=folder):
            return claimed
    except OSError:
        claimed.release()
        raise


def link_latest(folder: Path) -> None:
    """Point outputs/latest to a run inside outputs/; of runs elsewhere there is no such link."""
    outputs = Path("outputs").resolve()
    link = outputs / LATEST
    if outputs not in folder.resolve().parents or (link.exists() and not link.is_symlink()):
        return
    new = link.with_name(f".{LATEST}.{os.getpid()}")
    new.symlink_to(folder.resolve().relative_to(outputs))
    os.replace(new, link)
