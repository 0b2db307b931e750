"""The endpoint over a run's rollout engines."""

import gc
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self

from hybridrl.agents.episode import Episode, Settings
from hybridrl.agents.images import images_of
from hybridrl.agents.policy import Policy
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.server import EndpointServer
from hybridrl.agents.text import ModelText
from hybridrl.config.choices import OtherSampling
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.shape import NamedModel
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller.live_engines import LiveEngines
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.sources.tokenizer import NO_OPTIONS, load_tokenizer
from hybridrl.distributed.background import without_collections
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.rollout.vllm.text import load_parser

# New objects until young ones are collected: with Python's 700, that is up to a tenth of the time.
ALLOCATIONS = 20_000


class Endpoint:
    """Server, policy and engines. Use it as a context manager.

    Args:
        rollout: config of the engines.
        group: the engines.
        host, port: address to listen on; port 0: a free one.
        tool_parser: as agent.tool_parser.
        other_sampling: as agent.other_sampling.
        template_options: as data.chat_template_kwargs, for requests without their own.
        others: models that read what the policy does.

    Attributes:
        settings: sampling of training steps.
        end_token: an end token of the model; 0 if it has none.

    Raises:
        ConfigError: agent.tool_parser does not exist or does not fit the model, or its image
            processor cannot be loaded.
        OSError: agent.port is not free.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        group: WorkerGroup,
        host: str,
        port: int,
        *,
        tool_parser: str | None,
        other_sampling: OtherSampling = OtherSampling.refuse,
        template_options: Mapping[str, Any] = NO_OPTIONS,
        others: Sequence[NamedModel] = (),
    ) -> None:
        tokenizer = load_tokenizer(rollout.model)
        ends = stop_token_ids(plain_folder(rollout.model.path))
        parse = None if tool_parser is None else load_parser(tool_parser, tokenizer)
        self.end_token = ends[0] if ends else 0
        self.settings = Settings.of(rollout, other_sampling)
        self.engines = LiveEngines(group)
        text = ModelText(tokenizer, ends, template_options, images_of(rollout.model, others))
        self.policy = Policy(text, self.engines, parse)
        with without_collections():  # later ones would take a quarter of the server's time
            self.server = EndpointServer(self.policy, host, port)
        self._threshold = gc.get_threshold()
        gc.set_threshold(ALLOCATIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.call(self.policy.close_all)
        self.server.close()
        gc.set_threshold(*self._threshold)

    def episode(
        self,
        key: str,
        seed_parts: tuple[int | str, ...],
        engine: int,
        settings: Settings,
        most: int | None = None,
    ) -> Episode:
        """Return an episode that accepts requests with this key, without a dot in it.

        `most`: of its token sequences, only this number are remembered; None: all.
        """
        record = EpisodeRecord(self.policy.text.encode, most)
        episode = Episode(key, seed_parts, engine, settings, record)
        self.policy.open(episode)
        return episode


def check_address(host: str, port: int, keys: str = "agent.host = {}, agent.port = {}") -> None:
    """Check that an endpoint can listen on an address, before engines start.

    Raises:
        ConfigError: it cannot. `keys` formats host and port.
    """
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        raise ConfigError(
            f"{keys.format(host, port)}, but the endpoint cannot listen there: {error}.\n"
            "Set port 0 for a free one, and an IPv4 address of this machine as host."
        ) from error
