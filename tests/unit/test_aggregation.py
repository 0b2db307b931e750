"""From token losses to a scalar: hand-worked, weights by method, and independence of the split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.token_loss import aggregate, sequence_sums
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals

LENGTHS = (3, 1, 4, 2)
EVERY = pytest.mark.parametrize("kind", list(Aggregation))


def batch() -> list[torch.Tensor]:
    """Losses, mask and response of ten tokens; the last response has none that counts."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(10, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0, 0, 0]).bool()
    return [values, mask, torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))]


TOTALS = Totals(tokens=6, episodes=3)


def test_hand_worked():
    # two responses: losses 1, 3 and 6; the longest may have 4 tokens
    values = torch.tensor([1.0, 3.0, 6.0])
    mask, sequence = torch.ones(3).bool(), torch.tensor([0, 0, 1])
    results = {
        kind.name: float(aggregate(kind, values, mask, sequence, Totals(3, 2), 4))
        for kind in Aggregation
    }
    expected = {"token_mean": 10 / 3, "sequence_mean": (2 + 6) / 2, "sequence_sum": 10 / (2 * 4)}
    assert results == pytest.approx(expected)


@EVERY
@pytest.mark.parametrize("parts", [[0, 1, 1, 2], [3, 2, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]])
def test_parts_add_up_however_responses_are_spread(kind, parts):
    """Value and gradient; every part is divided by the totals of the whole."""
    values, mask, sequence = batch()
    whole_input = values.clone().requires_grad_()
    whole = aggregate(kind, whole_input, mask, sequence, TOTALS, 16)
    whole.backward()
    split_input = values.clone().requires_grad_()
    total = 0.0
    for part in range(4):
        rows = [row for row in range(4) if parts[row] == part]
        chosen = torch.cat([torch.where(sequence == row)[0] for row in rows] or [sequence[:0]])
        ids = torch.arange(len(rows)).repeat_interleave(
            torch.tensor([LENGTHS[r] for r in rows]).long()
        )
        loss = aggregate(kind, split_input[chosen], mask[chosen], ids, TOTALS, 16)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(split_input.grad, whole_input.grad)


def in_plain_python(kind: Aggregation, rows: list[list[float]], max_tokens: int) -> float:
    """The docstring's formula over the losses that count of each response that has any."""
    if kind is Aggregation.token_mean:
        return math.fsum(v for row in rows for v in row) / sum(map(len, rows))
    if kind is Aggregation.sequence_mean:
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(v for row in rows for v in row) / (len(rows) * max_tokens)


@EVERY
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.3, 0.8, 1.0]),
    ranks=st.integers(1, 4),
)
def test_ragged_batches_dealt_to_ranks_are_those_of_plain_python(
    kind, lengths, seed, density, ranks
):
    """The whole, and the sum over ranks, each of which names its responses from 0 on."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    mask = torch.rand(size, generator=generator) < density
    mask[int(torch.randint(size, (1,), generator=generator))] = True
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values = values.masked_fill(~mask, math.nan)
    places = torch.arange(size).split(lengths)
    rows = [values[p][mask[p]].tolist() for p in places if mask[p].any()]
    totals = Totals(tokens=int(mask.sum()), episodes=len(rows))
    expected = in_plain_python(kind, rows, 6)

    def loss_of(responses: list[int]) -> float:
        chosen = torch.cat([places[0][:0], *(places[i] for i in responses)])
        sizes = torch.tensor([lengths[i] for i in responses], dtype=torch.int64)
        ids = torch.arange(len(responses)).repeat_interleave(sizes)
        return float(aggregate(kind, values[chosen], mask[chosen], ids, totals, 6))

    assert loss_of(list(range(len(lengths)))) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    rank_of = torch.randint(ranks, (len(lengths),), generator=generator).tolist()
    dealt = [[i for i, rank in enumerate(rank_of) if rank == r] for r in range(ranks)]
    assert math.fsum(map(loss_of, dealt)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@EVERY
def test_gradcheck(kind):
    values, mask, sequence = batch()
    assert torch.autograd.gradcheck(
        lambda x: aggregate(kind, x, mask, sequence, TOTALS, 16), (values.requires_grad_(),)
    )


@EVERY
def test_nan_off_the_mask_changes_nothing(kind):
    values, mask, sequence = batch()
    results = []
    for filler in (0.0, math.nan):
        filled = values.masked_fill(~mask, filler).requires_grad_()
        loss = aggregate(kind, filled, mask, sequence, TOTALS, 16)
        loss.backward()
        results.append((loss.item(), filled.grad.masked_fill(~mask, 0.0).tolist()))
    assert results[0] == results[1]


def test_weights_of_a_long_response_against_a_short_one():
    """What a token's loss weighs: the same, by its response's length, or by a constant."""
    mask, sequence = torch.ones(4).bool(), torch.tensor([0, 1, 1, 1])
    weights = {}
    for kind in Aggregation:
        values = torch.ones(4, requires_grad=True)
        aggregate(kind, values, mask, sequence, Totals(4, 2), 8).backward()
        weights[kind.name] = values.grad.tolist()
    assert weights["token_mean"] == pytest.approx([1 / 4] * 4)
    assert weights["sequence_mean"] == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert weights["sequence_sum"] == pytest.approx([1 / 16] * 4)


@EVERY
def test_no_token_is_zero(kind):
    empty = torch.empty(0)
    assert aggregate(kind, empty, empty.bool(), empty.long(), TOTALS, 16) == 0.0


@EVERY
@pytest.mark.parametrize(("totals", "longest"), [((0, 1), 4), ((1, 0), 4), ((1, 1), 0)])
def test_counts_that_are_none_are_refused(kind, totals, longest):
    with pytest.raises(ValueError, match="positive counts"):
        aggregate(kind, *batch(), Totals(*totals), longest)


@EVERY
def test_bad_tensors_are_named(kind):
    values, mask, sequence = batch()
    with pytest.raises(ValueError, match=r"\(10,\).*\(9,\)"):
        aggregate(kind, values, mask[:9], sequence, TOTALS, 16)
    with pytest.raises(ValueError, match="bool"):
        aggregate(kind, values, mask.float(), sequence, TOTALS, 16)


def test_sequence_sums_of_responses_in_any_order():
    sums = sequence_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 3]))
    assert sums.tolist() == [2.0, 5.0, 0.0, 8.0]
