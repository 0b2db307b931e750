"""Workers of a service of primitives: actor, rollout engines and saver, from a checked config."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.app.checked import Prepared
from hybridrl.app.lock import exclusive_run
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig

if TYPE_CHECKING:
    from hybridrl.controller.worker_group import WorkerGroup

ACTOR = "hybridrl.workers.primitives.PrimitiveActor"


class ServiceParts(NamedTuple):
    """Arguments of `Primitives`."""

    config: RunConfig
    shape: ModelShape
    workers: "Mapping[str, WorkerGroup]"
    folder: Path


@contextmanager
def service_parts(prepared: Prepared, folder: Path) -> Iterator[ServiceParts]:
    """Yield the parts of a service, in the main thread, with Ray and workers during the block.

    Data, rewards, algorithm and sampling of the config have no effect: calls bring their own.

    Raises:
        ConfigError: the config has parts that a service cannot have, or cannot begin.
        WorkerError: workers failed to start.
    """
    examined = prepared.checked.result
    config, shape = examined.config, examined.shape
    assert shape is not None
    if gpus := config.placement.rollout_gpus:
        raise ConfigError(
            f"placement.rollout_gpus = {gpus}: a service samples on the GPUs that train.\n"
            f"Remove it."
        )
    with exclusive_run(folder):
        prepared.preflight()
        from hybridrl.controller.ray.runtime import ray_runtime
        from hybridrl.controller.worker_group import build_workers, open_pool, role_configs

        with ray_runtime(config.cluster, config.hardware.accelerator):
            roles = role_configs(config)
            roles["rollout"] = replace(config.rollout, top_p=1.0)  # nothing is recorded
            roles["actor"] = replace(config.actor, worker=ACTOR, temperature=1.0)
            used = {role: roles[role] for role in ("rollout", "actor", "saver")}
            with open_pool(config, used, folder) as pool:
                yield ServiceParts(config, shape, build_workers(config, used, pool), folder)
