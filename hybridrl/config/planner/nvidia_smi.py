"""What nvidia-smi answers, and why it does not: asked here alone."""

import shutil
import subprocess

QUERY_S = 30.0
NOT_THERE = "there is no nvidia-smi"
# What it says, and that as a failure, of a driver that has no GPU.
NO_GPU = "No devices were found"


def ask(fields: str, what: str = "gpu") -> tuple[str, str]:
    """nvidia-smi's answer as lines of values, and in one line why there is none.

    Args:
        fields: separated by commas.
        what: gpu or compute-apps.
    """
    # Not left to the call: with a folder on PATH that may not be entered, it tells of that one.
    path = shutil.which("nvidia-smi")
    if path is None:
        return "", NOT_THERE
    query = [path, f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except OSError as error:
        return "", failed(error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return "", failed(f"no answer within {QUERY_S:g} s")
    if NO_GPU in answer.stdout + answer.stderr:
        return "", ""
    if answer.returncode != 0:
        told = " ".join((answer.stdout + answer.stderr).split())
        return "", failed(told or f"exit code {answer.returncode}")
    return answer.stdout, ""


def failed(told: str) -> str:
    """The reason why there is no answer, of a command that is there."""
    return f"nvidia-smi failed: {told}"
