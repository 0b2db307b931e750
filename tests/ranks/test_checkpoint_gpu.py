"""Checkpoints on GPUs: the bits of a state, through page-locked copies, under every offload."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridrl.config.choices import DType, Offload
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.saver import SaverWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config, saver_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import my_part, training_batch

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU"),
]


def built(folder, offload, **changes):
    """Actor, critic and saver of one rank, connected."""
    spec = fsdp_config(
        dp_shard=dist.get_world_size(), param_dtype=DType.bfloat16, offload=offload, **changes
    )
    mesh = build_mesh(spec, "cuda")
    roles = {
        "actor": ActorWorker(actor_config(folder, spec), mesh),
        "critic": CriticWorker(critic_config(folder, spec), mesh),
        "saver": SaverWorker(saver_config(), mesh),
    }
    for role in roles.values():
        role.connect(roles)
    return roles


def state_of(roles):
    """Whole tensors of all that is trained, on the CPU."""
    whole = {}
    for name in ("actor", "critic"):
        with roles[name].state_on_device():
            for key, tensor in roles[name].training_state().items():
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                whole[f"{name}.{key}"] = full.cpu().clone()
    return whole


def saved_and_loaded(folder, offload, other_offload, target):
    """Train, save, train on, load into fresh roles, train these on: the states and losses."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    roles, batch = built(folder, offload), my_part(training_batch())
    roles["actor"].update(batch, 1, 0.1)
    saver = roles["saver"]
    saver.begin_save(target)
    before = state_of(roles)
    next_loss = roles["actor"].update(batch, 2, 0.1)["actor/loss"]  # while the copy is written
    result = saver.finish_save()
    assert result.error is None, result.error
    after = state_of(roles)
    fresh = built(folder, other_offload)
    notes = fresh["saver"].load(target)
    loaded = state_of(fresh)
    again = fresh["actor"].update(batch, 2, 0.1)["actor/loss"]
    return {
        "notes": notes,
        "unequal": [key for key in before if not torch.equal(before[key], loaded[key])],
        "keys": before.keys() == loaded.keys(),
        "moved": any(not torch.equal(before[key], after[key]) for key in before),
        "losses": (next_loss, again),
        "unequal_after": [
            key for key, tensor in state_of(fresh).items() if not torch.equal(tensor, after[key])
        ],
        "pinned": all(piece.is_pinned() for piece in saver.saver.staging._host._pieces),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("offload", "other"),
    [
        (Offload.none, Offload.none),
        (Offload.idle_all, Offload.none),
        (Offload.idle_optimizer, Offload.idle_all),
    ],
)
def test_a_resumed_state_trains_on_bit_for_bit(ranks, offload, other, tmp_path):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, found {GPUS}")
    folder = tiny_folder("llama", tmp_path / "llama")
    target = str(tmp_path / "checkpoint")
    by_rank = run_on_ranks(
        saved_and_loaded, ranks, folder, offload, other, target, device_type="cuda"
    )
    for found in by_rank:
        assert found["notes"] == []
        assert found["keys"] and found["pinned"] and found["moved"]
        assert found["unequal"] == []
        assert found["losses"][0] == found["losses"][1]
        assert found["unequal_after"] == []


def loaded_elsewhere(folder, target):
    """What this world of ranks reads of a checkpoint."""
    roles = built(folder, Offload.none)
    notes = roles["saver"].load(target)
    return notes, state_of(roles)


def saved_state(folder, target):
    """A step, a save, and the state that was saved."""
    roles = built(folder, Offload.none)
    roles["actor"].update(my_part(training_batch()), 1, 0.1)
    roles["saver"].begin_save(target)
    assert roles["saver"].finish_save().error is None
    return state_of(roles)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_another_number_of_gpus_reads_the_same_bits(tmp_path):
    folder = tiny_folder("llama", tmp_path / "llama")
    target = str(tmp_path / "checkpoint")
    saved, _ = run_on_ranks(saved_state, 2, folder, target, device_type="cuda")
    assert sorted(path.name for path in Path(target, "state").iterdir()) == [
        "shard-00001.safetensors",
        "shard-00002.safetensors",
    ]
    ((notes, loaded),) = run_on_ranks(loaded_elsewhere, 1, folder, target, device_type="cuda")
    assert any("2 ranks, the run has 1" in note for note in notes)
    assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []
