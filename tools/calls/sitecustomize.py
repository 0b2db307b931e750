"""Recorder of calls: Python imports it in each process of a run that tools/paths.py starts.

It writes a line for each call of a function of hybridrl: time, thread, event, function; at most one
in `EVERY_S` for each function, except for the one whose calls are the window of the recording.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

EVERY_S = 0.02
PACKAGE = os.environ["HOUSE_PACKAGE"]
FOLDER = Path(os.environ["HOUSE_CALLS"])
WINDOW = os.environ["HOUSE_WINDOW"]
last: dict[tuple[str, bool], float] = {}


def write(event: str, function: str, now: float, is_main: bool) -> None:
    """Append a line to this process's file; processes may be killed at any time."""
    with (FOLDER / f"{os.getpid()}.calls").open("a") as out:
        print(now, "main" if is_main else "other", event, function, file=out)


def on_call(frame: FrameType, event: str, arg: Any) -> Any:
    """Record a call; return a tracer of its end for the function that is the window."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return None
    now, is_main = time.monotonic(), threading.current_thread() is threading.main_thread()
    function = f"{code.co_filename}:{code.co_firstlineno}"
    if f"{code.co_filename}:{code.co_qualname}".endswith(WINDOW):
        write("begin", function, now, is_main)
        return on_return
    if now - last.get((function, is_main), 0) > EVERY_S:
        last[function, is_main] = now
        write("call", function, now, is_main)
    return None


def on_return(frame: FrameType, event: str, arg: Any) -> Any:
    """Record the end of the function that is the window."""
    if event == "return":
        write("end", f"{frame.f_code.co_filename}:0", time.monotonic(), True)
    return on_return


threading.settrace(on_call)
sys.settrace(on_call)
