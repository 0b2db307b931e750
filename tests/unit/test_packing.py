"""pack: positions, boundaries, pieces and which state predicts which token, by hand."""

import pytest
import torch

from hybridrl.distributed.forward.packing import pack
from hybridrl.distributed.forward.sequence_parallel import SequenceGroup
from tests.support.batches import batch_of_rows as batch

CPU = torch.device("cpu")


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


def shared(group_size, rank, prompts, responses):
    return pack(batch(prompts, responses), CPU, SequenceGroup("group", group_size, rank))


def test_a_rank_of_a_group_gets_its_piece():
    """Seven tokens for two ranks: 5 6 8 | 7 9 10 11."""
    pieces = [shared(2, rank, [[5, 6], [7]], [[8], [9, 10, 11]]) for rank in (0, 1)]
    assert [piece.input_ids.tolist() for piece in pieces] == [[[5, 6, 8]], [[7, 9, 10, 11]]]
    assert [piece.position_ids.tolist() for piece in pieces] == [[[0, 1, 2]], [[0, 1, 2, 3]]]
    # within the piece: 8 is predicted after 6; 9, 10, 11 after 7, 9, 10
    assert [piece.state_index.tolist() for piece in pieces] == [[1], [0, 1, 2]]
    assert [piece.response_ids.tolist() for piece in pieces] == [[8], [9, 10, 11]]
    for piece in pieces:
        assert piece.cu_seq_lens.tolist() == [0, 3, 7]
        assert piece.max_length == 4
        assert piece.shard.num_responses == [1, 3]
        assert piece.shard.num_tokens == 7


def test_a_token_may_be_predicted_by_the_piece_before_its_own():
    """5 | 6 | 7 8, where 7 and 8 are the response."""
    pieces = [shared(3, rank, [[5, 6]], [[7, 8]]) for rank in range(3)]
    assert [piece.input_ids.tolist() for piece in pieces] == [[[5]], [[6]], [[7, 8]]]
    assert [piece.response_ids.tolist() for piece in pieces] == [[], [7], [8]]
    assert [piece.state_index.tolist() for piece in pieces] == [[], [0], [0]]


def test_no_rank_is_left_without_a_token():
    """Two tokens for four ranks: sequences of one token, which predict nothing, for the others."""
    pieces = [shared(4, rank, [[5]], [[6]]) for rank in range(4)]
    assert [piece.input_ids.tolist() for piece in pieces] == [[[5]], [[6]], [[0]], [[0]]]
    assert [piece.position_ids.tolist() for piece in pieces] == [[[0]], [[1]], [[0]], [[0]]]
    assert [piece.response_ids.tolist() for piece in pieces] == [[6], [], [], []]
    assert all(piece.cu_seq_lens.tolist() == [0, 2, 3, 4] for piece in pieces)
    assert all(piece.max_length == 2 for piece in pieces)
