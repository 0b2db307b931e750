"""The flight recorders of NCCL and gloo: a process's last collectives, in a file when asked for.

torch records them all along; here they are written from a thread when a signal comes, also while
the main thread waits in a collective; the thread looks at the device, too. NCCL's are for
`torchfrtrace`, which compares all ranks'; gloo's, which it cannot read, are JSON.
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
# How files are named by rank; torch's own are named as NCCL's.
NCCL_PREFIX, GLOO_PREFIX = "nccl_trace_rank_", "gloo_trace_rank_"


def records(folder: Path, rank: str) -> list[Path]:
    """The files that a rank has written."""
    paths = [folder / f"{NCCL_PREFIX}{rank}", folder / f"{GLOO_PREFIX}{rank}.json"]
    return [path for path in paths if path.is_file()]


def write_on_signal(folder: Path) -> None:
    """Write this process's records into a folder whenever RECORDER_SIGNAL comes.

    To be called in the main thread, before torch is imported. The rank is what RANK says then. What
    torch writes by itself when NCCL's own timeout passes goes to the same folder.
    """
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / NCCL_PREFIX))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python's handlers wait for the main thread; the byte is written at once.
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
            except Exception:  # the next signal must find this thread
                logger.exception("the flight recorder could not be written")


def _write(folder: Path, rank: str) -> None:
    if "torch" not in sys.modules:
        return
    from torch._C import _distributed_c10d as c10d

    # Not every build of torch has both.
    if hasattr(c10d, "_dump_nccl_trace"):
        content = c10d._dump_nccl_trace()
        if pickle.loads(content)["entries"]:
            _write_whole(folder / f"{NCCL_PREFIX}{rank}", content)
    if hasattr(c10d, "_dump_fr_trace"):
        record = pickle.loads(c10d._dump_fr_trace())
        if record["entries"]:
            text = json.dumps(record, indent=1, default=str)
            _write_whole(folder / f"{GLOO_PREFIX}{rank}.json", text.encode())


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.rename(path)
