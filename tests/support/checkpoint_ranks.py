"""What the ranks of the checkpoint tests do: worlds of 4, 2, 1 and 4 ranks, one after the other.

One launch of four processes, which leave their process group and form the next: starting
processes takes longer than all that happens here.
"""

import gc
import os
import pickle
import random
import shutil
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.saved import read_results
from hybridrl.config.choices import Offload
from hybridrl.config.errors import ConfigError
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.saver import SaverWorker
from tests.support.offload_cases import moment_bytes
from tests.support.role_configs import (
    actor_config,
    critic_config,
    fsdp_config,
    lora_config,
    reference_config,
    saver_config,
)
from tests.support.training_batches import my_part, training_batch

COLUMNS = [
    f"model.layers.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in ("self_attn.o_proj", "mlp.down_proj")
]


class CountingActor(ActorWorker):
    """A user's subclass: it has a number of its own to remember."""

    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.count = torch.zeros((), dtype=torch.int64)

    def training_state(self):
        return super().training_state() | {"count": self.count, "nothing": torch.zeros(0, 3)}


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@contextmanager
def world(folder, name, num_ranks):
    """A process group of the first ranks alone; yields whether this process is among them."""
    rank = int(os.environ["TEST_RANK"])
    if rank < num_ranks:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous_{name}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
    yield rank < num_ranks
    if rank < num_ranks:
        dist.barrier()
        dist.destroy_process_group()


def build(folder, *, lora=0, **changes):
    """Actor, critic, reference and saver as the pool would build them."""
    spec = fsdp_config(**{"dp_shard": dist.get_world_size()} | changes)
    mesh = build_mesh(spec, "cpu")
    roles = {
        "actor": CountingActor(actor_config(folder, spec, lora=lora_config(lora)), mesh),
        "critic": CriticWorker(critic_config(folder, spec), mesh),
        "ref": ReferenceWorker(reference_config(folder, spec, lora=lora_config(lora)), mesh),
        "saver": SaverWorker(saver_config(), mesh),
    }
    for role in roles.values():
        role.connect(roles)
    return roles


@torch.no_grad()
def leave_gathered(worker):
    """A forward by itself, after which FSDP2 keeps the whole weights."""
    worker.forward(next(iter(my_part(training_batch()).micro_batches(0))), Entropy.omit)
    assert any(not isinstance(param, DTensor) for param in worker.model.parameters())


def train(roles, step, *names):
    part = my_part(training_batch(), step=step)
    if "critic" in names:
        roles["critic"].update(part, step)
    if "actor" in names:
        roles["actor"].update(part, step, kl_coef=0.1)
        roles["actor"].count += 1


@torch.no_grad()
def whole(roles):
    """The training state of actor and critic, gathered."""
    found = {}
    for name in ("actor", "critic"):
        with roles[name].state_on_device():
            for key, tensor in roles[name].training_state().items():
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"{name}.{key}"] = full.clone()
    return found


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def save(roles, folder):
    roles["saver"].begin_save(str(folder))
    return roles["saver"].finish_save()


def run(folder, model, tied):
    """Everything, by name; most of it is the same on all ranks."""
    os.environ["TEST_RANK"] = str(dist.get_rank())
    dist.destroy_process_group()
    found = {}
    parts = [
        ("original", 4, original),
        ("two", 2, two_ranks),
        ("one", 1, one_rank),
        ("hybrid", 4, hybrid),
        ("again", 4, again),
        ("errors", 2, disk_errors),
        ("refused", 2, refused),
        ("lora", 2, adapters),
        ("offload", 2, offload),
    ]
    for name, num_ranks, part in parts:
        with world(folder, name, num_ranks) as is_in:
            if is_in:
                found[name] = part(folder, tied if part is offload else model)
    return found


def original(folder, model):
    """The run that is saved: the critic warms up for a step, then both train."""
    roles = build(model, reshard_after_forward=False)
    found = {"first": whole(roles)}
    train(roles, 1, "critic")
    found["warm_up"] = whole(roles)
    found["warm_up_result"] = save(roles, folder / "warm_up")
    train(roles, 2, "critic", "actor")
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    found["saved"] = whole(roles)
    saver = roles["saver"]
    leave_gathered(roles["actor"])
    saver.begin_save(str(folder / "plain"))
    with emptied(roles):
        found["result"] = saver.finish_save()
    found["stored"] = read_results(folder / "plain")
    found["draws"] = draws()
    buffer = host_memory(saver)
    saver.begin_save(str(folder / "meanwhile"))
    train(roles, 3, "critic", "actor")
    found["next"] = whole(roles)
    found["meanwhile"] = saver.finish_save()
    found["buffer_is_kept"] = buffer == host_memory(saver)
    found["collects_garbage"] = gc.isenabled()
    return found


@contextmanager
def emptied(roles):
    """Inside, everything that is saved is 0."""
    tensors = [t for role in roles.values() for t in role.training_state().values()]
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    yield
    for tensor, old in zip(tensors, kept, strict=True):
        tensor.copy_(old)


