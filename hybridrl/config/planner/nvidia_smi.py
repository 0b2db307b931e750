"""Queries of nvidia-smi."""

import shutil
import subprocess

QUERY_S = 30.0
NOT_THERE = "there is no nvidia-smi"
# Message, with a failure code, of a driver without GPUs.
NO_GPU = "No devices were found"


def ask(fields: str, what: str = "gpu") -> tuple[str, str]:
    """Return the output of a query, a line of values per GPU or process, and an error line.

    `fields` are separated by commas; `what` is gpu or compute-apps.
    """
    # Popen's own search reports an unreadable folder on PATH instead.
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
        output = " ".join((answer.stdout + answer.stderr).split())
        return "", failed(output or f"exit code {answer.returncode}")
    return answer.stdout, ""


def failed(reason: str) -> str:
    """Return the error line of a failed query."""
    return f"nvidia-smi failed: {reason}"
