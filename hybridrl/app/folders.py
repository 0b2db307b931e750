"""Folders of runs and sweeps: made when all checks have passed, a new one for each start."""

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hybridrl.app.lock import LOCK_FILE
from hybridrl.app.runs import run_at
from hybridrl.config.checks.checkpoint import NEW_EACH_TIME
from hybridrl.config.command.overrides import Precomposed

# Link beside the runs to the one that was started last.
LATEST = "latest"
# Hydra's files in a run's folder.
HYDRA = ".hydra"


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


@contextmanager
def kept_unless_begun(folder: Path) -> Iterator[None]:
    """Restore Hydra's files of the run in a folder unless the block begins it again.

    Hydra writes them before a start can be refused.
    """
    earlier = run_at(folder)
    files = [] if earlier is None else [*(folder / HYDRA).glob("*.yaml")]
    written = {file: file.read_bytes() for file in files}
    try:
        yield
    finally:
        if run_at(folder) == earlier:
            for file, content in written.items():
                file.write_bytes(content)


def template(hydra: DictConfig, key: str) -> str:
    """Return the value of hydra.run.dir or hydra.sweep.dir, links unresolved."""
    tree = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(tree, dict)
    _, section, name = key.split(".")
    return str(tree[section][name])


def whole_config(composition: Precomposed) -> DictConfig:
    """Return a copy of the config with Hydra's section, to which its values may link."""
    cfg = copy.deepcopy(composition.cfg)
    assert cfg is not None
    with open_dict(cfg):
        cfg.hydra = composition.hydra
    return cfg


def directory(cfg: DictConfig, key: str) -> Path:
    """Return the value of hydra.run.dir or hydra.sweep.dir, absolute.

    Raises:
        OmegaConfBaseException: it cannot be resolved.
    """
    return Path(str(OmegaConf.select(cfg, key))).absolute()


def claim_folder(composition: Precomposed, key: str) -> Claim:
    """Make the folder that `key` names, and set Hydra's settings for the config's links to read.

    Raises:
        OmegaConfBaseException: its name cannot be resolved.
        OSError, ValueError: it cannot be made, or not be written to.
    """
    cfg = whole_config(composition)
    HydraConfig.instance().set_config(cfg)
    claimed = claim(directory(cfg, key), is_new=NEW_EACH_TIME in template(cfg.hydra, key))
    with read_write(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(claimed.folder)
    HydraConfig.instance().set_config(cfg)
    return claimed


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