def host_memory(saver):
    return [piece.data_ptr() for piece in saver.saver.staging._host._pieces]


def two_ranks(folder, model):
    """Some by columns where the original was cut by rows."""
    roles = build(model, columns=COLUMNS)
    notes = roles["saver"].load(str(folder / "plain"))
    result = save(roles, folder / "by_two")
    return {"state": whole(roles), "notes": notes, "result": result}


def one_rank(folder, model):
    """A bomb lies beside the shards, under the name that DCP's own reader unpickles."""
    state = folder / "by_two" / "state"
    for name in (".metadata", "evil.pt"):
        (state / name).write_bytes(pickle.dumps(Bomb(str(folder / "exploded"))))
    roles = build(model)
    roles["saver"].load(str(folder / "by_two"))
    save(roles, folder / "by_one")
    return {"state": whole(roles)}


def hybrid(folder, model):
    roles = build(model, dp_replicate=2, dp_shard=2, columns=COLUMNS)
    roles["saver"].load(str(folder / "by_one"))
    result = save(roles, folder / "hybrid")
    return {"state": whole(roles), "result": result, "num_bytes": roles["saver"].saver.written}


def again(folder, model):
    """Into workers that have trained on: what was not there then must go, and come."""
    roles = build(model)
    train(roles, 1, "critic", "actor")
    roles["saver"].load(str(folder / "warm_up"))
    found = {"warm_up": whole(roles), "count": int(roles["actor"].count)}
    train(roles, 2, "critic", "actor")
    found["trained"] = whole(roles)
    found["notes"] = roles["saver"].load(str(folder / "hybrid"))
    found["state"] = whole(roles)
    roles["saver"].load(str(folder / "plain"))
    found["draws"] = draws()
    train(roles, 3, "critic", "actor")
    found["next"] = whole(roles)
    return found


def disk_errors(folder, model):
    """What the disk of one rank says reaches all, as a result; then the next save works."""
    roles = build(model)
    found, rank = {}, dist.get_rank()
    for number in (1, 2):
        for kind in ("full", "folder"):
            checkpoint = folder / f"{kind}_{number}"
            name = checkpoint / "state" / f"shard-{number:05d}.safetensors"
            if rank == 0:
                name.parent.mkdir(parents=True)
                name.symlink_to("/dev/full") if kind == "full" else name.mkdir()
            dist.barrier()
            found[kind, number] = save(roles, checkpoint).error
            found[kind, number, "then"] = save(roles, folder / f"after_{kind}_{number}").error
    if rank == 0:
        (folder / "file").mkdir()
        (folder / "file" / "state").write_text("not a folder")
    dist.barrier()
    found["file"] = save(roles, folder / "file").error
    found["collects_garbage"] = gc.isenabled()
    found["file", "then"] = save(roles, folder / "after_file").error
    return found


def refused(folder, model):
    """A checkpoint of other weights, and one of which a file is gone."""
    roles = build(model, lora=4)
    before = whole(roles)
    found = {}
    try:
        roles["saver"].load(str(folder / "plain"))
    except ConfigError as error:
        found["lora"] = str(error)
    after = whole(roles)
    found["untouched"] = all(torch.equal(before[key], after[key]) for key in before)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "meanwhile", folder / "lost")
        (folder / "lost" / "state" / "shard-00002.safetensors").unlink()
    dist.barrier()
    try:
        build(model)["saver"].load(str(folder / "lost"))
    except DamagedCheckpoint as error:
        found["damaged"] = str(error)
    return found


def adapters(folder, model):
    roles = build(model, lora=4)
    train(roles, 1, "critic", "actor")
    save(roles, folder / "lora")
    saved = whole(roles)
    train(roles, 2, "actor")
    expected = whole(roles)
    fresh = build(model, lora=4, columns=COLUMNS)
    fresh["saver"].load(str(folder / "lora"))
    found = {"saved": saved, "state": whole(fresh), "next": expected}
    same = build(model, lora=4)
    same["saver"].load(str(folder / "lora"))
    train(same, 2, "actor")
    return found | {"again": whole(same)}


def offload(folder, model):
    """Under each schedule; weights and moments are on the host when the save begins.

    The model's embedding is its head.
    """
    plain = build(model)
    train(plain, 1, "critic", "actor")
    found = {"state": whole(plain)}
    train(plain, 2, "critic", "actor")
    found["next"] = whole(plain)
    for schedule in (Offload.idle_optimizer, Offload.idle_all):
        checkpoint = folder / schedule
        roles = build(model, offload=schedule)
        train(roles, 1, "critic", "actor")
        for role in roles.values():
            role.rest()
        save(roles, checkpoint)
        fresh = build(model, offload=schedule)
        for role in fresh.values():
            role.rest()
        fresh["saver"].load(str(checkpoint))
        found[schedule] = whole(fresh)
        found[schedule, "away"] = [moment_bytes(fresh[name]) == 0 for name in ("actor", "critic")]
        train(fresh, 2, "critic", "actor")
        found[schedule, "next"] = whole(fresh)
    return found
