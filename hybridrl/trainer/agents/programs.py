"""Processes of agent programs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from hybridrl.config.schema import AgentConfig
from hybridrl.environments.programs import Job, read_reward
from hybridrl.rewards.processes.messages import Setup
from hybridrl.rewards.processes.pool import TaskPool

TASK = "hybridrl.environments.programs.program_task"


class ProgramPool:
    """Processes of the programs, which run while the caller does other things."""

    def __init__(self, config: AgentConfig) -> None:
        options = {"memory_mb": config.memory_mb}
        setup = Setup(
            TASK, config.function, config.args, config.timeout_s, config.concurrency, options
        )
        self._pool = TaskPool(setup, config.num_processes, "agent", read_reward)
        self._thread = ThreadPoolExecutor(1, "programs")

    def begin(self, jobs: Sequence[Job]) -> Future[list[Any]]:
        """Begin to run jobs; return the Future of each one's `Reward` or `Failure`."""
        return self._thread.submit(self._pool.run, jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()
        self._thread.shutdown()
        self._pool.close()
