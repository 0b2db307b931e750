"""Flight recorders of NCCL and gloo: the last collectives of a process, written on a signal.

torch always records them. A thread writes them, also while the main thread waits in a collective,
and updates the device's position. `torchfrtrace` reads and compares NCCL's files. It cannot read
gloo's, which are JSON.
"""

import json
import logging
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

from hybridrl.distributed import position

logger = logging.getLogger(__name__)

RECORDER_SIGNAL = signal.SIGRTMIN + 7
# Prefixes of file names, followed by the rank; torch's own dumps are named as NCCL's.
NCCL_PREFIX, GLOO_PREFIX = "nccl_trace_rank_", "gloo_trace_rank_"


def records(folder: Path, rank: str) -> list[Path]:
    """Return the files that a rank has written."""
    paths = [folder / f"{NCCL_PREFIX}{rank}", folder / f"{GLOO_PREFIX}{rank}.json"]
    return [path for path in paths if path.is_file()]


def write_on_signal(folder: Path) -> None:
    """Write this process's records into a folder on each RECORDER_SIGNAL.

    Call it in the main thread, before torch is imported. RANK is read when the signal comes.
    torch's own dump after a timeout of NCCL uses the same folder.
    """
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / NCCL_PREFIX))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python's handlers run in the main thread only; the wakeup byte is written immediately.
    signal.signal(RECORDER_SIGNAL, lambda signum, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    arguments = (reading, folder)
    threading.Thread(target=_serve, args=arguments, name="flight recorder", daemon=True).start()


def _serve(reading: int, folder: Path) -> None:
    while True:
        if os.read(reading, 1)[0] == RECORDER_SIGNAL:
            try:
                position.look_at_device()
                _write(folder, os.environ.get("RANK", "unknown"))
            except Exception:  # the thread must survive for the next signal
                logger.exception("could not write the flight recorder")


def _write(folder: Path, rank: str) -> None:
    if "torch" not in sys.modules:
        return
    from hybridrl.distributed.torch_compat import flight_records

    nccl, gloo = flight_records()
    if nccl is not None and pickle.loads(nccl)["entries"]:
        _write_whole(folder / f"{NCCL_PREFIX}{rank}", nccl)
    if gloo is not None:
        record = pickle.loads(gloo)
        if record["entries"]:
            text = json.dumps(record, indent=1, default=str)
            _write_whole(folder / f"{GLOO_PREFIX}{rank}.json", text.encode())


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.rename(path)
