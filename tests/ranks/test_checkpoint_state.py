"""Saving and loading the training state: equal bits under every sharding, and disks that fail."""

import pickle

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.checkpoint.verification import digest
from hybridrl.config.choices import Offload
from hybridrl.distributed.storage.checkpoint import (
    StoredState,
    StoredTensor,
    differences,
)
from hybridrl.distributed.storage.safetensors_file import DTYPES
from hybridrl.distributed.storage.saving import Staging
from tests.support.checkpoint_ranks import run
from tests.support.launch import run_on_ranks
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import read_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint_state")


@pytest.fixture(scope="module")
def ranks(folder):
    """A vocabulary of 67 and the critic's head of one row: uneven shards, and empty ones."""
    models = [tiny_folder(name, folder / name) for name in ("llama", "qwen2")]
    return run_on_ranks(run, 4, folder, *models)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def test_state_is_equal_through_4_2_1_and_4_ranks(ranks):
    """Cut by rows, by columns, not at all, and hybrid: each loads what the one before saved."""
    saved = ranks[0]["original"]["saved"]
    names = [key for key in saved if key.startswith("actor.weights.")]
    assert len(names) == 21
    assert {f"actor.optim.exp_avg_sq.{name[14:]}" for name in names} < saved.keys()
    for name in ("two", "one", "hybrid", "again"):
        assert_same(ranks[0][name]["state"], saved)


def test_the_next_update_is_that_of_the_run_that_was_not_interrupted(ranks):
    original, again = ranks[0]["original"], ranks[0]["again"]
    assert_same(again["next"], original["next"])
    name = "actor.weights.lm_head.weight"
    assert not torch.equal(original["next"][name], original["saved"][name])


def test_the_save_holds_what_was_there_when_it_began(folder, ranks):
    """Weights and moments were set to 0, or trained, as soon as training could go on."""
    saved = ranks[0]["original"]["saved"]
    for name in ("plain", "meanwhile"):
        found = read_whole(folder / name / "state", "")
        assert_same({key: found[key] for key in saved}, saved)
    assert {key for key in found if key not in saved} == {
        f"rng.{rank}.{name}" for rank in range(4) for name in ("python", "numpy", "torch")
    }


def test_moments_are_there_after_the_first_step_alone(ranks):
    """The actor had taken none when it was saved, and had some where this was loaded."""
    original, again = ranks[0]["original"], ranks[0]["again"]
    moments = [key for key in original["warm_up"] if ".optim." in key]
    assert moments and all(key.startswith("critic.") for key in moments)
    assert_same(again["warm_up"], original["warm_up"])
    assert again["count"] == 0
    assert_same(again["trained"], original["saved"])


def test_a_subclass_adds_to_the_state(ranks):
    for name in ("two", "one", "hybrid", "again"):
        assert int(ranks[0][name]["state"]["actor.count"]) == 1


def test_files_are_named_with_size_and_checksum(folder, ranks):
    """Each rank names what it wrote."""
    together = {}
    for number, rank in enumerate(ranks):
        result = rank["original"]["result"]
        assert result.error is None
        assert result.seconds > 0
        assert rank["original"]["stored"][number] == result
        together |= result.files
    state = folder / "plain" / "state"
    assert together == {f"state/{path.name}": digest(path) for path in state.iterdir()}
    assert len(together) == 4


def test_replicas_are_written_once(folder, ranks):
    """Two replicas of two shards write about as much as four shards, and all ranks take part."""
    files = [rank["hybrid"]["result"].files for rank in ranks]
    sizes = [sum(record.size for record in of_rank.values()) for of_rank in files]
    alone = (folder / "by_one" / "state" / "shard-00001.safetensors").stat().st_size
    assert all(sizes)
    tensors = sum(tensor.nbytes for tensor in ranks[0]["original"]["saved"].values())
    assert tensors < sum(sizes) < 1.5 * alone


def test_safetensors_reads_the_files(folder, ranks):
    """One rank's file is the whole."""
    found = load_file(folder / "by_one" / "state" / "shard-00001.safetensors")
    saved = ranks[0]["original"]["saved"]
    assert_same({key: found[key] for key in saved}, saved)


def test_weights_are_read_whole_without_ranks(folder, ranks):
    state = folder / "hybrid" / "state"
    weights = read_whole(state, "actor.weights.")
    saved = ranks[0]["original"]["saved"]
    assert_same(
        {f"actor.weights.{name}": weights[name] for name in weights},
        {key: tensor for key, tensor in saved.items() if key.startswith("actor.weights.")},
    )
    listed = StoredState(state).tensors
    for name, tensor in weights.items():
        assert listed[f"actor.weights.{name}"] == StoredTensor(tuple(tensor.shape), tensor.dtype)


def test_random_generators_go_on_where_the_number_of_ranks_is_the_same(ranks):
    assert len({rank["original"]["draws"] for rank in ranks}) == 4
    for rank in ranks:
        assert rank["again"]["draws"] == rank["original"]["draws"]


