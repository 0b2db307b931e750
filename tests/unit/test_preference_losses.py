"""DPO, IPO and KTO: against TRL's values, closed forms, and what a mean over pairs must be.

The values are those of TRL's formulas (huggingface/trl, dpo_trainer.py: loss types sigmoid and ipo,
kto_trainer.py: kto_loss), computed in float64 on the same log-probs.
"""

import math
from functools import partial

import pytest
import torch

from hybridrl.algorithms.preference_losses import bradley_terry, dpo, ipo, kto
from hybridrl.algorithms.token_loss import aggregate
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals

# Responses of three pairs, chosen and rejected in turn: the policy's and the reference's.
POLICY = [
    [-0.5, -1.25, -0.75],
    [-1.0, -2.5],
    [-2.0],
    [-0.375, -0.625, -1.125],
    [-0.25, -0.5, -1.5, -0.125],
    [-3.0, -0.5],
]
REFERENCE = [
    [-0.75, -1.0, -1.5],
    [-0.5, -1.75],
    [-1.5],
    [-0.875, -1.0, -0.75],
    [-0.5, -0.25, -2.5, -0.375],
    [-2.25, -1.0],
]
LENGTHS = [len(row) for row in POLICY]
MARGINS = [2.0, -1.0, 1.5]
DPO = [0.4374879504858857, 0.8543552444685272, 0.4932489459974549]
SMOOTHED_DPO = [0.4974879504858857, 0.8243552444685273, 0.5382489459974549]
IPO = [0.6267361111111113, 5.4444444444444455, 1.5108506944444446]
REWARDS = [0.225, -0.375, -0.15, 0.15, 0.375, -0.075]
# With z_0 = 1/3 and weights 1.5 and 0.75, by response.
KTO = [
    0.7031859399393656,
    0.2875751216090105,
    0.843264751328697,
    0.38437304736315775,
    0.6475200247826278,
    0.34227098457219085,
]
LOSSES = {
    "dpo": partial(dpo, beta=0.3, label_smoothing=0.0),
    "ipo": partial(ipo, beta=0.3),
    "kto": partial(kto, beta=0.3, desirable_weight=1.5, undesirable_weight=0.75),
}
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)


def arguments(name="dpo", rows=range(6)):
    """The tensors of some responses; their last token is off the mask, and NaN."""

    def flat(of_rows, last):
        return torch.tensor([x for row in rows for x in [*of_rows[row], last]], dtype=torch.float64)

    lengths = torch.tensor([LENGTHS[row] + 1 for row in rows])
    sequence_id = torch.arange(len(lengths)).repeat_interleave(lengths)
    preferred = torch.tensor([row % 2 == 0 for row in rows])[sequence_id]
    log_probs, reference = flat(POLICY, math.nan), flat(REFERENCE, math.nan)
    mask = ~log_probs.isnan()
    taken = [log_probs, reference, mask, sequence_id, preferred]
    return [*taken, torch.full_like(log_probs, 1 / 3)] if name == "kto" else taken


def of_rows(values):
    """The value of each response, which all its counted tokens share; the others have 0."""
    parts = values.split([length + 1 for length in LENGTHS])
    assert all(part[:-1].eq(part[0]).all() and part[-1] == 0 for part in parts)
    return [float(part[0]) for part in parts]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LOSSES["dpo"], DPO),
        (partial(dpo, beta=0.3, label_smoothing=0.1), SMOOTHED_DPO),
        (LOSSES["ipo"], IPO),
    ],
)
def test_each_token_of_a_pair_has_the_value_of_trl(loss, expected):
    found = of_rows(loss(*arguments()).values)
    assert found[::2] == pytest.approx(expected, rel=1e-12)
    assert found[::2] == found[1::2]


def test_each_token_of_a_completion_has_the_value_of_trl():
    assert of_rows(LOSSES["kto"](*arguments("kto")).values) == pytest.approx(KTO, rel=1e-12)


def test_the_metrics_are_sums_with_counts_of_their_own():
    sums = LOSSES["dpo"](*arguments()).sums
    found = {name: value.tolist() for name, value in sums.items()}
    log_probs = [sum(row) for row in POLICY]
    assert found == {
        "reward_chosen": pytest.approx([sum(REWARDS[::2]), 3]),
        "reward_rejected": pytest.approx([sum(REWARDS[1::2]), 3]),
        "log_prob_chosen": pytest.approx([sum(log_probs[::2]), 3]),
        "log_prob_rejected": pytest.approx([sum(log_probs[1::2]), 3]),
        "reward_margin": pytest.approx([0.3 * sum(MARGINS), 3]),
        "preference_accuracy": [2, 3],
    }
    of_one = LOSSES["kto"](*arguments("kto", rows=[0])).sums
    assert of_one["reward_rejected"].tolist() == [0, 0]


