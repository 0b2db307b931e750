"""PromptSource: one sequence however it is cut, a cursor that goes anywhere, shares, seeds."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.prompt_source import PromptSource, prompt_source
from hybridrl.data.sources.prompts import Prompt, load_prompts
from tests.support.data_configs import data_config
from tests.support.role_configs import model_config

MIXED = {"sums": 3.0, "words": 1.0}


def numbered(count: int, dataset: str = "", first: int = 0) -> list[Prompt]:
    """Prompts whose difficulty falls with their number."""
    return [
        Prompt(index, [index], "", "", {}, {}, dataset, float(-index))
        for index in range(first, first + count)
    ]


def mixed(seed: int = 1, curriculum: int = 0) -> PromptSource:
    prompts = numbered(11, "sums") + numbered(7, "words", first=11)
    return PromptSource(prompts, 4, seed, MIXED, curriculum)


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in prompts]


def test_the_first_epoch_is_the_seeds_shuffle():
    order = list(range(12))
    random.Random(derive_seed(1, "epoch", 0)).shuffle(order)
    assert ids(PromptSource(numbered(12), 4, seed=1).take(12)) == order


def test_each_epoch_holds_every_prompt_once():
    source = PromptSource(numbered(12), 4, seed=1)
    first, second = ids(source.take(12)), ids(source.take(12))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_no_step_holds_a_prompt_twice_however_steps_fall_on_epochs():
    for seed in range(5):
        drawn = ids(PromptSource(numbered(7), 5, seed=seed).take(140))
        assert all(len(set(drawn[k : k + 5])) == 5 for k in range(136))
        assert all(sorted(drawn[k : k + 7]) == list(range(7)) for k in range(0, 140, 7))


def test_a_longer_window_is_for_data_sets_that_have_as_many():
    for size, window in ((16, 16), (15, 5)):
        drawn = ids(PromptSource(numbered(size), 5, seed=1, preferred=16).take(120))
        different = {len(set(drawn[k : k + 16])) for k in range(104)}
        assert (different == {16}) == (window == 16)
        assert all(len(set(drawn[k : k + window])) == window for k in range(120 - window))
    with pytest.raises(ValueError, match="5 of 4 prompts"):
        PromptSource(numbered(4), 5, seed=1, preferred=16)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3), st.sampled_from([0, 30]))
def test_cuts_change_nothing_and_the_position_is_all_there_is_to_keep(takes, seed, curriculum):
    whole = ids(mixed(seed, curriculum).take(sum(takes) + 5))
    source = mixed(seed, curriculum)
    drawn = [prompt_id for number in takes for prompt_id in ids(source.take(number))]
    assert drawn == whole[: sum(takes)]
    assert source.position == sum(takes)
    resumed = mixed(seed, curriculum)
    resumed.take(source.position)
    assert ids(resumed.take(5)) == whole[sum(takes) :]


def test_a_mixture_keeps_its_shares_in_every_step():
    source = mixed()
    for _ in range(50):
        assert Counter(prompt.dataset for prompt in source.take(4)) == {"sums": 3, "words": 1}


def test_each_data_set_of_a_mixture_goes_through_passes_of_its_own():
    drawn = mixed().take(4 * 7 * 11)
    for name, size, first in (("sums", 11, 0), ("words", 7, 11)):
        of_set = [p.prompt_id for p in drawn if p.dataset == name]
        passes = [sorted(of_set[k : k + size]) for k in range(0, len(of_set), size)]
        assert passes == [list(range(first, first + size))] * len(passes)


def test_a_curriculum_begins_with_the_easiest():
    # Difficulty falls with the number; 2 of 20 are admitted at first, 2 + drawn / 2 later.
    prompts = numbered(20)
    drawn = ids(PromptSource(prompts, 1, seed=1, curriculum=36).take(36))
    assert set(drawn[:2]) == {18, 19}
    assert all(prompt_id >= 18 - position // 2 for position, prompt_id in enumerate(drawn))
    assert 0 in ids(PromptSource(prompts, 1, seed=1, curriculum=36).take(60))


def test_a_run_with_a_curriculum_begins_with_few_steps():
    config = data_config(curriculum="steps", curriculum_steps=50, prompts_per_step=32)
    sets = load_prompts(config, model_config("embedded"), 200)
    source = prompt_source(sets, config, seed=1)
    steps = [[prompt.difficulty for prompt in source.take(32)] for _ in range(51)]
    # About a third of the problems has one step; a tenth of all is drawn from at first, and all
    # from step 51 on.
    assert set(steps[0]) == {1.0}
    means = [sum(step) / 32 for step in steps]
    assert sum(means[:10]) < sum(means[20:30]) < sum(means[40:50])
    assert 3.0 in steps[50]


def test_problems_of_equal_difficulty_join_in_seeded_order():
    prompts = [Prompt(index, [], "", "", {}, {}, "", float(index // 50)) for index in range(100)]
    first = [PromptSource(prompts, 1, seed, curriculum=900).take(10) for seed in (1, 1, 2)]
    assert ids(first[0]) == ids(first[1]) != ids(first[2])
    assert max(ids(first[0]) + ids(first[2])) < 50


def test_seeds_and_names_give_orders_of_their_own():
    assert ids(mixed(seed=1).take(20)) != ids(mixed(seed=2).take(20))
    twins = numbered(9, "a") + numbered(9, "b", first=9)
    drawn = PromptSource(twins, 4, 1, {"a": 1.0, "b": 1.0}).take(18)
    by_name = {n: [p.prompt_id % 9 for p in drawn if p.dataset == n] for n in ("a", "b")}
    assert by_name["a"] != by_name["b"]


def test_source_refuses_more_prompts_than_there_are():
    with pytest.raises(ValueError, match="5 of 4"):
        PromptSource(numbered(4), 5, seed=1)
    with pytest.raises(ValueError, match="3 of 2 prompts of words"):
        PromptSource(numbered(9, "sums") + numbered(2, "words"), 4, 1, {"sums": 1, "words": 1})
