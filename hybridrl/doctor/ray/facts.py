"""Probe of Ray on a node: version, token, listeners on the head's port. Does not import Ray."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from hybridrl.config.checks.installation import ray_version
from hybridrl.controller.ray.head import Connection, connect
from hybridrl.doctor.network.listeners import listening, process_text

TOKEN_CHARACTERS = 8


class RayFacts(NamedTuple):
    """Ray as seen by one node.

    Attributes:
        version: of the installed Ray; empty without one.
        auth_mode: RAY_AUTH_MODE in lower case, as Ray reads it; None: not set.
        token: first characters of the token's SHA-256; empty without one.
        connection: to the head.
        listeners: addresses of this node that listen on the head's port.
        holders: processes of these, 'redis-server (pid 12)'.
    """

    version: str
    auth_mode: str | None
    token: str
    connection: Connection
    listeners: list[str]
    holders: list[str]


def ray_facts(head: tuple[str, int] | None) -> RayFacts:
    """Examine this node; `head` is host and port of RAY_ADDRESS, None without one."""
    entries = [] if head is None else list(listening([head[1]]))
    mode = os.environ.get("RAY_AUTH_MODE")
    return RayFacts(
        ray_version(),
        mode if mode is None else mode.lower(),
        token_hash(),
        Connection() if head is None else connect(*head),
        sorted({entry.laddr.ip for entry in entries}),
        sorted({process_text(entry.pid) for entry in entries if entry.pid is not None}),
    )


def token_hash() -> str:
    """Return the first characters of the SHA-256 of Ray's token, which do not reveal it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        try:
            token = file.read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(token.encode()).hexdigest()[:TOKEN_CHARACTERS]
