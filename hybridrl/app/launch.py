"""Launch of a run from a checked config: lock of the run's directory, data, Ray, restarts.

Heavy imports are inside functions, so that config errors appear at once.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.app.data import check_data
from hybridrl.checkpoint.files import checkpoints_folder, steps_in
from hybridrl.checkpoint.verification import Verify, verify
from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig
from hybridrl.controller.calls import SetupTimes
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.distributed.background import without_collections
from hybridrl.models.resolve import FINAL
from hybridrl.trainer.checkpointing.verification import ClusterVerification, VerificationProgress

if TYPE_CHECKING:
    from hybridrl.app.session import RunInputs
    from hybridrl.data.sources.prompts import PromptSets
    from hybridrl.trainer.callbacks import Callback
    from hybridrl.trainer.record import RunResult
    from hybridrl.trainer.step import TrainingLoop

log = logging.getLogger(__name__)

# Seconds between a restart that could not begin and the next.
RESTART_PAUSE_S = 10.0
LOCK_FILE = ".lock"
# Seconds to wait for the lock.
LOCK_S = 5.0


class Checked(NamedTuple):
    """A config after its checks, and the machine that it was checked for.

    Attributes:
        overrides: as typed, without those of Hydra.
        command: what `hybridrl resume` needs to compose the config again; may be empty.
        prompts: None if they were not read.
    """

    result: Examined
    machine: Machine
    overrides: Sequence[str]
    command: Mapping[str, Any]
    prompts: "PromptSets | None" = None


@dataclass
class Prepared:
    """A run before anything is started.

    Attributes:
        preflight: checks the machines; raises ConfigError if the run would fail there.
        owns_checkpoints: true if all checkpoints in its directory belong to this run.
        callbacks: the user's, those of trainer.callbacks included.
    """

    checked: Checked
    setup: SetupTimes
    preflight: Callable[[], None]
    owns_checkpoints: bool = False
    callbacks: "Sequence[Callback]" = ()


def train_with_restarts(prepared: Prepared, folder: Path) -> "RunResult":
    """Train, with up to trainer.max_restarts restarts after failures of workers.

    A restart that cannot begin counts, and is followed by a pause.

    Raises:
        WorkerError: workers failed, and no restart is left.
        ConfigError: the run could not begin.
    """
    config, failed = prepared.checked.result.config, None
    if (done := _finished(prepared.checked.result, folder)) is not None:
        return done
    last = config.trainer.max_restarts
    for restart in range(last + 1):
        try:
            with running(prepared, folder, restart) as trainer:
                return trainer.fit()
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
        # Else it begins where this attempt began. With AUTO trackers continue the same run.
        begins_anew = config.resume == NONE
        if prepared.owns_checkpoints and (begins_anew or steps_in(checkpoints_folder(folder))):
            config.resume = AUTO
        prepared.setup = SetupTimes(time.time())
    assert failed is not None
    raise failed


def _finished(result: Examined, folder: Path) -> "RunResult | None":
    """Return the result of a resumed run that has nothing left to do; None if it has to start.

    Raises:
        ConfigError: the checkpoint is damaged, or the run may not resume from it.
    """
    from hybridrl.app.runs import run_at, state_of

    config, run = result.config, run_at(folder)
    saved = (folder / FINAL).is_dir() or not config.trainer.save_final_model
    steps = steps_in(checkpoints_folder(folder))
    # The data tells the steps of trainer.epochs.
    least = 1 if config.trainer.epochs is not None else config.trainer.total_steps
    if config.resume != AUTO or not saved or not steps or steps[-1] < least:
        return None
    if run is None or state_of(run) != "finished":
        return None
    with exclusive_run(folder), VerificationProgress(log.info) as watch:
        resume = _prepare_session(result, folder, partial(verify, watch=watch)).resume
    if resume is None or resume.state.step < config.trainer.total_steps:
        return None
    from hybridrl.trainer.record import RunResult

    for note in resume.notes:
        log.info("%s: %s", resume.found.folder, note)
    return RunResult(resume.last_accuracy, folder, resume.state.step, dict(*resume.rows[-1:]))


@contextmanager
def exclusive_run(run_dir: Path) -> Iterator[None]:
    """Lock the directory for this process during the block; its end releases the lock.

    Raises:
        ConfigError: another run has the lock, such as a job that was requeued before its end; or no
            file can be written there.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir = {run_dir} cannot be written to: {error.strerror}.\n"
            f"Set hydra.run.dir to a directory that can."
        ) from error
    try:
        _lock(run_dir, descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(run_dir: Path, descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # children of a killed run may hold it for some seconds
            if time.monotonic() > deadline:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"hydra.run.dir = {run_dir} is in use by {owner or 'a process'}: two runs "
                    f"would overwrite each other's metrics and checkpoints.\n"
                    f"Wait for its end, or set another directory."
                ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("%s cannot be locked (%s): no other run may use it", run_dir, error)
            return
        time.sleep(0.2)
    with suppress(OSError):  # a full disk: the owner is then unknown
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


@contextmanager
def running(prepared: Prepared, folder: Path, restart: int = 0) -> "Iterator[TrainingLoop]":
    """Yield the trainer, with the lock of the directory, Ray and workers during the block."""
    from hybridrl.controller.ray.runtime import ray_runtime

    result, setup = prepared.checked.result, prepared.setup
    config = result.config
    with exclusive_run(folder), ExitStack() as stack:
        if not ray_address():
            prepared.preflight()
        setup.mark("checks")
        # Ray's start only waits, for seconds.
        meanwhile = stack.enter_context(ThreadPoolExecutor(1))
        watch = stack.enter_context(VerificationProgress(log.info))
        agents: Future[NodeProbes] = Future()
        verify_here = partial(verify, watch=watch)
        if _is_confirmed(config):
            verify_here = partial(verify_here, confirm=ClusterVerification(agents))
        preparing = meanwhile.submit(_prepare_session, result, folder, verify_here)
        stack.enter_context(ray_runtime(config.cluster, config.hardware.accelerator))
        setup.mark("ray")
        if ray_address():
            prepared.preflight()
        from hybridrl.controller.worker_group import open_pool, role_configs

        start = partial(open_pool, config, role_configs(config), folder)
        # In a joined cluster, which may be full, wrong inputs are reported first.
        pool = None if ray_address() else stack.enter_context(start())
        setup.mark("processes")
        with ExitStack() as nodes:
            if _is_confirmed(config):
                from hybridrl.controller.ray.ray_probes import RayProbes

                agents.set_result(nodes.enter_context(RayProbes()))
            inputs = preparing.result()
        setup.mark("checks")
        if restart:
            log.warning(
                "The run starts anew from %s: restart %d of %d (trainer.max_restarts)",
                f"step {inputs.resume.state.step}" if inputs.resume else "its beginning",
                restart,
                config.trainer.max_restarts,
            )
        # A used directory was refused, or its later steps are quarantined.
        prepared.owns_checkpoints = True
        from hybridrl.app.session import open_trainer

        if pool is None:
            pool = stack.enter_context(start())
            setup.mark("processes")
        yield stack.enter_context(open_trainer(prepared, folder, inputs, pool))


def _is_confirmed(config: RunConfig) -> bool:
    """Return True if other nodes verify the checkpoint, too."""
    return config.cluster.nodes > 1 and config.resume != NONE


def _prepare_session(result: Examined, folder: Path, verify: Verify) -> "RunInputs":
    """Return the inputs of a run; also imports torch and other heavy packages."""
    prompts = check_data(result)
    with without_collections():
        from hybridrl.app.session import read_inputs

    return read_inputs(result.config, folder, prompts, verify)
