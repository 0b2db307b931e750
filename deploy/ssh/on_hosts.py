"""Call node.sh on hosts at the same time; the exit code is the highest of any.

    python3 on_hosts.py NUMBER HOST... ACTION ARG...

Output comes line by line, of several hosts with "HOST: " before it. If one of several fails, if
SIGTERM comes, or if the caller is gone, all of them end what they run: they are told by the end of
their stdin, which lasts as long as this process.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NODE_SCRIPT = Path(__file__).resolve().parents[1] / "node.sh"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
# What hosts get of this environment, for ssh itself passes nothing on.
PASSED_ON = re.compile(
    r"(CUDA|GLOO|HF|HYBRIDRL|MASTER|MLFLOW|NCCL|NVSHMEM|OMP|PYTORCH|RAY|TOKENIZERS|TRANSFORMERS"
    r"|TRITON|VLLM|WANDB)_|PYTHONPATH$|TORCH|PATH$|LD_LIBRARY_PATH$"
)
# Each host has its own; and the cluster is the one that is being started.
OWN = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")


def main() -> None:
    """The command."""
    number = int(sys.argv[1])
    hosts, call = sys.argv[2 : 2 + number], sys.argv[2 + number :]
    processes = [start(host, rank, call) for rank, host in enumerate(hosts)]
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda signum, frame: end(processes))
    watch_caller = threading.Thread(target=end_with_caller, args=(processes,), daemon=True)
    watch_caller.start()
    readers = [
        threading.Thread(target=copy_output, args=(process, host, processes))
        for process, host in zip(processes, hosts, strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    sys.exit(max(abs(process.wait()) for process in processes))


def start(host: str, rank: int, call: Sequence[str]) -> subprocess.Popen[str]:
    """node.sh on a host, which has been sent its settings."""
    command = ["env", "HYBRIDRL_CALLED_BY_SSH=1", "bash", str(NODE_SCRIPT), *call]
    process = subprocess.Popen(
        [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which ends the hosts in good order
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # then ssh has ended, and its exit code tells
        process.stdin.write(settings(host, rank))
        process.stdin.flush()
    return process


def settings(host: str, rank: int) -> str:
    """Lines for node.sh, up to an empty one; as arguments they would show in process lists."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if PASSED_ON.match(name) and name not in OWN
    }
    passed |= {"NODE_NAME": host, "NODE_RANK": str(rank)}
    # Bash's $'...' keeps a value on one line.
    lines = (f"export {name}={in_one_line(value)}\n" for name, value in passed.items())
    return "".join(lines) + "\n"


def in_one_line(value: str) -> str:
    """A value quoted for bash, new lines included."""
    return "$'\\n'".join(shlex.quote(line) for line in value.split("\n"))


def copy_output(
    process: subprocess.Popen[str], host: str, processes: Sequence[subprocess.Popen[str]]
) -> None:
    """Print what comes from a host until it ends; its failure ends the others."""
    assert process.stdout is not None
    label = f"{host}: " if len(processes) > 1 else ""
    for line in process.stdout:
        sys.stdout.write(f"{label}{line}")
        sys.stdout.flush()
    if process.wait() != 0:
        end(processes)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Close the stdin of all."""
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def end_with_caller(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until this process has another parent, then end all."""
    caller = os.getppid()
    while os.getppid() == caller:
        time.sleep(0.5)
    end(processes)


if __name__ == "__main__":
    main()
