"""Partial rollouts of agents: episodes that have not ended go on in the next step.

    admit       start programs of new prompts, until rollout.max_in_flight prompts are in flight
    sample      until prompts_per_step prompts have ended, the oldest due ones among them
    train       these; meanwhile programs run, and their requests wait at the endpoint
    keep        the tokens of ended episodes with their versions; the running programs

Which episodes end first is decided by the clock. A program does not survive the driver: a resumed
run has the ended episodes of a checkpoint, and starts the programs of the others again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from hybridrl.agents.record import EpisodeRecord, decode_sequences, encode_sequences
from hybridrl.data.batch import RolloutBatch
from hybridrl.trainer.agents.batch import EpisodeResult
from hybridrl.trainer.agents.generator import AgentGenerator, Running
from hybridrl.trainer.sampling.drafts import Draft, OneTurn
from hybridrl.trainer.sampling.generation import CallStats
from hybridrl.trainer.sampling.in_flight import Group
from hybridrl.trainer.sampling.partial import GroupsInFlight, open_places
from hybridrl.trainer.sampling.source import Metrics, SourceParts


class ProgramsInFlight(GroupsInFlight):
    """Source of groups whose episodes may take several steps.

    The `state` of a draft is the name of its running episode, then the token sequences of the ended
    one and the rewards of its turns.
    """

    def __init__(self, parts: SourceParts, agents: AgentGenerator) -> None:
        super().__init__(parts, OneTurn())
        self._agents = agents
        self._running: dict[str, Running] = {}

    def begin_update(self, step: int, batch: RolloutBatch) -> Metrics:
        """Return metrics of the tokens sampled and trained.

        None counts tokens of one step: they are at the endpoint, and evaluations let episodes go
        on, too.
        """
        taken, self._step = self._step, None
        assert taken is not None, "a step takes groups first"
        return self._metrics(taken, batch)

    def _until_finished(
        self, groups: list[Group], missing: int, needed: int, version: int
    ) -> tuple[list[Group], list[CallStats]]:
        """Sample for the programs until enough groups have ended."""
        groups = [self._started(group) for group in groups]

        def is_enough() -> bool:
            ended = [all(map(self._has_ended, group.drafts)) for group in groups]
            return sum(ended) >= missing and all(ended[:needed])

        self._agents.run(is_enough)
        assert self._step is not None
        self._step.rounds += 1
        return self._collected(groups), [self._agents.stats]

    def _started(self, group: Group) -> Group:
        """Start the programs of new episodes, and of those that ran when a checkpoint was taken."""
        new = [
            index
            for index, draft in enumerate(group.drafts)
            if not draft.finished and draft.state not in self._running
        ]
        samples = [group.first_sample + index for index in new]
        begun = self._agents.begin(group.prompt, group.step, samples, self._engine_of(group))
        self._running |= {one.name: one for one in begun}
        names = {k: one.name for k, one in zip(new, begun, strict=True)}
        return group.with_drafts({k: replace(group.drafts[k], state=names[k]) for k in new})

    def _has_ended(self, draft: Draft) -> bool:
        return draft.finished or self._running[draft.state].found.done()

    def _collected(self, groups: list[Group]) -> list[Group]:
        """Return groups with the episodes that have ended as finished drafts."""
        ended = [(g, k) for g, k in open_places(groups) if self._has_ended(groups[g].drafts[k])]
        running = [self._running.pop(groups[g].drafts[k].state) for g, k in ended]
        for (g, k), result in zip(ended, self._agents.end(running), strict=True):
            groups[g] = groups[g].with_drafts({k: self._draft(result)})
        return groups

    def _draft(self, result: EpisodeResult) -> Draft:
        sequences = result.record.sequences
        failure, reason = None, ""
        if result.failure:
            failure, reason = self._agents.failures.look_up(result.failure)
        return replace(
            Draft.empty(),
            finished=True,
            state=json.dumps([encode_sequences(sequences), dict(result.turns)]),
            reward=result.reward,
            failure=failure,
            reason=reason,
        )

    def _joined(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the episodes of finished groups as a batch."""
        numbered = [(n, group, draft) for n, group in enumerate(groups) for draft in group.drafts]
        batch = self._agents.batch([self._result(*one) for one in numbered])
        whole = batch.by_episode()
        ids = [groups[number].prompt.prompt_id for number in whole.group_id.tolist()]
        self._lengths.learn(ids, whole.responses.lengths.tolist(), in_parts=True)
        return batch

    def _result(self, number: int, group: Group, draft: Draft) -> EpisodeResult:
        sequences, turns = json.loads(draft.state)
        record = EpisodeRecord(lambda *_: [], sequences=decode_sequences(sequences))
        failure = 0
        if draft.failure is not None:
            failure = self._agents.failures.number(draft.failure, draft.reason)
        prompt = group.prompt.token_ids
        engine = self._engine_of(group)
        return EpisodeResult(number, engine, prompt, record, draft.reward, failure, turns)
