"""Keys of other trainers: what the table says exists here, is suggested, and is on its page."""

import pytest

from hybridrl.config.keys import (
    NO_KEY,
    did_you_mean,
    leaves,
    named_elsewhere,
    other_names,
    raw_tree,
)
from tests.support.composing import REPO, composed, problems
from tools.coming_from import PAGE, table

EVERYTHING = ["lora=default", "reward_model=default", "teacher=default", "algorithm/loss=dual_clip"]


@pytest.fixture(scope="module")
def known():
    """Keys, sections and groups."""
    keys = set(leaves(raw_tree(composed(["hardware=cpu", "reward=http", *EVERYTHING]))))
    sections = {key.rsplit(".", n)[0] for key in keys for n in (1, 2)}
    groups = {str(f.parent.relative_to(REPO / "conf")) for f in (REPO / "conf").rglob("*.yaml")}
    return keys | sections | groups | {"hydra.run.dir"}


def test_each_key_of_ours_exists(known):
    ours = {key for other in other_names() for key in other.ours.split(", ")} - {NO_KEY}
    assert sorted(ours - known) == []


def test_the_table_is_large_and_has_no_key_twice():
    pairs = [(other.trainer, other.key) for other in other_names()]
    assert len(pairs) == len(set(pairs)) > 150
    assert all(other.difference for other in other_names() if other.ours == NO_KEY)


def test_the_page_has_the_table():
    """`python -m tools.coming_from` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(table(trainer) in text for trainer in {other.trainer for other in other_names()})


def test_each_of_their_keys_is_translated():
    for other in other_names():
        assert f"'s {other.key} " in did_you_mean(other.key, []) or other.ours in {
            found.ours for found in named_elsewhere(other.key)
        }


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("rollout.n", "rollout.responses_per_prompt"),
        ("actor.ppo_mini_batch_size", "actor.mini_batch_size"),
        ("algorithm.clip_ratio", "algorithm.loss.args.clip_low"),
        ("grpo.num_generations", "rollout.responses_per_prompt"),
        ("beta", "algorithm.kl.coef"),
        ("lr", "actor.optim.lr"),
        ("top_k", "eval.top_k"),
        ("actor.use_dynamic_bsz", NO_KEY),
    ],
)
def test_ends_of_keys_and_other_sections_are_recognised(typed, ours):
    assert [other.ours.split(", ")[0] for other in named_elsewhere(typed)] == [ours]


@pytest.mark.parametrize("typed", ["foo.name", "actor.path", "actor.optim.lrr", "my_key"])
def test_common_words_are_not_taken_for_theirs(typed):
    assert named_elsewhere(typed) == []


def test_a_config_with_their_key_is_refused_with_ours():
    """In a file; on the command line Hydra finds the key first, with the same words."""
    (message,) = problems("hardware=cpu", "+rollout.tensor_model_parallel_size=2")
    assert "is rollout.tensor_parallel_size here" in message
