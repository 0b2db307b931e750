"""Launch of a run from a checked config: data, Ray, restarts.

Heavy imports are inside functions, so that config errors appear at once.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.app.checked import Prepared
from hybridrl.app.data import check_data
from hybridrl.app.lock import exclusive_run
from hybridrl.checkpoint.files import checkpoints_folder, steps_in
from hybridrl.checkpoint.verification import Verify, verify
from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.choices import Accelerator
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import Examined
from hybridrl.config.schema import RunConfig
from hybridrl.controller.calls import SetupTimes
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.distributed.background import import_in_background, without_collections
from hybridrl.models.resolve import FINAL
from hybridrl.trainer.checkpointing.verification import ClusterVerification, VerificationProgress

if TYPE_CHECKING:
    from hybridrl.app.session import RunInputs
    from hybridrl.trainer.record import RunResult
    from hybridrl.trainer.step import TrainingLoop

log = logging.getLogger(__name__)

# Modules that import Ray, while the checks of the machine run; those of GPUs also wait for seconds,
# in which torch is imported. None imports transformers: its package replaces itself, and another
# thread would get the empty one.
STARTS = ["hybridrl.controller.ray.runtime", "hybridrl.controller.worker_group"]
STARTS_ON_GPU = [*STARTS, "hybridrl.app.session"]
# Seconds between a restart that could not begin and the next.
RESTART_PAUSE_S = 10.0


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
        log.info("%s: %s", resume.checkpoint.folder, note)
    return RunResult(resume.last_accuracy, folder, resume.state.step, dict(*resume.rows[-1:]))


@contextmanager
def running(prepared: Prepared, folder: Path, restart: int = 0) -> "Iterator[TrainingLoop]":
    """Yield the trainer, with the lock of the directory, Ray and workers during the block."""
    result, setup = prepared.checked.result, prepared.setup
    config = result.config
    with exclusive_run(folder), ExitStack() as stack:
        on_gpu = config.hardware.accelerator is Accelerator.gpu
        import_in_background(STARTS_ON_GPU if on_gpu else STARTS)
        if not ray_address():
            prepared.preflight()
        from hybridrl.controller.ray.runtime import ray_runtime

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