def test_a_pair_of_scores_has_its_log_likelihood():
    """By the closed form; equal scores have log 2, and no pair that is told apart."""
    scores = torch.tensor([1.5, -0.5, 0.25, 0.25, -1.0, 2.0], dtype=torch.float64)
    preferred = torch.tensor([True, False, True, False, False, True])
    values, sums = bradley_terry(scores, preferred)
    margins = [2.0, 0.0, 3.0]
    assert values.tolist() == pytest.approx([math.log(1 + math.exp(-m)) for m in margins])
    assert sums["preference_accuracy"].tolist() == [2, 3]
    assert sums["reward_margin"].tolist() == [5, 3]
    assert sums["reward_chosen"].tolist() == [3.75, 3]
    assert sums["reward_rejected"].tolist() == [-1.25, 3]


@EVERY_LOSS
def test_equal_policies_have_the_closed_form_and_no_margin(name):
    taken = arguments(name)
    taken[0] = taken[1].clone().requires_grad_()
    if name == "kto":
        taken[5] = torch.zeros_like(taken[5])
    values, sums = LOSSES[name](*taken)
    (slopes,) = torch.autograd.grad(values[taken[2]].sum(), taken[0])
    expected = {"dpo": [math.log(2)] * 6, "ipo": [(1 / 0.6) ** 2] * 6, "kto": [0.75, 0.375] * 3}
    assert of_rows(values.detach()) == pytest.approx(expected[name])
    assert sums["reward_chosen"].tolist() == [0.0, 3.0]
    # Chosen tokens become likelier, the others less likely.
    mask, preferred = taken[2], taken[4]
    assert (slopes[mask & preferred] < 0).all() and (slopes[mask & ~preferred] > 0).all()


@EVERY_LOSS
def test_a_response_does_not_depend_on_what_it_is_packed_with(name):
    whole = LOSSES[name](*arguments(name)).values
    parts = [LOSSES[name](*arguments(name, rows)).values for rows in ([0, 1], [2, 3], [4, 5])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)
    swapped = LOSSES[name](*arguments(name, [1, 0])).values
    assert float(swapped[0]) == pytest.approx(float(whole[LENGTHS[0] + 1]))


@EVERY_LOSS
def test_gradcheck_and_the_mean_over_pairs(name):
    """By sequence_mean, where a pair is one episode; KTO's episodes are responses."""
    log_probs, *rest = arguments(name)
    mask, sequence_id = rest[1], rest[2]
    episode = sequence_id if name == "kto" else sequence_id // 2
    tokens = torch.zeros(6, dtype=torch.int64).index_add(0, episode, mask.long())[:6]
    of_episode = torch.arange(6) if name == "kto" else torch.arange(6) // 2
    count = 6 if name == "kto" else 3

    def mean(counted):
        whole = log_probs.index_put((mask.nonzero().flatten(),), counted)
        values = LOSSES[name](whole, *rest).values
        totals, kind = Totals(int(mask.sum()), count), Aggregation.sequence_mean
        return aggregate(kind, values, mask, sequence_id, totals, 9, tokens[of_episode])

    counted = log_probs[mask].clone().requires_grad_()
    expected = {"dpo": sum(DPO) / 3, "ipo": sum(IPO) / 3, "kto": sum(KTO) / 6}
    assert float(mean(counted.detach())) == pytest.approx(expected[name], rel=1e-12)
    assert torch.autograd.gradcheck(mean, (counted,))


@EVERY_LOSS
def test_no_token_gives_zeros(name):
    empty = [tensor[:0] for tensor in arguments(name)]
    values, sums = LOSSES[name](*empty)
    assert values.shape == (0,) and not any(value.any() for value in sums.values())


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (dpo, {"beta": 0.0, "label_smoothing": 0.0}),
        (dpo, {"beta": 0.1, "label_smoothing": 0.5}),
        (ipo, {"beta": -1.0}),
        (kto, {"beta": 0.1, "desirable_weight": 0.0, "undesirable_weight": 1.0}),
    ],
)
def test_settings_out_of_range_are_refused(loss, wrong):
    with pytest.raises(ValueError, match=f"{loss.__name__} needs"):
        loss(*arguments(loss.__name__), **wrong)
