"""Partial rollouts: a step's sampling ends by a budget of tokens; what is unfinished goes on.

    admit       new prompts, until rollout.max_in_flight are in flight
    sample      all unfinished responses, until the budget is spent; with the weights of this step;
                with an environment in several calls, between which it answers
    train       the oldest prompts_per_step prompts whose responses are all finished
    keep        the others, with the log-prob and the weights' version of each token

The budget is what prompts_per_step prompts need in the mean, so that as much is sampled as trained.
Which responses are cut follows from seeds and lengths alone. No token is dropped or sampled again;
each is trained at most rollout.max_versions updates after it was sampled.

Source: Kimi Team 2025, "partial rollouts", https://arxiv.org/abs/2501.12599
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from hybridrl.data.batch import Generate, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.seeds import sample_seed
from hybridrl.trainer.sampling.drafts import Draft, Turns, advanced, batch_of
from hybridrl.trainer.sampling.generation import CallStats, total_stats
from hybridrl.trainer.sampling.in_flight import Group, due
from hybridrl.trainer.sampling.source import Metrics, Sampled, SourceParts

# Least tokens of a further round, as a share of the mean length: few rounds, little too much.
MIN_SHARE = 0.25
# A response in flight: index of its group, and of it in the group.
Place = tuple[int, int]


@dataclass
class Step:
    """A step's sampling so far.

    Attributes:
        number: of the step.
        continued: tokens of each response that earlier steps have begun.
        calls: of the engines.
        rounds: of calls, with a budget each.
        begun: samples of a prompt that the step has taken before.
    """

    number: int
    continued: list[int]
    calls: list[CallStats] = field(default_factory=list)
    rounds: int = 0
    begun: int = 0


class GroupsInFlight:
    """Source of groups whose responses may take several steps. `turns` says what follows a turn."""

    def __init__(self, parts: SourceParts, turns: Turns) -> None:
        self._config = parts.config
        self._each = parts.config.rollout.responses_per_prompt
        self._next_prompts = parts.next_prompts
        self._engine = parts.generation.engine
        self._lengths = parts.generation.lengths
        self._num_engines = parts.rollout.num_shards
        self._generate: Generate = partial(parts.rollout.call, "generate")
        self._turns = turns
        self._groups: tuple[Group, ...] = ()  # in flight, oldest first
        self._step: Step | None = None

    def take(self, step: int, count: int) -> Sampled:
        """Take the oldest `count` finished groups out of flight, once there are as many."""
        if self._step is None:
            begun = [self._groups[g].drafts[k] for g, k in open_places(self._groups)]
            self._step = Step(step, [*map(len, begun)])
        version, per_step = self._engine.weight_version, self._config.data.prompts_per_step
        groups = [*self._groups, *self._admitted(self._step, version, taken=per_step - count)]
        # More may be due where a run is resumed with a lower rollout.max_versions.
        needed = min(count, due(groups, version, self._config.rollout.max_versions, per_step))
        groups, calls = self._until_finished(groups, count, needed, version)
        finished = [index for index, group in enumerate(groups) if group.is_finished][:count]
        assert set(finished).issuperset(range(needed)), "an old response was not finished"
        self._groups = tuple(group for i, group in enumerate(groups) if i not in {*finished})
        self._step.calls += calls
        chosen = [groups[index] for index in finished]
        batch = replace(self._joined(chosen), engines=total_stats(calls))
        return Sampled(batch, [chosen[index].prompt for index in batch.group_id.tolist()])

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return metrics of the tokens sampled and trained."""
        taken, self._step = self._step, None
        assert taken is not None, "a step takes groups first"
        sampled = sum(engine.tokens for call in taken.calls for engine in call)
        return self._metrics(taken, batch) | {
            "partial/continued_tokens": float(sum(taken.continued)),
            "partial/trained_fraction": float((self._lag(batch) == 0).sum()) / max(sampled, 1),
        }

    def after_update(self, step: int) -> Metrics:
        """Do nothing: engines sample between updates alone."""
        return {}

    def state(self) -> tuple[Group, ...]:
        """Return the groups in flight, oldest first."""
        return self._groups

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore the groups in flight of a checkpoint."""
        self._groups = tuple(groups)

    def _metrics(self, taken: Step, batch: RolloutBatch) -> Metrics:
        """Compute metrics of a step's sampling, of which `batch` is trained."""
        lag = self._lag(batch)
        return self._in_flight_metrics(taken.calls) | {
            "partial/continued_responses": float(len(taken.continued)),
            "partial/version_lag_mean": float(lag.float().mean()) if len(lag) else 0.0,
            "partial/version_lag_max": float(lag.max()) if len(lag) else 0.0,
            "partial/rounds": float(taken.rounds),
        }

    def _lag(self, batch: RolloutBatch) -> Tensor:
        """Return the updates since each trained token was sampled."""
        assert batch.token_versions is not None
        versions = batch.token_versions.values[batch.response_mask.values]
        return self._engine.weight_version - versions

    def _until_finished(
        self, groups: list[Group], missing: int, needed: int, version: int
    ) -> tuple[list[Group], list[CallStats]]:
        """Sample until `missing` groups are finished, the oldest `needed` among them."""
        assert self._step is not None
        calls: list[CallStats] = []
        least = 0.0
        while (lacking := lacks(groups, missing)) or lacks(groups[:needed], needed):
            budget = self._budget(groups, lacking, least)
            groups, more = self._sampled(groups, needed, budget, version, self._generate)
            calls += more
            self._step.rounds += 1
            least = MIN_SHARE
        return groups, calls

    def _in_flight_metrics(self, calls: Sequence[CallStats]) -> Metrics:
        """Count the responses in flight, and tokens of `calls` over keys of earlier weights."""
        drafts = [draft for group in self._groups for draft in group.drafts]
        unfinished = sum(not draft.finished for draft in drafts)
        engines = [engine for call in calls for engine in call]
        tokens = max(1, sum(engine.tokens for engine in engines))
        old = sum(engine.old_kv_tokens for engine in engines)
        old_kv = {"partial/old_kv_fraction": old / tokens} if self._config.rollout.keep_kv else {}
        return old_kv | {
            "partial/in_flight": float(unfinished),
            "partial/waiting": float(len(drafts) - unfinished),
            "partial/length_mean": self._lengths.mean or 0.0,
        }

    def _admitted(self, step: Step, version: int, taken: int = 0) -> list[Group]:
        """Take new prompts; each goes to the engine with the fewest unfinished responses.

        `taken` prompts, which the step has taken out already, count as in flight until its end.
        """
        groups, most = self._groups, self._config.rollout.max_in_flight
        assert most is not None, "derived"
        load = [0] * self._num_engines
        for group in groups:
            load[self._engine_of(group)] += sum(not draft.finished for draft in group.drafts)
        prompts = self._next_prompts(
            max(0, most - taken - len(groups))
        )  # `most` may be lower than before
        opened = self._turns.open([prompt.prompt_id for prompt in prompts])
        admitted, begun = [], Counter[int]()  # samples of each prompt, which seeds must tell apart
        for prompt, draft in zip(prompts, opened, strict=True):
            engine = load.index(min(load))
            load[engine] += self._each
            first, drafts = step.begun + begun[prompt.prompt_id], (draft,) * self._each
            admitted.append(Group(prompt, step.number, version, engine, drafts, first))
            begun[prompt.prompt_id] += self._each
        step.begun += max(begun.values(), default=0)
        return admitted

    def _sampled(
        self, groups: list[Group], needed: int, budget: int, version: int, call: Generate
    ) -> tuple[list[Group], list[CallStats]]:
        """Continue all unfinished responses until they have `budget` more tokens.

        The oldest `needed` prompts are finished whatever the budget. Without an environment that is
        one call of the engines. With one it is several, between which turns are answered.
        """
        calls = []
        while (places := open_places(groups)) and (budget > 0 or places[0][0] < needed):
            part = call(self._request(groups, places, needed, max(0, budget)))
            calls.append(part.engines)
            assert (part.weight_version == version).all(), "stale weights"
            drafts = [groups[g].drafts[k] for g, k in places]
            new = advanced(drafts, part, self._turns)
            budget -= sum(map(len, new)) - sum(map(len, drafts))
            of_groups: dict[int, dict[int, Draft]] = {}
            for (g, k), draft in zip(places, new, strict=True):
                of_groups.setdefault(g, {})[k] = draft
            groups = [group.with_drafts(of_groups.get(g, {})) for g, group in enumerate(groups)]
            ended = [(g, len(d)) for (g, _), d in zip(places, new, strict=True) if d.finished]
            ids = [groups[g].prompt.prompt_id for g, _ in ended]
            lengths = [length for _, length in ended]
            self._lengths.learn(ids, lengths, in_parts=True)
        return groups, calls

    def _budget(
        self, groups: Sequence[Group], missing: float, least: float = 0.0, length: float = 0.0
    ) -> int:
        """Return the tokens that `missing` more prompts need in the mean.

        They are at least the share `least` of a mean length for each unfinished response. The mean
        is that of the responses that training has sampled so far, and at least `length`.
        """
        mean = self._lengths.mean or self._config.rollout.max_response_tokens / 2
        responses = max(missing * self._each, least * len(open_places(groups)))
        return math.ceil(responses * max(mean, length))

    def _request(
        self, groups: Sequence[Group], places: Sequence[Place], needed: int, budget: int
    ) -> PromptBatch:
        """Build a request whose prompts are prompts with their responses so far."""
        rollout = self._config.rollout
        of_rows = [(groups[g], groups[g].drafts[k]) for g, k in places]
        ids = [self._seed(groups[g], k) for g, k in places]
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
            stop_token_ids=self._turns.stop_token_ids,
            engine=torch.tensor([self._engine_of(group) for group, _ in of_rows]),
            seeds=torch.tensor(
                [self._seed(groups[g], k, *groups[g].drafts[k].seed_parts) for g, k in places]
            ),
            response_id=torch.tensor(ids) if rollout.keep_kv else None,
            token_budget=budget / len(places),
            enough_ended=self._turns.enough,
            must_finish=torch.tensor([g < needed for g, _ in places]),
        )

    def _engine_of(self, group: Group) -> int:
        """Return the group's engine; a resumed run may have fewer."""
        return group.engine % self._num_engines

    def _seed(self, group: Group, index: int, *parts: str | int) -> int:
        """Return the seed of a response, or of its `parts`."""
        seed, prompt_id = self._config.rollout.seed, group.prompt.prompt_id
        return sample_seed(seed, group.step, prompt_id, group.first_sample + index, *parts)

    def _joined(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the responses of finished groups as a batch."""
        rows = [(number, group) for number, group in enumerate(groups) for _ in group.drafts]
        prompts = Ragged.from_rows([group.prompt.token_ids for _, group in rows], torch.int32)
        drafts = [draft for group in groups for draft in group.drafts]
        # A prompt may be in flight twice.
        batch = batch_of(drafts, prompts, torch.tensor([n for n, _ in rows]), self._turns)
        return replace(batch, engine=torch.tensor([self._engine_of(group) for _, group in rows]))


def lacks(groups: Sequence[Group], wanted: int) -> int:
    """Return how many of the wanted finished groups are missing."""
    return max(0, wanted - sum(group.is_finished for group in groups))


def open_places(groups: Sequence[Group]) -> list[Place]:
    """Return the unfinished responses."""
    return [
        (g, k)
        for g, group in enumerate(groups)
        for k, draft in enumerate(group.drafts)
        if not draft.finished
    ]
