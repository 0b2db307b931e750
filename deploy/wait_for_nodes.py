"""Wait until Ray has every node of a run; those that do not come are named.

    python wait_for_nodes.py HEAD:PORT SECONDS NAME=ADDRESS [NAME=ADDRESS ...]

Exit codes: 0 all are there, 1 some are not within SECONDS.
"""

import logging
import sys
import time

import ray

POLL_S = 0.2


def main() -> None:
    """The command: argv says where Ray is, how long to wait, and for whom."""
    head, seconds, *places = sys.argv[1:]
    expected = {address: name for name, _, address in (place.partition("=") for place in places)}
    deadline = time.monotonic() + float(seconds)
    connect(head, deadline)
    missing = wait(expected, deadline)
    if missing:
        names = ", ".join(f"{name} ({address})" for address, name in missing.items())
        there = f"{len(expected) - len(missing)} of {len(expected)} nodes"
        sys.exit(f"Ray has {there} after {seconds} s; missing: {names}")
    print(f"Ray has all {len(expected)} nodes", flush=True)


def connect(head: str, deadline: float) -> None:
    """Connect to the head, which may still be starting."""
    while True:
        try:
            ray.init(head, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError) as error:
            if time.monotonic() > deadline:
                sys.exit(f"no Ray at {head}: {error}")
            time.sleep(POLL_S)


def wait(expected: dict[str, str], deadline: float) -> dict[str, str]:
    """The nodes that are missing when all are there or the time is over.

    Args:
        expected: names by address.
        deadline: in time.monotonic()'s seconds.
    """
    while True:
        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        missing = {address: name for address, name in expected.items() if address not in alive}
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
