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


def test_few_equal_tokens_are_not_shared():
    """3 of 64 are below a sixteenth, 4 are not; without any all is packed as usual."""
    for shared, is_shared in ((3, False), (4, True)):
        rows = [[*range(9, 9 + shared), *[start] * (64 - shared)] for start in (1, 2)]
        whole = batch([row[:1] for row in rows], [row[1:] for row in rows])
        packed = pack(whole, CPU, shares=True)
        assert (packed.keys is not None) is is_shared
        assert packed.input_ids.shape[1] == 128 - shared * is_shared


def one_prompt(answers):
    whole = batch([[64] * 100] * len(answers), answers)
    return replace(whole, group_id=torch.zeros(len(answers), dtype=torch.int64))


def sizes_of(**changes):
    sizes = {"num_shards": 1, "mini_batch_size": 16, "epochs": 1, "max_tokens": 400}
    sizes |= {"cost": float, "partition": partition_by_total, "share_prefixes": True}
    return UpdateSizes(**(sizes | changes))


@pytest.mark.parametrize(
    ("key_size", "same", "most"),
    [(0.0, False, 16), (0.5, False, 5), (0.0, True, 8), (0.0, True, 4)],
)
def test_micro_batches_fit_with_keys_and_logits(key_size, same, most):
    """Answers of 10 tokens: each row's keys of the prompt take 50 tokens if a key is half a token.

    Equal answers are one row of tokens, but each has logits.
    """
    answers = [[0 if same else row] * 10 for row in range(16)]
    sizes = sizes_of(key_size=key_size, max_tokens=100 + 10 * most if same else 400)
    (epochs,) = schedule(one_prompt(answers), sizes, seed=1, step=1).ranks
    micros = [len(micro) for mini in epochs[0] for micro in mini]
    each = 10 + key_size * 100
    assert sum(micros) == 16
    assert max(micros) <= most and 110 + (max(micros) - 1) * each <= sizes.max_tokens


def test_what_is_computed_by_hand():
    """A prompt of 100 tokens and 16 answers of 10, in two micro-batches of 8."""
    whole = one_prompt([[row] * 10 for row in range(16)])
    for shares, tokens, prompts in ((True, 2 * 180, 2), (False, 16 * 110, 16)):
        sizes = sizes_of(max_tokens=180, share_prefixes=shares, attention=lambda n: float(n * n))
        found = schedule(whole, sizes, seed=1, step=1).computed(sizes)
        assert found == (tokens, 16 * 110**2 - (16 - prompts) * 100**2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_responses_to_a_prompt_stay_together(ranks):
    """Eight prompts of 100 tokens with 8 responses of 10: without, 110 tokens each."""
    answers = [[row] * 10 for row in range(64)]
    whole = batch([[64 + row // 8] * 100 for row in range(64)], answers)
    whole = replace(whole, group_id=torch.arange(64) // 8)
    sizes = sizes_of(num_shards=ranks, mini_batch_size=32, epochs=2)
    scheduled = schedule(whole, sizes, seed=1, step=3)
    for epoch in range(2):
        micros = [m for rank in scheduled.ranks for mini in rank[epoch] for m in mini]
        assert sorted(row for micro in micros for row in micro) == [*range(64)]
        tokens = [pack(whole.select(m), CPU, shares=True).input_ids.shape[1] for m in micros]
        assert max(tokens) <= 400 and sum(tokens) == 8 * 180
        for mini in range(2):
            rows = [row for rank in scheduled.ranks for m in rank[epoch][mini] for row in m]
            assert len({row // 8 for row in rows}) == 4


def test_mini_batches_are_those_without():
    """Four prompts of four responses: each epoch draws two of them for each mini-batch."""
    whole = batch([[7] * 20] * 16, [[row] * 5 for row in range(16)])
    whole = replace(whole, group_id=torch.arange(16) // 4)
    drawn = []
    for shares in (False, True):
        sizes = sizes_of(num_shards=2, mini_batch_size=8, epochs=3, share_prefixes=shares)
        ranks = schedule(whole, sizes, seed=1, step=1).ranks
        minis = [
            sorted(row for rank in ranks for micro in rank[epoch][mini] for row in micro)
            for epoch in range(3)
            for mini in range(2)
        ]
        assert all(len({row // 4 for row in mini}) == 2 for mini in minis)
        drawn.append(minis)
    assert drawn[0] == drawn[1]
