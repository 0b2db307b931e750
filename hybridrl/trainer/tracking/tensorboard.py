"""TensorBoard event files, which a full disk or a kill leaves without gaps."""

import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

# Bytes of a metric in TensorBoard's file beside its name.
METRIC_BYTES = 48
# Most bytes of a histogram there: two float64 of each of up to 1,550 bins.
HISTOGRAM_BYTES = 2**15
# Values of a histogram.
MAX_SHOWN = 100_000
# Bytes that other files of the run may take meanwhile.
OTHERS_BYTES = 2**13

# A step and its finite metrics.
Known = tuple[int, Mapping[str, float]]


class TensorBoardSink:
    """TensorBoard event files, written by torch's SummaryWriter.

    Its thread prints a traceback and ends at a failed write, so nothing is written without room on
    the disk. After another failure the next step opens another file. Each step writes what is
    missing.

    Args:
        folder: of the files.
        before: steps up to the checkpoint of a resumed run. Those missing in earlier files are
            written again; later ones are purged.
        config: shown as a text.
    """

    def __init__(self, folder: Path, before: Sequence[Known], config: Mapping[str, Any]) -> None:
        import torch.utils.tensorboard  # noqa: F401  # imported before the first step

        folder.mkdir(parents=True, exist_ok=True)
        shown = _last_shown(folder) if before else -1
        self._folder = folder
        # The last one that is shown may lack metrics.
        self._missing = [known for known in before if known[0] >= shown]
        first = self._missing[0][0] if self._missing else 0
        text = code_block(yaml.safe_dump(config, sort_keys=False))
        self._shown: list[tuple[str, int, str | Tensor]] = [("config", first, text)]
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars, and texts and histograms before them."""
        self._missing.append((step, metrics))
        self._write()

    def show(self, name: str, step: int, what: "str | Tensor") -> None:
        """Keep a text, in Markdown, or values [N] for a histogram, for the next write.

        Of many values, about MAX_SHOWN at even distances are shown, without NaN and infinity.
        """
        if not isinstance(what, str):
            what = what[:: 1 + len(what) // MAX_SHOWN]
            what = what[what.isfinite()]
        if len(what):
            self._shown.append((name, step, what))

    def close(self) -> None:
        """Write what is missing, and close the file."""
        try:
            if self._missing:
                self._write()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _write(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        names = [name for _, metrics in self._missing for name in metrics]
        needed = OTHERS_BYTES + sum(map(len, names)) + METRIC_BYTES * len(names)
        for _, _, what in self._shown:
            needed += len(what.encode()) if isinstance(what, str) else HISTOGRAM_BYTES
        if shutil.disk_usage(self._folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=self._missing[0][0])
        try:
            for name, step, what in self._shown:
                is_text = isinstance(what, str)
                add = self._writer.add_text if is_text else self._writer.add_histogram
                add(name, what, step)
            for step, metrics in self._missing:
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise
        self._missing.clear()
        self._shown.clear()


def _last_shown(folder: Path) -> int:
    """Return the last step that TensorBoard shows of a folder; -1: none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Its warnings about files of earlier starts are of no use to the user.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    shown = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = shown.Tags()["scalars"]
    return max((event.step for tag in tags for event in shown.Scalars(tag)), default=-1)


def code_block(text: str) -> str:
    """Return a text as Markdown that is shown as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
