"""TensorBoard event files that survive kills and full disks.

SummaryWriter writes in a thread that a full disk ends; here rows wait for room.
"""

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.trainer.tracking.best_effort_files import AppendOnlyFile

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

# A step and its finite metrics.
Known = tuple[int, Mapping[str, float]]


class TensorBoardSink:
    """Writer of TensorBoard event files.

    Each failed write raises OSError; the step is written with a later one.

    Args:
        folder: of the files.
        before: steps up to the checkpoint of a resumed run. Those missing in earlier files are
            written now; a START event purges later steps of these.
    """

    def __init__(self, folder: Path, before: Sequence[Known]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        shown = min(_last_shown(folder), before[-1][0]) if before else -1
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        self._file = AppendOnlyFile(folder / name)
        self._file.append(_record(Event(wall_time=seconds, file_version="brain.Event:2")))
        begins = SessionLog(status=SessionLog.START)
        self._file.append(_record(Event(wall_time=seconds, step=shown + 1, session_log=begins)))
        for step, metrics in before:
            if step > shown:
                self._append(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars."""
        self._append(step, metrics)
        if self._file.reason is not None:
            raise OSError(self._file.reason)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_record(event))


def _last_shown(folder: Path) -> int:
    """Return the last step that TensorBoard shows of a folder; -1: none."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    shown = -1
    for path in sorted(folder.glob("events*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                shown = max(shown, event.step)
            elif event.HasField("session_log") and event.session_log.status == SessionLog.START:
                shown = min(shown, event.step - 1)
    return shown


def _record(event: "Event") -> bytes:
    """Encode an event with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()
