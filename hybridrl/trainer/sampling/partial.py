"""Partial rollouts: a step's sampling ends by a budget of tokens; what is unfinished goes on.

    admit       new prompts, until rollout.max_in_flight are in flight
    sample      all unfinished responses, until the budget is spent; with the weights of this step
    train       the oldest prompts_per_step prompts whose responses are all finished
    keep        the others, with the log-prob and the weights' version of each token

The budget is what prompts_per_step prompts need in the mean, so that as much is sampled as trained.
Which responses are cut follows from seeds and lengths alone. No token is dropped or sampled again;
each is trained at most rollout.max_versions updates after it was sampled.

Source: Kimi Team 2025, "partial rollouts", https://arxiv.org/abs/2501.12599
"""

from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.data.batch import Generate, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.seeds import sample_seed
from hybridrl.trainer.sampling.base import Sampled, Sampling, total_stats
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine
from hybridrl.trainer.sampling.in_flight import Draft, Group, due
from hybridrl.trainer.state import TrainState

# Least tokens of a further round, as a share of the mean length: few rounds, little too much.
MIN_SHARE = 0.25
# A response in flight: index of its group, and of it in the group.
Place = tuple[int, int]


class PartialSampling(Sampling):
    """Sampling whose responses may take several steps. `state` has those in flight.

    `engine` is vLLM on all GPUs, `num_engines` its engines; `continue_` generates with a token
    budget, on given ones. `parts` are those of `Sampling`.
    """

    def __init__(
        self,
        state: TrainState,
        engine: HybridEngine,
        num_engines: int,
        continue_: Generate,
        *parts: Any,
    ) -> None:
        super().__init__(*parts)
        self._state = state
        self._engine = engine
        self._num_engines = num_engines
        self._continue = continue_

    def _sample_step(self, step: int) -> Sampled:
        wanted, version = self._config.data.prompts_per_step, self._engine.weight_version
        continued = sum(not draft.finished for g in self._state.in_flight for draft in g.drafts)
        groups = [*self._state.in_flight, *self._admitted(step, version)]
        needed = due(groups, version, self._config.rollout.max_versions, wanted)
        parts: list[RolloutBatch] = []
        missing = missing_groups(groups, wanted)
        while missing or not parts:
            least = MIN_SHARE if parts else 0.0
            groups, part = self._continued(groups, needed, missing, least, version)
            parts.append(part)
            missing = missing_groups(groups, wanted)
        sampled = self._chosen(groups, needed, parts)
        sampled.metrics["partial/continued_responses"] = float(continued)
        return sampled

    def _chosen(
        self, groups: Sequence[Group], needed: int, parts: Sequence[RolloutBatch]
    ) -> Sampled:
        """Take the oldest finished groups of a step out of flight; `parts` were sampled in it."""
        wanted = self._config.data.prompts_per_step
        finished = [index for index, group in enumerate(groups) if group.is_finished]
        trained = set(finished[:wanted])
        assert trained.issuperset(range(needed)), "an old response was not finished"
        chosen = [groups[index] for index in finished[:wanted]]
        self._state.in_flight = tuple(g for i, g in enumerate(groups) if i not in trained)
        batch = joined(chosen, parts)
        metrics = _metrics(batch, parts, self._engine.weight_version)
        prompts = [group.prompt for group in chosen for _ in group.drafts]
        return Sampled(batch, prompts, metrics=metrics | self.in_flight_metrics())

    def in_flight_metrics(self) -> dict[str, float]:
        """Count the responses in flight."""
        drafts = [draft for group in self._state.in_flight for draft in group.drafts]
        unfinished = sum(not draft.finished for draft in drafts)
        return {
            "partial/in_flight": float(unfinished),
            "partial/waiting": float(len(drafts) - unfinished),
            "partial/length_mean": self._state.lengths.mean or 0.0,
        }

    def _admitted(self, step: int, version: int) -> list[Group]:
        """Take new prompts; each goes to the engine with the fewest unfinished responses."""
        groups, most = self._state.in_flight, self._config.rollout.max_in_flight
        assert most is not None, "derived"
        load = [0] * self._num_engines
        for group in groups:
            load[self._engine_of(group)] += sum(not draft.finished for draft in group.drafts)
        admitted = []
        for prompt in self._take(most - len(groups)):
            engine = load.index(min(load))
            load[engine] += self._each
            drafts = (Draft.empty(),) * self._each
            admitted.append(Group(prompt, step, version, engine, drafts))
        return admitted

    def _continued(
        self, groups: Sequence[Group], needed: int, missing: int, least: float, version: int
    ) -> tuple[list[Group], RolloutBatch]:
        """Sample once, with the tokens that `missing` more prompts need as budget.

        The budget is at least the share `least` of the mean length for each response.
        """
        places = open_places(groups)
        budget = self._budget(places, missing, least)
        part = self._continue(self._request(groups, places, needed, budget))
        return self._merged(groups, places, part, version), part

    def _budget(
        self, places: Sequence[Place], missing: float, least: float = 0.0, length: float = 0.0
    ) -> float:
        """Return the tokens of each response, in the mean, that `missing` more prompts need.

        Responses are expected to have the mean length of all so far, and at least `length`.
        """
        mean = self._state.lengths.mean or self._config.rollout.max_response_tokens / 2
        return max(missing * self._each / len(places), least) * max(mean, length)

    def _merged(
        self, groups: Sequence[Group], places: Sequence[Place], part: RolloutBatch, version: int
    ) -> list[Group]:
        """Return the groups with the tokens of a call that continued the responses `places`."""
        assert part.unfinished is not None
        assert (part.weight_version == version).all(), "stale weights"
        of_rows = zip(
            places,
            part.responses.rows(),
            part.rollout_log_probs.rows(),
            part.unfinished.tolist(),
            part.truncated.tolist(),
            strict=True,
        )
        new = list(groups)
        for (g, k), tokens, log_probs, is_open, truncated in of_rows:
            draft = (
                new[g]
                .drafts[k]
                .continued(tokens, log_probs, version, finished=not is_open, truncated=truncated)
            )
            new[g] = new[g].with_draft(k, draft)
        ended = [(g, k) for g, k in places if new[g].drafts[k].finished]
        self._state.lengths.learn(
            [new[g].prompt.prompt_id for g, _ in ended], [len(new[g].drafts[k]) for g, k in ended]
        )
        return new

    def _request(
        self, groups: Sequence[Group], places: Sequence[Place], needed: int, budget: float
    ) -> PromptBatch:
        """Build a request whose prompts are prompts with their responses so far."""
        rollout = self._config.rollout
        of_rows = [(groups[g], groups[g].drafts[k]) for g, k in places]
        prefixes = [[*group.prompt.token_ids, *draft.tokens.tolist()] for group, draft in of_rows]
        return PromptBatch(
            prompts=Ragged.from_rows(prefixes, torch.int32),
            prompt_id=torch.tensor([group.prompt.prompt_id for group, _ in of_rows]),
            step=0,  # seeds are given
            responses_per_prompt=1,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=torch.tensor(
                [rollout.max_response_tokens - len(draft) for _, draft in of_rows]
            ),
            engine=torch.tensor([self._engine_of(group) for group, _ in of_rows]),
            seeds=torch.tensor([self._seed(groups[g], k) for g, k in places]),
            token_budget=budget,
            must_finish=torch.tensor([g < needed for g, _ in places]),
        )

    def _engine_of(self, group: Group) -> int:
        """Return the group's engine; a resumed run may have fewer."""
        return group.engine % self._num_engines

    def _seed(self, group: Group, sample: int) -> int:
        """Return the seed of a response's next tokens, a function of how many it has."""
        sampled, prompt_id = len(group.drafts[sample]), group.prompt.prompt_id
        after = ("after", sampled) if sampled else ()
        return sample_seed(self._config.rollout.seed, group.step, prompt_id, sample, *after)


