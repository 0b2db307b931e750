"""Type of the section agent (conf/environment/agent.yaml)."""

from dataclasses import dataclass
from typing import Annotated

from hybridrl.config.annotations import FREE, Range, at_least_one, seconds
from hybridrl.config.choices import OtherSampling
from hybridrl.config.sections.algorithm import FunctionConfig


@dataclass(kw_only=True)
class AgentConfig(FunctionConfig):
    """Programs that sample through the endpoint."""

    concurrency: Annotated[int, Range("episodes run at the same time", 1, 65536), FREE]
    num_processes: Annotated[int | None, Range("each takes tens of megabytes", 1, 4096), FREE]
    timeout_s: Annotated[float, seconds("an episode needs time; the longest wait is 3 weeks"), FREE]
    memory_mb: Annotated[int, at_least_one("a program needs memory"), FREE]
    other_sampling: OtherSampling
    tool_parser: str | None
    host: Annotated[str, FREE]
    port: Annotated[int, Range("0 takes a free one", 0, 65535), FREE]
