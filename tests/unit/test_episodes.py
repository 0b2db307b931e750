"""Episodes of several responses: one mini-batch, one reward, one member of their group."""

import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.partition import partition_by_total
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.rewarding import outcome_on_last_token
from tests.run_configs import run_config

# Rows of six episodes, the first four of group 0: the second episode has three, the fifth two.
EPISODES = [0, 1, 1, 1, 2, 3, 4, 4, 5]
GROUPS = [0, 0, 0, 0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def batch(mask: list[int] | None = None) -> RolloutBatch:
    lengths = [2 + row % 3 for row in range(len(EPISODES))]
    responses = Ragged.from_rows([[5] * n for n in lengths], torch.int32)
    count = len(responses.values)
    sampled = torch.ones(count, dtype=torch.bool)
    for token in mask or ():
        sampled[token] = False
    return RolloutBatch(
        prompts=Ragged.from_rows([[1, 2]] * len(lengths), torch.int32),
        responses=responses,
        response_mask=responses.like(sampled),
        rollout_log_probs=responses.like(-torch.ones(count)),
        group_id=torch.tensor(GROUPS),
        weight_version=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        episode=torch.tensor(EPISODES),
    )


def advantages(of: RolloutBatch, name: str) -> list[list[float]]:
    config = run_config(f"algorithm={name}").algorithm
    scores = outcome_on_last_token(torch.tensor(REWARDS), of.by_episode())
    found = AdvantageEstimator(config).estimate(of, of.responses.like(scores.values))["advantages"]
    assert torch.equal(found.lengths, of.responses.lengths)
    return [row.tolist() for row in found.rows()]


def test_the_last_responses_and_the_whole_of_episodes():
    one = batch()
    assert one.last_of_episodes.tolist() == [0, 3, 4, 5, 7, 8]
    whole = one.by_episode()
    lengths = one.responses.lengths.tolist()
    assert whole.responses.lengths.tolist()[:2] == [lengths[0], sum(lengths[1:4])]
    assert whole.group_id.tolist() == [0, 0, 0, 0, 1, 1] and whole.episode is None


def test_baselines_are_by_episode_and_all_its_responses_have_its_advantage():
    """RLOO, group 0: r - mean of the other three; rewards 1 0 1 0. Group 1: 1 against 0."""
    rows = advantages(batch(), "rloo")
    expected = [2 / 3, -2 / 3, 2 / 3, -2 / 3, 1.0, -1.0]
    for row, episode in zip(rows, EPISODES, strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.full((len(row),), expected[episode]))


def test_an_episode_whose_last_token_is_not_trained_keeps_its_reward():
    one = batch(mask=[0, 1])  # both tokens of the first episode
    rows = advantages(one, "rloo")
    torch.testing.assert_close(torch.tensor(rows[4]), torch.full((3,), 2 / 3))


def test_a_value_that_is_not_trained_changes_no_advantage():
    """The second episode's rows have 3, 4 and 2 tokens; the last two are of other sampling."""
    of = batch(mask=[9, 10])
    config = run_config("algorithm.lam=0.5", "algorithm.whiten_advantages=false").algorithm
    found = []
    for untrained in (0.0, 9.0):
        values = of.response_mask.values.logical_not() * untrained
        scored = outcome_on_last_token(1.0 - torch.tensor(REWARDS), of.by_episode())
        rewards = of.responses.like(scored.values)
        of = of.adding(values=of.responses.like(values))
        estimated = AdvantageEstimator(config).estimate(of, rewards)
        # The outcome 1 is on the last trained token: 1, 1/2, 1/4, ... back from there.
        assert estimated["advantages"].rows()[2].tolist() == [0.125, 0.25, 0.5, 1.0]
        found.append(estimated["returns"].values[of.response_mask.values])
    assert torch.equal(*found)


def test_an_episode_is_in_one_mini_batch():
    sizes = UpdateSizes(2, 2, 2, 1000, float, partition_by_total)
    scheduled = schedule(batch(), sizes, seed=1, step=1)
    for epoch in range(2):
        minis = [
            {EPISODES[i] for rank in scheduled.ranks for micro in rank[epoch][k] for i in micro}
            for k in range(3)
        ]
        assert [len(mini) for mini in minis] == [2, 2, 2]
        assert set.union(*minis) == set(range(6))
    rows = [i for rank in scheduled.ranks for mini in rank[0] for micro in mini for i in micro]
    assert sorted(rows) == list(range(len(EPISODES)))
