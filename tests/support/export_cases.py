"""Checkpoints of actors that have moved, and what their weights are; made by one rank."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.config.choices import Init
from hybridrl.config.schema import LoRAConfig
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.storage.policy_weights import adapter_state_dict
from hybridrl.trainer.tracking.provenance import plain, versions
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.saver import SaverWorker
from tests.support.role_configs import (
    actor_config,
    algorithm_config,
    fsdp_config,
    model_config,
    saver_config,
)
from tests.support.whole_weights import full_state_dict

STEP = 20


class Trained(NamedTuple):
    """A checkpoint and the weights it is to have.

    Attributes:
        run_dir: of its run.
        folder: of the checkpoint.
        weights: of the whole model, adapters merged, by checkpoint name.
        adapters: by peft's names.
    """

    run_dir: Path
    folder: Path
    weights: dict[str, Tensor]
    adapters: dict[str, Tensor]


def checkpoint(
    run_dir: Path,
    model: Path,
    *,
    lora: LoRAConfig | None = None,
    init: Init = Init.pretrained,
    train_vision: bool = False,
) -> Trained:
    """Save an actor whose trained weights are not those it began with."""
    spec, of_model = fsdp_config(dp_shard=1), model_config(model, init=init)
    mesh = build_mesh(spec, "cpu")
    more = {"lora": lora, "model": of_model, "train_vision": train_vision}
    actor = ActorWorker(actor_config(model, spec, **more), mesh)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in actor.model.parameters():
            if param.requires_grad:
                local = param.to_local()
                local.add_(0.05 * torch.randn_like(local))
    config = {
        "run": {"name": run_dir.name},
        "hardware": {"accelerator": "cpu"},
        "model": plain(of_model),
        "lora": plain(lora),
        "algorithm": plain(algorithm_config()),
    }
    folder = saved(run_dir, actor, mesh, config)
    return Trained(run_dir, folder, full_state_dict(actor.model), adapter_state_dict(actor.model))


def saved(run_dir: Path, actor: ActorWorker, mesh: DeviceMesh, config: dict[str, Any]) -> Path:
    """Write a checkpoint of an actor, as a run with this config would; returns its folder."""
    run_dir.mkdir()
    saver = SaverWorker(saver_config(), mesh)
    roles = {"actor": actor, "saver": saver}
    for role in roles.values():
        role.connect(roles)
    partial = commit.begin(run_dir, STEP)
    saver.begin_save(str(partial))
    saved = saver.finish_save()
    assert saved.error is None
    manifest = Manifest(
        step=STEP,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config,
        versions=versions(),
        world_size=dist.get_world_size(),
        metrics={},
        files=saved.files,
        models={},
    )
    return commit.commit(partial, manifest)
