"""From a checked config to the end of its run: the data, Ray, the workers, and restarts.

Nothing heavy is imported before a function asks for it: the command answers a wrong key at once.
"""

import importlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.app.run_lock import sole_run
from hybridrl.app.setup_times import SetupTimes
from hybridrl.checkpoint.leftovers import steps_in
from hybridrl.checkpoint.names import checkpoints_folder
from hybridrl.checkpoint.verification import unconfirmed
from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import LocalProbes, NodeProbes
from hybridrl.trainer.checkpointing.verifying import Verifying
from hybridrl.trainer.checkpointing.verifying_nodes import OnNodes

if TYPE_CHECKING:
    from hybridrl.app.inputs import RunInputs
    from hybridrl.data.sources.prompt_sets import PromptSets

log = logging.getLogger(__name__)

# Seconds until a restart that could not begin is followed by the next.
RESTART_PAUSE_S = 10.0
# What data.prompts reads; with one of these wrong, looking at the data makes no sense.
DATA_NEEDS = ("data", "model", "rollout.max_prompt_tokens")


@dataclass
class Prepared:
    """What is known of a run before anything is started.

    Attributes:
        result: the checked config.
        machine: what the run may use.
        setup: times what happens before the loop.
        preflight: checks the machines; raises ConfigError where the run would fail on them.
        is_on_course: whether all checkpoints in the run's directory are of its own course.
    """

    result: Examined
    machine: Machine
    setup: SetupTimes
    preflight: Callable[[], None]
    is_on_course: bool = False


def train_with_restarts(prepared: Prepared, folder: Path) -> float:
    """Train; a run whose workers fail is started anew, as often as trainer.max_restarts allows.

    Where the machines let no restart begin, the next one is tried a little later.

    Raises:
        WorkerError: the last failure of workers; no restart is left.
        ConfigError: the run could not begin.
    """
    config, failed = prepared.result.config, None
    last = config.trainer.max_restarts
    for restart in range(last + 1):
        try:
            with sole_run(folder):
                return _train(prepared, folder, restart)
        except WorkerError as error:
            failed = error
            if restart < last:
                log.error("%s", error)
        except ConfigError as error:
            if failed is None:
                raise
            log.error("Restart %d (trainer.max_restarts) could not begin: %s", restart, error)
            if restart < last:
                time.sleep(RESTART_PAUSE_S)
        # Else it begins where this attempt began; with AUTO as the same run, for its trackers, too.
        begins_anew = config.resume == NONE
        if prepared.is_on_course and (begins_anew or steps_in(checkpoints_folder(folder))):
            config.resume = AUTO
        prepared.setup = SetupTimes(time.time())
    assert failed is not None
    raise failed


def check_data(result: Examined) -> "PromptSets":
    """The prompts of a config.

    Raises:
        ConfigError: every problem of the config and, where that makes sense, of the data.
    """
    prompts = look_at_data(result)
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    assert prompts is not None
    return prompts


def look_at_data(result: Examined) -> "PromptSets | None":
    """The data, if what it is read with is right; its problems join the config's."""
    if not result.report.usable(DATA_NEEDS):
        return None
    from hybridrl.data.sources.prompt_sets import examine_prompts

    config, report = result.config, result.report
    prompts, problems = examine_prompts(
        config.data, config.model.path, config.rollout.max_prompt_tokens
    )
    for problem in problems:
        report.add(problem, broken="data")
    if config.environment is not None and report.usable(["environment"]):
        from hybridrl.trainer.multi_turn.environment import stop_problems

        for problem in stop_problems(config.model.path, config.environment):
            report.add(problem, broken="environment.stop")
    return prompts


def _train(prepared: Prepared, folder: Path, restart: int) -> float:
    """Start Ray and the workers, train, and end them; the final held-out accuracy.

    Args:
        prepared: what is known.
        folder: the run's.
        restart: how often the run has been started anew because of its workers.
    """
    # Heavy imports come only now.
    from hybridrl.controller.ray.runtime import ray_runtime

    result, machine, setup = prepared.result, prepared.machine, prepared.setup
    config = result.config
    if not ray_address():
        prepared.preflight()
    setup.mark("checks")
    # For seconds Ray's start does nothing but wait.
    with ThreadPoolExecutor(1) as meanwhile, Verifying(log.info) as watch:
        agents: Future[NodeProbes] = Future()
        preparing = meanwhile.submit(_prepare_session, result, folder, watch, agents)
        with ray_runtime(config.cluster, config.hardware.accelerator):
            setup.mark("ray")
            if ray_address():
                prepared.preflight()
            with _nodes(config) as nodes:
                agents.set_result(nodes)
                inputs = preparing.result()
            setup.mark("checks")
            if restart:
                log.warning(
                    "The run starts anew from %s: restart %d of %d (trainer.max_restarts)",
                    f"step {inputs.resume.state.step}" if inputs.resume else "its beginning",
                    restart,
                    config.trainer.max_restarts,
                )
            # A used directory has been refused, or its later steps are set aside.
            prepared.is_on_course = True
            from hybridrl.app.session import train

            return train(config, folder, machine, inputs, setup)


@contextmanager
def _nodes(config: RunConfig) -> Iterator[NodeProbes]:
    """Open the nodes that verify a checkpoint together."""
    if config.cluster.nodes == 1 or config.resume == NONE:
        yield LocalProbes(socket.gethostname())
        return
    from hybridrl.controller.ray.ray_probes import RayProbes

    with RayProbes() as agents:
        yield agents


def _prepare_session(
    result: Examined, folder: Path, watch: Verifying, agents: "Future[NodeProbes]"
) -> "RunInputs":
    """What a run begins from; torch and the like are imported on the way.

    Args:
        result: the run's config, checked.
        folder: the run's.
        watch: told how far a checkpoint has been read.
        agents: of the nodes that read it, once they are there.

    Raises:
        ConfigError: whatever is wrong with the data, a model or the checkpoint.
    """
    prompts = check_data(result)
    importlib.import_module("hybridrl.app.session")
    from hybridrl.app.inputs import read_inputs

    several = result.config.cluster.nodes > 1
    confirm = OnNodes(agents) if several else unconfirmed
    return read_inputs(result.config, folder, prompts, watch, confirm)