def joined(groups: Sequence[Group], parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return the responses of finished groups as a batch, with the speeds of a step's `parts`."""
    rows = [(number, group, draft) for number, group in enumerate(groups) for draft in group.drafts]
    responses = Ragged.from_rows([draft.tokens for _, _, draft in rows], torch.int32)
    return RolloutBatch(
        prompts=Ragged.from_rows([group.prompt.token_ids for _, group, _ in rows], torch.int32),
        responses=responses,
        response_mask=responses.like(torch.ones_like(responses.values, dtype=torch.bool)),
        rollout_log_probs=Ragged.from_rows([d.log_probs for _, _, d in rows], torch.float32),
        # A prompt may be in flight twice.
        group_id=torch.tensor([number for number, _, _ in rows]),
        weight_version=torch.tensor([int(draft.versions[-1]) for _, _, draft in rows]),
        truncated=torch.tensor([draft.truncated for _, _, draft in rows]),
        token_versions=Ragged.from_rows([d.versions for _, _, d in rows], torch.int32),
        engine=torch.tensor([group.engine for _, group, _ in rows]),
        engines=total_stats(parts, first_token=lambda times: times[0]),
    )


def missing_groups(groups: Sequence[Group], wanted: int) -> int:
    """Return how many finished groups are missing."""
    return max(0, wanted - sum(group.is_finished for group in groups))


def open_places(groups: Sequence[Group]) -> list[Place]:
    """Return the unfinished responses."""
    return [
        (g, k)
        for g, group in enumerate(groups)
        for k, draft in enumerate(group.drafts)
        if not draft.finished
    ]


def _metrics(batch: RolloutBatch, parts: Sequence[RolloutBatch], version: int) -> dict[str, float]:
    """Compute metrics of what was sampled and trained."""
    assert batch.token_versions is not None
    lag = version - batch.token_versions.values
    sampled = sum(int(part.responses.lengths.sum()) for part in parts)
    return {
        "partial/version_lag_mean": float(lag.float().mean()),
        "partial/version_lag_max": float(lag.max()),
        "partial/trained_fraction": float((lag == 0).sum()) / max(sampled, 1),
        "partial/rounds": float(len(parts)),
    }
