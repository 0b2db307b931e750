"""All advantage estimators: float64 references on ragged batches, invariances, what is refused."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.config.user_code.classes import locate
from tests.support.estimator_references import REFERENCES, Case

GAMMA, LAM, PASS_K = 0.9, 0.8, 2
COMPARING = tuple(name for name, found in BUILT_IN_ESTIMATORS.items() if found.compares_groups)
# Those whose definition divides by a deviation, and those that keep the reward's unit.
STANDARDISING = ("grpo", "pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
IN_UNIT = tuple(name for name in BUILT_IN_ESTIMATORS if name not in STANDARDISING)


def called(name: str, rewards: Tensor, mask: Tensor, group: Tensor, greedy: Tensor) -> Tensor:
    """The advantages of a built-in estimator.

    Args:
        name: of the estimator.
        rewards: [B, T].
        mask: [B, T].
        group: [B].
        greedy: outcome of each prompt's greedy response, [B]; the critic's values follow it.
    """
    known = {
        "rewards": rewards,
        "response_mask": mask,
        "group_id": group,
        "baseline_rewards": greedy,
        "gamma": GAMMA,
        "lam": LAM,
        "pass_k": PASS_K,
    }
    estimator = BUILT_IN_ESTIMATORS[name]
    if estimator.uses_critic:
        known["values"] = greedy[:, None] * mask.cumsum(1)
    given = {parameter: known[parameter] for parameter in estimator.takes}
    return locate("algorithm.advantage", estimator.path)(**given).advantages


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    name: partial(called, name) for name in BUILT_IN_ESTIMATORS
}


def ragged(
    seed: int, sizes: Sequence[int] = (3, 5, 4), *, binary: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards (float64, NaN off the mask), mask with gaps, mixed groups, greedy outcomes."""
    generator = torch.Generator().manual_seed(seed)
    names = [100 - group for group, size in enumerate(sizes) for _ in range(size)]
    group = torch.tensor(names)[torch.randperm(len(names), generator=generator)]
    mask = torch.rand(len(names), 6, generator=generator) < 0.6
    mask[:, 0] |= ~mask.any(1)
    rewards = torch.randn(len(names), 6, generator=generator, dtype=torch.float64)
    greedy = torch.randn(len(names), generator=generator, dtype=torch.float64)
    if binary:
        first = mask & (mask.cumsum(1) == 1)
        rewards = (first & (rewards > 0)).double()
    return rewards.masked_fill(~mask, torch.nan), mask, group, greedy


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("binary", [False, True])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(3, 7), min_size=1, max_size=4))
def test_against_the_float64_reference(name, binary, seed, sizes):
    rewards, mask, group, greedy = ragged(seed, sizes, binary=binary)
    rows = [row[keep].tolist() for row, keep in zip(rewards, mask, strict=True)]
    case = Case(rows, group.tolist(), greedy.tolist(), GAMMA, LAM, PASS_K)
    found = FUNCTIONS[name](rewards, mask, group, greedy)
    assert found.dtype == torch.float64
    assert (found[~mask] == 0).all()
    for row, keep, expected in zip(found, mask, REFERENCES[name](case), strict=True):
        assert row[keep].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_rewards_give_float32_advantages(name):
    rewards, mask, group, greedy = ragged(1)
    exact = FUNCTIONS[name](rewards, mask, group, greedy)
    found = FUNCTIONS[name](rewards.float(), mask, group, greedy.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float(), atol=1e-5, rtol=1e-4)
    assert FUNCTIONS[name](rewards.bfloat16(), mask, group, greedy.bfloat16()).dtype == (
        torch.float32
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_changes_nothing(name):
    rewards, mask, group, greedy = ragged(2)
    more = torch.full((len(mask), 3), torch.inf, dtype=torch.float64)
    wide = torch.cat([rewards, more], 1), torch.cat([mask, torch.zeros(len(mask), 3).bool()], 1)
    before = FUNCTIONS[name](rewards, mask, group, greedy)
    after = FUNCTIONS[name](*wide, group, greedy)
    torch.testing.assert_close(after[:, :6], before, atol=1e-13, rtol=1e-13)
    assert (after[:, 6:] == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_neither_the_order_of_responses_nor_the_names_of_groups_matter(name):
    rewards, mask, group, greedy = ragged(3)
    before = FUNCTIONS[name](rewards, mask, group, greedy)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    after = FUNCTIONS[name](rewards[order], mask[order], 7 - 3 * group[order], greedy[order])
    torch.testing.assert_close(after, before[order], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", COMPARING)
def test_a_constant_added_to_a_groups_outcomes_changes_nothing(name):
    rewards, mask, group, greedy = ragged(4)
    before = FUNCTIONS[name](rewards, mask, group, greedy)
    first = mask & (mask.cumsum(1) == 1)
    shifted = rewards + first * (group[:, None] - 90)
    torch.testing.assert_close(
        FUNCTIONS[name](shifted, mask, group, greedy), before, atol=1e-9, rtol=1e-9
    )


def test_remax_does_not_see_what_is_added_to_a_response_and_to_its_baseline():
    rewards, mask, group, greedy = ragged(4)
    constants = torch.linspace(-5.0, 5.0, len(mask), dtype=torch.float64)
    first = mask & (mask.cumsum(1) == 1)
    before = FUNCTIONS["remax"](rewards, mask, group, greedy)
    shifted = rewards + first * constants[:, None], mask, group, greedy + constants
    torch.testing.assert_close(FUNCTIONS["remax"](*shifted), before, atol=1e-12, rtol=1e-12)
    assert (before[mask] != 0).all()


@pytest.mark.parametrize("name", STANDARDISING)
def test_the_scale_of_rewards_does_not_matter_where_a_deviation_divides(name):
    rewards, mask, group, greedy = ragged(5)
    before = FUNCTIONS[name](rewards, mask, group, greedy)
    after = FUNCTIONS[name](1000 * rewards, mask, group, 1000 * greedy)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", IN_UNIT)
def test_advantages_scale_with_the_rewards_elsewhere(name):
    rewards, mask, group, greedy = ragged(5)
    before = FUNCTIONS[name](rewards, mask, group, greedy)
    after = FUNCTIONS[name](8 * rewards, mask, group, 8 * greedy)
    torch.testing.assert_close(after, 8 * before, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", [*COMPARING, "reinforce_plus_plus"])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_throughout_are_exactly_zero(name, value, dtype):
    # Three times 0.1 is not 0.3 in binary, nor its third 0.1.
    mask = torch.ones(9, 1, dtype=torch.bool)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])
    found = FUNCTIONS[name](torch.full((9, 1), value, dtype=dtype), mask, group, torch.zeros(9))
    assert found.tolist() == [[0.0]] * 9


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_response_without_tokens_has_no_advantage_and_spoils_none(name):
    """It counts as an outcome of 0 (with length 0), and whatever stands there is not read."""
    rewards, mask, group, greedy = ragged(6)
    mask[2] = False
    found = FUNCTIONS[name](rewards.masked_fill(~mask, torch.nan), mask, group, greedy)
    assert (found[2] == 0).all()
    assert torch.isfinite(found).all()
    assert (found[mask] != 0).any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_without_any_token_have_no_advantages(name):
    nothing = torch.full((4, 3), torch.nan)
    mask, group = torch.zeros(4, 3, dtype=torch.bool), torch.tensor([1, 1, 1, 1])
    assert (FUNCTIONS[name](nothing, mask, group, torch.zeros(4)) == 0).all()
    empty = torch.empty(0, 3)
    found = FUNCTIONS[name](empty, empty.bool(), torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert found.shape == (0, 3)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_by_name(name, value):
    rewards, mask, group, greedy = ragged(7)
    place = mask.nonzero()[3].tolist()
    rewards[tuple(place)] = value
    with pytest.raises(ValueError, match=rf"^{name} needs finite rewards; 1 of .*\[{place[0]}, "):
        FUNCTIONS[name](rewards, mask, group, greedy)


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_is_refused_by_name(name):
    rewards, mask, group, greedy = ragged(8)
    group[4] = 55
    with pytest.raises(ValueError, match=rf"^{name} needs at least . responses .*group 55 has 1$"):
        FUNCTIONS[name](rewards, mask, group, greedy)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_that_do_not_fit_are_refused_by_name(name):
    rewards, mask, group, greedy = ragged(9)
    function = FUNCTIONS[name]
    with pytest.raises(ValueError, match=rf"^{name} needs .*response_mask \(12, 5\)"):
        function(rewards, mask[:, :5], group, greedy)
    with pytest.raises(ValueError, match=f"^{name} needs a bool mask"):
        function(rewards, mask.long(), group, greedy)
    if name in COMPARING:
        with pytest.raises(ValueError, match=rf"^{name} needs .*group_id \[B\]"):
            function(rewards, mask, group[:5], greedy)
    if name != "gae":
        with pytest.raises(ValueError, match=rf"^{name} needs tensors \[B, T\]"):
            function(rewards[0], mask[0], group, greedy)
