"""Which tokens the covariance losses hold back: hand-worked, shares, bands, what is refused."""

import math

import pytest
import torch

from hybridrl.algorithms.covariance_losses import covariances, largest, some_in_band


def test_covariances_hand_worked():
    # log-probs -1, -3 (mean -2), advantages 2, 0 (mean 1): (1)(1) and (-1)(-1); the third is masked
    covariance = covariances(
        torch.tensor([-1.0, -3.0, -9.0]),
        torch.tensor([2.0, 0.0, 7.0]),
        torch.tensor([True, True, False]),
    )
    assert covariance.tolist() == [1.0, 1.0, 0.0]


def test_covariances_sum_to_the_covariance_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = torch.randn(2, 25, generator=generator, dtype=torch.float64)
    mask = torch.arange(25) % 6 != 4
    total = covariances(log_probs, advantages, mask).sum()
    pairs = torch.stack([log_probs[mask], advantages[mask]])
    assert float(total) / int(mask.sum()) == pytest.approx(float(pairs.cov(correction=0)[0, 1]))


def test_largest_takes_the_asked_share_of_the_tokens():
    covariance = torch.tensor([3.0, 9.0, -1.0, 5.0, 7.0, 99.0])
    mask = torch.tensor([True, True, True, True, True, False])
    chosen = largest(covariance, mask, torch.Generator(), fraction=0.4)
    assert chosen.tolist() == [False, True, False, False, True, False]


def test_some_in_band_draws_from_the_band_alone_and_by_the_generator():
    covariance = torch.arange(100.0)
    mask = torch.arange(100) != 12

    def draw(seed: int) -> list[int]:
        chosen = some_in_band(
            covariance,
            mask,
            torch.Generator().manual_seed(seed),
            fraction=0.05,
            cov_low=10.0,
            cov_high=29.0,
        )
        return chosen.nonzero().flatten().tolist()

    assert draw(1) == draw(1) != draw(2)
    assert len(draw(1)) == 4  # floor(0.05 * 99)
    assert {i for seed in range(200) for i in draw(seed)} == set(range(10, 30)) - {12}


def test_a_band_with_too_few_tokens_gives_those():
    chosen = some_in_band(
        torch.tensor([0.0, 2.0, 0.0]),
        torch.ones(3).bool(),
        torch.Generator(),
        fraction=1.0,
        cov_low=1.0,
        cov_high=5.0,
    )
    assert chosen.tolist() == [False, True, False]


@pytest.mark.parametrize("fraction", [2e-4, 0.1, 0.199])
def test_a_small_batch_has_one_token_held_back_not_none(fraction):
    covariance = torch.tensor([3.0, 9.0, -1.0, 4.0, 2.0, 99.0])
    mask = torch.tensor([True, True, True, True, True, False])
    chosen = largest(covariance, mask, torch.Generator(), fraction=fraction)
    assert chosen.tolist() == [False, True, False, False, False, False]
    band = {"cov_low": 3.5, "cov_high": 4.5}
    drawn = some_in_band(covariance, mask, torch.Generator(), fraction=fraction, **band)
    assert drawn.tolist() == [False, False, False, True, False, False]


def test_where_no_token_counts_none_is_held_back():
    covariance, mask = torch.tensor([3.0, 9.0]), torch.zeros(2).bool()
    assert not largest(covariance, mask, torch.Generator(), fraction=0.5).any()
    drawn = some_in_band(
        covariance, mask, torch.Generator(), fraction=0.5, cov_low=0.0, cov_high=10.0
    )
    assert not drawn.any()


def test_an_empty_band_gives_none():
    covariance, mask = torch.tensor([3.0, 9.0]), torch.ones(2).bool()
    drawn = some_in_band(
        covariance, mask, torch.Generator(), fraction=0.5, cov_low=4.0, cov_high=8.0
    )
    assert not drawn.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["log_probs", "advantages"])
def test_what_is_not_finite_is_refused_by_name_and_place(name, value):
    """Else one such token makes every token's covariance NaN, and which are chosen arbitrary."""
    tensors = {"log_probs": torch.arange(4.0), "advantages": torch.arange(4.0)}
    tensors[name][2] = value
    mask = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match=rf"^covariances .* {name}; 1 of 3 .*{value}, at \[2\]"):
        covariances(**tensors, response_mask=mask)
    covariances(**tensors, response_mask=mask & (torch.arange(4) != 2))


def test_tensors_and_settings_that_do_not_fit_are_named():
    x, mask = torch.zeros(3), torch.ones(3).bool()
    with pytest.raises(ValueError, match=r"response_mask \(2,\)"):
        covariances(x, x, mask[:2])
    with pytest.raises(ValueError, match="bool"):
        covariances(x, x, mask.float())
    with pytest.raises(ValueError, match="fraction=0"):
        largest(x, mask, torch.Generator(), fraction=0.0)
    with pytest.raises(ValueError, match="cov_low=2"):
        some_in_band(x, mask, torch.Generator(), fraction=1.0, cov_low=2.0, cov_high=1.0)
