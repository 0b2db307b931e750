"""Starts a module of ours with a small file system that it alone sees, in its own process.

python -m tests.support.on_own_disk FOLDER BYTES MODULE [ARGUMENT...]
"""

import os
import subprocess
import sys
from pathlib import Path


def resize(pid: int, folder: Path, size: int) -> None:
    """Give the disk that a process has at a folder another size, bytes."""
    inside = ["nsenter", "-t", str(pid), "-m"]
    subprocess.run([*inside, "mount", "-o", f"remount,size={size}", str(folder)], check=True)


def opened(pid: int, folder: Path) -> int:
    """A descriptor of the folder as a process sees it, which holds on to its disk."""
    return os.open(f"/proc/{pid}/root{folder}", os.O_RDONLY | os.O_DIRECTORY)


def main() -> None:
    folder, size, *command = sys.argv[1:]
    script = f'mount -t tmpfs -o size={size} tmpfs "$0"; exec "$@"'
    shell = ["sh", "-ec", script, folder, sys.executable, "-m", *command]
    os.execvp("unshare", ["unshare", "-m", *shell])


if __name__ == "__main__":
    main()
