"""What holds for all tests."""

import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from hybridrl.app.process import KERNEL_FOLDERS
from hybridrl.config.planner.cache import cache_folder

# Programs that a shell runs in the background inherit a Ctrl-C that is ignored. The tests of
# interruption need the usual one, in this process and in those it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So they do with a hang-up that nohup ignores.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Libraries leave sockets and folders among the temporary files when processes end hard. All of a
# session's lie in one folder, which goes with it, but pytest's own, which it keeps for readers. The
# name is short, for sockets.
USUAL = tempfile.gettempdir()
TEMPORARY = Path(tempfile.mkdtemp(prefix="t"))
tempfile.tempdir = str(TEMPORARY)
os.environ["TMPDIR"] = str(TEMPORARY)
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", USUAL)
# As in a run: torch would make a folder of compiled kernels there, to be compiled anew next time.
for variable, folder in KERNEL_FOLDERS.items():
    os.environ.setdefault(variable, str(cache_folder() / folder))
# After multiprocessing's own folder there, whose removal is a finalizer of priority -100.
Finalize(None, shutil.rmtree, (TEMPORARY, True), exitpriority=-200)
