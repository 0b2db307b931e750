"""The served model, and sessions of clients: models, samplers, paths of saved states.

<session>:train:<n>                                 a model, a client's n-th
<session>:sample:<n>                                weights for sampling
tinker://<session>:train:<n>/weights/<name>         a saved state, and /sampler_weights/<name>
<folder>/states/<session>-<n>-weights-<name>        the same on disk, also after a restart
"""

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tinker import types

from hybridrl.config.schema import LoRAConfig
from hybridrl.service.data import ServiceError
from hybridrl.tinker.futures import Turns, known

# Seconds without a heartbeat, which the SDK sends each 10, after which a session may end.
SILENT_S = 600.0
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
_NAME = r"[A-Za-z0-9][\w.-]*"
_PATH = re.compile(rf"tinker://(\w+):train:(\d+)/((?:sampler_)?weights)/({_NAME})", re.ASCII)


@dataclass(frozen=True)
class Model:
    """A model of a client: its name in the service, and the base model as the client calls it."""

    name: str
    base_model: str
    turns: Turns = field(default_factory=Turns)


@dataclass
class Sampler:
    """Weights for sampling, as soon as they have a name in the service.

    Attributes:
        path: of the state that they are from.
        inflight: id of the model whose newest weights for samplers of this kind they are.
    """

    base_model: str
    weights: "asyncio.Future[str]"
    path: str | None = None
    inflight: str | None = None


def state_of(path: str) -> str:
    """Return the name of the state of a path; ServiceError if it is not one."""
    if (match := _PATH.fullmatch(path)) is None:
        raise ServiceError(
            f"path = {path}: expected tinker://<model>/weights/<name> or .../sampler_weights/<name>"
        )
    return "-".join(match.groups())


def path_of(model_id: str, kind: str, name: str | None) -> str:
    """Return the path of a state that a client names; ServiceError if no file can have the name."""
    if not re.fullmatch(_NAME, name or "", re.ASCII):
        raise ServiceError(f"name = {name!r}: expected letters, digits, '.', '_' and '-'")
    return f"tinker://{model_id}/{kind}/{name}"


class Served(NamedTuple):
    """The base model.

    Attributes:
        names: by which clients may ask for it; the first is what they are told.
        tokenizer: name on the hub, or folder.
        lora: the adapters of each model.
    """

    names: Sequence[str]
    tokenizer: str
    lora: LoRAConfig

    def check(self, name: str) -> None:
        """Refuse another model by a ServiceError."""
        if name.rstrip("/") not in [one.rstrip("/") for one in self.names]:
            raise ServiceError(
                f"base_model = {name}: this server has {', '.join(self.names)}.\n"
                f"Ask for that, or start it with --name {name} to call it so"
            )

    def check_adapters(self, request: types.CreateModelRequest) -> None:
        """Refuse adapters or an optimizer that are not the server's by a ServiceError."""
        if (kind := request.optimizer_config.type) != "adamw":
            raise ServiceError(f"optimizer = {kind}: expected AdamOptimizerConfig")
        config, rank = request.lora_config, self.lora.rank
        if config is None or config.rank != rank:
            asked = None if config is None else config.rank
            raise ServiceError(
                f"rank = {asked}: adapters of this server have rank {rank}.\n"
                f"Type rank={rank}, or start it with lora.rank={asked}"
            )
        if not (config.train_attn and config.train_mlp):
            raise ServiceError(
                f"train_attn = {config.train_attn}, train_mlp = {config.train_mlp}: adapters are "
                f"those of lora.target_modules = {', '.join(self.lora.target_modules)}.\n"
                f"Leave both out, or start the server with others"
            )


class Clients:
    """Sessions of clients, their models and samplers, for the thread of the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, float] = {}  # when each has last sent a heartbeat
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}

    def open(self) -> str:
        """Begin a session; return its id."""
        session = secrets.token_hex(8)
        self._sessions[session] = time.monotonic()
        return session

    def check(self, session: str | None) -> None:
        """Note that a session goes on; RequestError if there is none."""
        known("session", self._sessions, str(session))
        self._sessions[str(session)] = time.monotonic()

    def silent(self) -> list[str]:
        """Return the sessions without a heartbeat for some time."""
        now = time.monotonic()
        return [one for one, at in self._sessions.items() if now - at > SILENT_S]

    def close(self, session: str) -> list[Model]:
        """End a session and its samplers; return its models."""
        self._sessions.pop(session, None)
        for sampler_id in [one for one in self.samplers if one.startswith(f"{session}:")]:
            del self.samplers[sampler_id]
        own = [one for one in self.models if one.startswith(f"{session}:")]
        return [self.models.pop(one) for one in own]

    def add_sampler(self, sampler_id: str, sampler: Sampler) -> None:
        """Add a sampler; in-flight ones of the same model sample by its weights from now on."""
        for other in self.samplers.values():
            if sampler.inflight is not None and other.inflight == sampler.inflight:
                other.weights = sampler.weights
        self.samplers[sampler_id] = sampler
