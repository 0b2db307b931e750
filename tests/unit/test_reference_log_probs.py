"""Log-probs of the reference: once for each prompt, by its first step's schedule, also resumed."""

from dataclasses import dataclass, field

import torch

from hybridrl.data.partition import partition_by_micro_batch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import UpdateSizes, schedule
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.sft import ReferenceLogProbs, reference_batch

PER_STEP, STEPS = 4, 7
PROMPTS = [
    Prompt(n, [n], "", "", {}, {}, answer_ids=[n] * (n + 1), rejected_ids=[n + 50] * (12 - n))
    for n in range(10)
]
SIZES = UpdateSizes(1, 4, 1, 30, float, partition_by_micro_batch, whole_episodes=True)


@dataclass
class Composition:
    """A role by which a log-prob is the number of the micro-batch's tokens, and its calls."""

    computed: list[list[int]] = field(default_factory=list)

    def call(self, method, whole):
        assert method == "compute_log_probs"
        self.computed.append(whole.batch.group_id[::2].tolist())
        values = [torch.empty(0)] * len(whole.batch)
        for micro in (micro for mini in whole.ranks[0][0] for micro in mini):
            tokens = int(whole.batch.num_tokens[micro].sum())
            for row in micro:
                values[row] = torch.full((int(whole.batch.responses.lengths[row]),), float(tokens))
        return Ragged.from_rows(values, torch.float32)


def scheduled(prompts, step):
    return schedule(reference_batch(prompts), SIZES, seed=1, step=step)


def run(first_step=1):
    """Log-probs of each step from `first_step` on, and what the role computed for them."""
    source, role = PromptSource(PROMPTS, PER_STEP, seed=3), Composition()
    known = ReferenceLogProbs(role, source, PER_STEP)
    source.take(PER_STEP * (first_step - 1))
    values = []
    for step in range(first_step, STEPS + 1):
        prompts = source.take(PER_STEP)
        values.append(known.of_step(step, prompts, scheduled))
        lengths = [len(ids) for prompt in prompts for ids, _ in prompt.responses]
        assert values[-1].lengths.tolist() == lengths
    return values, role.computed


def test_each_prompt_is_computed_in_the_step_that_first_draws_it():
    values, computed = run()
    assert len(computed) == 3, "ten prompts, four a step"
    assert {prompt for step in computed for prompt in step} == set(range(10))
    first = scheduled(PromptSource(PROMPTS, PER_STEP, seed=3).take(PER_STEP), 1)
    assert values[0].values.equal(Composition().call("compute_log_probs", first).values)


def test_a_resumed_run_has_equal_values_and_computes_what_it_needs():
    values, _ = run()
    for step in range(2, STEPS + 1):
        again, computed = run(first_step=step)
        assert len(computed) <= 3
        for before, now in zip(values[step - 1 :], again, strict=True):
            assert before.values.equal(now.values)