def test_another_number_of_ranks_is_said(ranks):
    (note,) = ranks[1]["two"]["notes"]
    assert "the checkpoint has those of 4 ranks, the run has 2" in note
    assert ranks[0]["again"]["notes"] == []


def test_host_memory_is_used_again(ranks):
    assert all(rank["original"]["buffer_is_kept"] for rank in ranks)


def test_garbage_is_collected_again_after_a_save_and_after_an_error(ranks):
    for rank in ranks[:2]:
        assert rank["original"]["collects_garbage"] and rank["errors"]["collects_garbage"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_full_disk_of_one_rank_is_told_to_all_and_the_next_save_works(folder, ranks, number):
    path = folder / f"full_{number}" / "state" / f"shard-{number:05d}.safetensors"
    for rank in ranks[:2]:
        found = rank["errors"]
        assert found["full", number] == f"[Errno 28] No space left on device: '{path}'"
        assert found["full", number, "then"] is None


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_cannot_be_made_is_told_to_all(folder, ranks, number):
    path = folder / f"folder_{number}" / "state" / f"shard-{number:05d}.safetensors"
    for rank in ranks[:2]:
        assert rank["errors"]["folder", number] == f"[Errno 21] Is a directory: '{path}'"
        assert rank["errors"]["folder", number, "then"] is None


def test_a_file_in_place_of_the_folder_is_told_to_all(folder, ranks):
    for rank in ranks[:2]:
        assert rank["errors"]["file"] == f"[Errno 17] File exists: '{folder / 'file' / 'state'}'"
        assert rank["errors"]["file", "then"] is None


def test_a_pickle_beside_the_shards_is_not_loaded(folder, ranks):
    bomb = folder / "by_two" / "state" / ".metadata"
    assert ranks[0]["one"]["state"]
    assert not (folder / "exploded").exists()
    pickle.loads(bomb.read_bytes()).close()
    assert (folder / "exploded").exists(), "the bomb was a dud"


def test_other_weights_are_refused_by_name_and_nothing_is_loaded(ranks):
    for rank in ranks[:2]:
        text = rank["refused"]["lora"]
        assert "this run's actor" in text and "this run's critic" not in text
        assert "lacks actor.weights.model.layers.0.self_attn.q_proj.lora_A.weight," in text
        assert "has besides actor.optim.exp_avg.lm_head.weight," in text
        assert rank["refused"]["untouched"]


def test_a_lost_file_is_damage(ranks):
    for rank in ranks[:2]:
        assert "has only parts of actor." in rank["refused"]["damaged"]


def test_shapes_and_dtypes_are_compared():
    stored = {
        "a.x": StoredTensor((2, 3), torch.float32),
        "a.y": StoredTensor((4,), torch.bfloat16),
        "b.z": StoredTensor((1,), torch.float32),
    }
    state = {"a.x": torch.zeros(3, 2), "a.y": torch.zeros(4)}
    assert differences(state, stored, "a.") == [
        "differs: a.x is torch.float32 (2, 3) there and torch.float32 (3, 2) here, "
        "a.y is torch.bfloat16 (4,) there and torch.float32 (4,) here"
    ]
    many = {f"a.{number}": torch.zeros(()) for number in range(8)}
    assert differences(many, {}, "a.") == ["lacks a.0, a.1, a.2, a.3, a.4 and 3 more"]


def test_every_kind_of_tensor_survives(tmp_path):
    """Over the seams of the host memory, strided, without dims or elements, of all dtypes."""
    state = {f"{dtype}": torch.arange(7).to(dtype) for dtype in DTYPES}
    state |= {
        "large": torch.randn(600_001),
        "larger": torch.randn(1_000, 1_111),
        "strided": torch.randn(9, 8).t()[::2],
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    staging = Staging(torch.device("cpu"))
    staging.prepare(1 << 20)
    staging.stage(state)
    expected = {key: tensor.clone() for key, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    with (tmp_path / "file.safetensors").open("wb") as file:
        file.writelines(staging.file(staging.shards))
    assert_same(load_file(tmp_path / "file.safetensors"), expected)
    assert_same(read_whole(tmp_path, ""), expected)


def test_adapters_alone_are_saved_and_go_on(ranks):
    found = ranks[0]["lora"]
    weights = [key for key in found["saved"] if key.startswith("actor.weights.")]
    assert len(weights) == 28
    assert all(".lora_A." in key or ".lora_B." in key for key in weights)
    assert_same(found["state"], found["saved"])
    assert_same(found["again"], found["next"])


@pytest.mark.parametrize("schedule", [Offload.idle_optimizer, Offload.idle_all])
def test_what_idles_on_the_host_is_saved_and_loaded(ranks, schedule):
    found = ranks[0]["offload"]
    assert_same(found[schedule], found["state"])
    assert found[schedule, "away"] == [True, True]
    assert_same(found[schedule, "next"], found["next"])
