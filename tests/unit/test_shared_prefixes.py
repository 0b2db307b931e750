"""First tokens that are computed once for several sequences: packing, equality, mini-batches."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.partition import partition_by_total
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.distributed.experts import replace_experts
from hybridrl.distributed.forward.attention import PACKED_ATTENTION, register_packed_attention
from hybridrl.distributed.forward.layers import hand_on_bounds, shares_prefixes
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.forward.packing import States, pack
from hybridrl.distributed.forward.token_models import ScalarModel, TokenLogProbs
from tests.support.batches import batch_of_rows as batch
from tests.support.tiny_hf import tiny_model

CPU = torch.device("cpu")


def test_hand_worked():
    whole = batch([[5, 6], [7], [5, 6]], [[8], [9, 10], [11, 12, 13]])
    packed = pack(whole, CPU, shares=True)
    assert packed.input_ids.tolist() == [[5, 6, 8, 7, 9, 10, 11, 12, 13]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 2, 3, 4]]
    assert packed.cu_seq_lens.tolist() == [0, 3, 6, 9] and packed.max_length == 3
    # 11 is predicted by the 6 of the first sequence.
    assert packed.state_index.tolist() == [1, 3, 4, 1, 6, 7]
    assert packed.response_ids.tolist() == [8, 9, 10, 11, 12, 13]
    assert packed.keys.index.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8]
    assert packed.keys.bounds.tolist() == [0, 3, 6, 11] and packed.keys.max_length == 5
    assert pack(whole, CPU, states=States.last, shares=True).state_index.tolist() == [2, 5, 8]
    assert pack(whole.select([0, 1]), CPU, shares=True).keys is None


def test_branches_share_all_tokens_before_they_part():
    """A conversation of three turns, a branch that leaves it after the first, one after that."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 7, 3, 4], [2, 6]]
    whole = batch([row[:1] for row in rows], [row[1:] for row in rows])
    packed = pack(whole, CPU, shares=True)
    assert packed.input_ids.tolist() == [[8, 9, 5, 6, 7, 3, 4, 2, 6]]
    assert packed.cu_seq_lens.tolist() == [0, 2, 6, 7, 9]
    # Of the second row, each token is predicted by its own; the first row's 6 by the second's 5.
    assert packed.state_index.tolist() == [2, 3, 4, 0, 2, 3, 4, 2, 3, 4, 5, 7]
    keys = packed.input_ids[0][packed.keys.index].tolist()
    assert keys == [token for row in rows for token in row]


def groups():
    """Two prompts of 30 and 9 tokens, one more of one response; responses of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(30, 4), (9, 7), (30, 1), (12, 5), (30, 12), (9, 3)]
    prompts = {n: torch.randint(1, 60, (n,), generator=generator).tolist() for n, _ in sizes}
    rows = [torch.randint(1, 60, (n,), generator=generator).tolist() for _, n in sizes]
    return batch([prompts[n] for n, _ in sizes], rows)


# With windows below the prompt's length, sinks of attention, latent attention, shared keys.
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gemma4", "ministral3", "phi3"])
def test_log_probs_and_gradients_are_those_without(name):
    register_packed_attention()
    found = []
    for shares in (False, True):
        lm = tiny_model(name, PACKED_ATTENTION)
        hand_on_bounds(lm)
        model = TokenLogProbs(lm, 16, keep_logits=False)
        assert shares_prefixes(model)
        packed = pack(groups(), CPU, shares=shares)
        assert (packed.input_ids.shape[1] == 120 + 32) is not shares
        log_probs = model(packed, 1.0, Entropy.omit).log_probs
        weights = torch.linspace(-1.0, 1.0, len(log_probs))
        (log_probs * weights).sum().backward()
        found.append((log_probs, {name: p.grad for name, p in lm.named_parameters()}))
    (wanted, gradients), (log_probs, others) = found
    torch.testing.assert_close(log_probs, wanted, rtol=0, atol=2e-6)
    for parameter, gradient in gradients.items():
        difference = (others[parameter] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert float(difference) < 2e-6, parameter


def test_values_of_a_critic_are_those_without():
    register_packed_attention()
    lm = tiny_model("qwen2", PACKED_ATTENTION)
    model = ScalarModel(lm.base_model, bias=True)
    values = [model(pack(groups(), CPU, shares=shares)) for shares in (False, True)]
    torch.testing.assert_close(*values, rtol=1e-6, atol=2e-6)


def test_experts_and_recurrent_layers_share_nothing():
    register_packed_attention()
    with_experts, dense = (tiny_model(name, PACKED_ATTENTION) for name in ("qwen2_moe", "qwen2"))
    replace_experts(with_experts)
    assert not shares_prefixes(TokenLogProbs(with_experts, 16, keep_logits=False))
    root = TokenLogProbs(dense, 16, keep_logits=False)
    assert shares_prefixes(root)
    root.recurrent = True
    assert not shares_prefixes(root)


@pytest.mark.parametrize("ranks", [1, 2])
def test_responses_to_a_prompt_stay_together(ranks):
    """Eight prompts of 100 tokens with 8 responses of 10: without, 110 tokens each."""
    answers = [[row] * 10 for row in range(64)]
    whole = batch([[64 + row // 8] * 100 for row in range(64)], answers)
    whole = replace(whole, group_id=torch.arange(64) // 8)
    sizes = UpdateSizes(
        num_shards=ranks,
        mini_batch_size=32,
        epochs=2,
        max_tokens=400,
        cost=float,
        partition=partition_by_total,
        share_prefixes=True,
    )
    scheduled = schedule(whole, sizes, seed=1, step=3)
    for epoch in range(2):
        micros = [m for rank in scheduled.ranks for mini in rank[epoch] for m in mini]
        assert sorted(row for micro in micros for row in micro) == [*range(64)]
        tokens = [pack(whole.select(m), CPU, shares=True).input_ids.shape[1] for m in micros]
        assert max(tokens) <= 400 and sum(tokens) == 8 * 180
        for mini in range(2):
            rows = [row for rank in scheduled.ranks for m in rank[epoch][mini] for row in m]
            assert len({row // 8 for row in rows}) == 4
