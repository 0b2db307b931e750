"""pack: positions, boundaries and which state predicts which token, by hand."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.ragged import Ragged
from hybridrl.distributed.packing import pack
from tests.batches import batch_of

CPU = torch.device("cpu")


def batch(prompts, responses):
    return replace(
        batch_of([len(row) for row in responses]),
        prompts=Ragged.from_rows(prompts, torch.int64),
        responses=Ragged.from_rows(responses, torch.int64),
    )


def test_hand_worked():
    packed = pack(batch([[5, 6], [7]], [[8], [9, 10, 11]]), CPU)
    assert packed.input_ids.tolist() == [[5, 6, 8, 7, 9, 10, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.cu_seq_lens.tolist() == [0, 3, 7]
    assert packed.cu_seq_lens.dtype == torch.int32
    assert packed.max_length == 4
    # 8 is predicted after 6; 9, 10, 11 after 7, 9, 10
    assert packed.state_index.tolist() == [1, 3, 4, 5]
    assert packed.response_ids.tolist() == [8, 9, 10, 11]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        pack(batch([[5], []], [[8], [9]]), CPU)
