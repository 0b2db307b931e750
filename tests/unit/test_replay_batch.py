"""The batch of an update that was not finite, as it is stored for `hybridrl replay`."""

import torch

from hybridrl.data.ragged import Ragged
from hybridrl.replay.session import read_replay
from hybridrl.trainer.nonfinite import ReplayBatch, write_replay
from tests.support.run_configs import run_config
from tests.support.training_batches import batch_with_experts, with_sets


def test_every_field_comes_back(tmp_path):
    """Ragged fields have the lengths of prompts, of responses, or several values for each token."""
    batch, ranks = with_sets(batch_with_experts()), [[[[[0, 2, 1], [3, 4]], [[5, 6, 7]]]]]
    kept = ReplayBatch("actor", 3, 0.1, batch, ranks, run_config())
    write_replay(tmp_path / "step_3", kept)
    found = read_replay(tmp_path / "step_3", runs_code=False)
    assert (found.role, found.step, found.kl_coef, found.ranks) == ("actor", 3, 0.1, ranks)
    stored = batch.tensors()
    assert found.batch.tensors().keys() == stored.keys() >= {"routed_experts", "kept_ids"}
    for name, value in found.batch.tensors().items():
        if isinstance(value, Ragged):
            assert torch.equal(value.lengths, stored[name].lengths), name
            value, stored[name] = value.values, stored[name].values
        assert torch.equal(value, stored[name]), name
