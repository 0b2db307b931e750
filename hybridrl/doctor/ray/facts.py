"""What a node knows of Ray: its version and token, who listens on the head's port, what answers.

Without importing Ray, which takes seconds.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from hybridrl.config.checks.installation import ray_version
from hybridrl.controller.ray.head import Connection, connect
from hybridrl.doctor.network.holders import listening, process_text

TOKEN_CHARACTERS = 8


class RayFacts(NamedTuple):
    """What `ray_facts` found.

    Attributes:
        version: of the installed Ray; empty without one.
        auth_mode: RAY_AUTH_MODE in lower case, as Ray reads it; None: not set.
        token: the first characters of the token's SHA-256; empty without one.
        connection: to the head.
        listeners: addresses on which this node listens on the head's port.
        holders: the processes that do, 'redis-server (pid 12)'.
    """

    version: str
    auth_mode: str | None
    token: str
    connection: Connection
    listeners: list[str]
    holders: list[str]


def ray_facts(head: tuple[str, int] | None) -> RayFacts:
    """Look on this node; `head` is the address of RAY_ADDRESS, None without one."""
    listeners, holders = _listeners(head[1]) if head is not None else ([], [])
    mode = os.environ.get("RAY_AUTH_MODE")
    return RayFacts(
        ray_version(),
        mode if mode is None else mode.lower(),
        token_hash(),
        Connection() if head is None else connect(*head),
        listeners,
        holders,
    )


def token_hash() -> str:
    """A few characters that tell tokens apart and betray none, where Ray looks for its token."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        try:
            token = file.read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(token.encode()).hexdigest()[:TOKEN_CHARACTERS]


def _listeners(port: int) -> tuple[list[str], list[str]]:
    entries = list(listening([port]))
    holders = {process_text(entry.pid) for entry in entries if entry.pid is not None}
    return sorted({entry.laddr.ip for entry in entries}), sorted(holders)
