"""fsdp.offload: the same bits under every schedule, and storage that is really given back.

Without a GPU the moves are made between ordinary memory; storages are released and refilled all
the same.
"""

import pytest
import torch

from hybridrl.config.choices import DType, Offload
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.offload import HostBuffer, Offloadable
from hybridrl.workers.reference import ReferenceWorker
from tests.support.launch import run_on_ranks
from tests.support.offload_cases import assert_same_bits, every_schedule, shard_bytes, two_steps
from tests.support.role_configs import fsdp_config, reference_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import my_part, training_batch


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Llama's vocabulary of 67 leaves rank 1 with fewer rows than rank 0: padded storages."""
    folder = tiny_folder("llama", tmp_path_factory.mktemp("offload") / "llama")
    by_rank = run_on_ranks(every_schedule, 2, folder)
    return {offload: [of_rank[offload] for of_rank in by_rank] for offload in Offload}


@pytest.mark.parametrize("offload", [Offload.idle_optimizer, Offload.idle_all])
def test_results_are_those_without_offload_bit_for_bit(runs, offload):
    for (found, _, _), (wanted, _, _) in zip(runs[offload], runs[Offload.none], strict=True):
        assert_same_bits(found, wanted)


def test_weights_idle_unless_their_role_was_last(runs):
    """After `reshard` nobody's are left for the rollout; later those of the phase's own role."""
    owners = ["", "actor", "ref", "critic", "critic", "actor"] * 2
    for _, weights, _ in runs[Offload.idle_all]:
        present = ["".join(n for n, size in left.items() if size) for left in weights]
        assert present == owners
    for offload in (Offload.none, Offload.idle_optimizer):
        for _, weights, _ in runs[offload]:
            assert all(all(left.values()) and left == weights[0] for left in weights)


def test_moments_are_left_on_the_device_under_none_alone(runs):
    for _, weights, moments in runs[Offload.none]:
        # two moments of the shard's own bytes; FSDP2 pads weights, AdamW's moments are not padded
        assert 0 < moments[-1]["actor"] <= 2 * weights[-1]["actor"]
    for offload in (Offload.idle_optimizer, Offload.idle_all):
        for _, _, moments in runs[offload]:
            assert all(left == {"actor": 0, "critic": 0} for left in moments)


@pytest.mark.slow
def test_adapters_and_the_reference_under_them_survive_offload(tmp_path):
    """The reference's weights are the actor's: they come for either, and go once for both."""
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    plain, idle = (
        run_on_ranks(two_steps, 2, folder, offload, "cpu", DType.float32, 4)
        for offload in (Offload.none, Offload.idle_all)
    )
    owners = ["", "both", "both", "critic", "critic", "both"] * 2
    for (found, weights, _), (wanted, _, _) in zip(idle, plain, strict=True):
        assert_same_bits(found, wanted)
        names = {"actor": "both", "ref": "both", "critic": "critic"}
        present = ["".join({names[n] for n, size in left.items() if size}) for left in weights]
        assert present == owners


def test_a_forward_brings_weights_that_are_away(tmp_path):
    """A method of a user's subclass that forgets to say so gets the right weights all the same."""
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    ((before, away, after),) = run_on_ranks(forward_while_away, 1, folder)
    assert away == 0
    assert torch.equal(before, after)


def forward_while_away(folder):
    spec = fsdp_config(dp_shard=1, offload=Offload.idle_all)
    worker = ReferenceWorker(reference_config(folder, spec), build_mesh(spec, "cpu"))
    micro = next(iter(my_part(training_batch()).micro_batches(0)))
    with torch.no_grad():
        before = worker.forward(micro)
        worker.rest()
        away = shard_bytes(worker)
        return before, away, worker.forward(micro)


def test_views_and_shared_storages_survive():
    """Sizes that straddle pieces of the host buffer, an empty tensor, two views of one storage."""
    whole = [torch.randn(size) for size in (700_000, 3, 0, 1_000_001)]
    views = [whole[0][5:], whole[0][:5], whole[1], whole[2], whole[3].view(-1, 1)]
    expected = [view.clone() for view in views]
    moved = Offloadable(lambda: views, torch.device("cpu"), moves=True)
    for _ in range(2):
        moved.offload()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in whole)
        moved.wait()
        assert all(map(torch.equal, views, expected))
        whole[3][7] = expected[4][7] = -1.0


def test_host_memory_is_what_was_asked_for_and_stays():
    """Pieces are powers of two and, but for the last MiB, no more than needed."""
    buffer = HostBuffer(pinned=False)
    buffer.grow((5 << 20) + 1)
    assert [len(piece) for piece in buffer._pieces] == [4 << 20, 1 << 20, 1 << 20]
    next(buffer.slices(0, 1)).fill_(7)
    buffer.grow(600 << 20)
    assert sum(map(len, buffer._pieces)) == 600 << 20
    assert max(map(len, buffer._pieces)) == 256 << 20
    assert int(next(buffer.slices(0, 1))) == 7
