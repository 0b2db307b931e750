"""Episodes of several responses: one mini-batch, one reward, one member of their group."""

from dataclasses import replace

import pytest
import torch

from hybridrl.algorithms.token_loss import aggregate
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import ConversationOutcome, RolloutBatch
from hybridrl.data.partition import partition_by_total
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.health.measures import MarkedTokens, response_measures
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.rewarding import outcome_on_last_token
from hybridrl.trainer.timing.engines import rollout_metrics
from tests.support.batches import batch_of
from tests.support.run_configs import run_config

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


# Two episodes of 12 tokens, the first in three sequences; the last token of each is masked.
TWO = replace(batch_of([4, 3, 5, 12]), episode=torch.tensor([0, 0, 0, 1]))
LASTS = [11, 23]


def token_weights(
    of: RolloutBatch, kind: Aggregation, ranks: int, max_tokens: int
) -> dict[int, list[float]]:
    """The weight of each token in the loss of one mini-batch, by response."""
    sizes = UpdateSizes(ranks, 2, 1, max_tokens, float, partition_by_total)
    found: dict[int, list[float]] = {}
    for rank in schedule(of, sizes, seed=1, step=1).shard(ranks):
        for micros, totals in rank.policy_mini_batches():
            for micro in micros:
                values = torch.ones(len(micro.responses.values), requires_grad=True)
                ids, tokens = micro.responses.row_ids(), micro.episode_tokens
                aggregate(kind, values, micro.counted.values, ids, totals, 10, tokens).backward()
                for row, weights in zip(
                    micro.group_id, micro.responses.like(values.grad).rows(), strict=True
                ):
                    found[int(row)] = weights.tolist()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 1000], ids=["one in a micro-batch", "all in one"])
@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        (Aggregation.token_mean, 1 / 22),
        (Aggregation.sequence_mean, 1 / 2 / 11),
        (Aggregation.sequence_sum, 1 / 2 / 10),
    ],
)
def test_branches_share_the_weight_of_their_episode_by_tokens(kind, weight, ranks, max_tokens):
    """Not 3/4 and 1/4; wherever they are computed."""
    mask = torch.ones(24, dtype=torch.bool)
    mask[LASTS] = False
    of = TWO.adding(loss_mask=TWO.responses.like(mask))
    found = token_weights(of, kind, ranks, max_tokens)
    found = [value for row in range(4) for value in found[row]]
    assert found == pytest.approx((weight * mask).tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", list(Aggregation))
def test_without_branches_weights_are_those_without_episodes_to_the_bit(kind):
    plain = batch_of([4, 3])
    alone = replace(plain, episode=torch.arange(2))
    assert token_weights(plain, kind, 1, 1000) == token_weights(alone, kind, 1, 1000)


def test_an_episode_without_a_counted_token_is_no_part_of_the_mean():
    of = TWO.adding(loss_mask=TWO.responses.like(torch.arange(24) < 12))
    found = token_weights(of, Aggregation.sequence_mean, 1, 1000)
    assert [sum(found[row]) for row in range(4)] == pytest.approx([4 / 12, 3 / 12, 5 / 12, 0.0])


def test_metrics_of_responses_are_by_episode():
    """Three of four sequences are of one episode, one of these is cut off."""
    of = replace(
        TWO,
        truncated=torch.tensor([False, True, False, False]),
        conversation=ConversationOutcome(
            torch.tensor([1, 1, 2, 1]), torch.zeros(4), torch.zeros(4)
        ),
        response_mask=TWO.responses.like(torch.arange(24) >= 6),
    )
    found = rollout_metrics(of, 1.0, None)
    assert found["response/length_mean"] == found["response/length_max"] == 12.0
    assert found["response/truncated_fraction"] == 0.5
    assert found["environment/tokens_mean"] == 3.0
    assert found["rollout/turns_mean"] == 2.5 and found["agent/branches"] == 1.0
    assert found["batch/responses"] == 4.0 and found["batch/tokens"] == 24.0 + 4 * 2
    marked = MarkedTokens(ends=torch.tensor([7]), special=torch.tensor([2]))  # of the third one
    assert response_measures(of, marked)["response/special_fraction"] == 0.5
