"""Step a trainer by hand and look at what a step was computed from.

python examples/step.py                                  half a minute on two cores
"""

import sys

import hybridrl
from hybridrl.algorithms import dr_grpo

OVERRIDES = [
    "+recipe=gsm8k_grpo",
    "trainer.total_steps=2",
    "data.prompts_per_step=8",
    "rollout.responses_per_prompt=4",
    "actor.mini_batch_size=16",
    "data.num_eval_problems=20",
]


def main() -> None:
    """Take two steps; arguments are further overrides."""
    with hybridrl.Trainer([*OVERRIDES, *sys.argv[1:]]) as trainer:
        print("before:", trainer.evaluate()["eval/accuracy"])
        metrics = trainer.step()
        print("mean reward", metrics["reward/mean"], "gradient norm", metrics["actor/grad_norm"])

        batch = trainer.batch  # fields are ragged: rows of different lengths, without padding
        assert batch is not None
        rows = zip(trainer.samples, batch.advantages.rows(), batch.responses.rows(), strict=True)
        for sample, advantages, tokens in list(rows)[:4]:  # the four responses to one prompt
            print(f"score {sample.score:g}, advantage {advantages[0]:+.2f}, {len(tokens)} tokens")
            print("   ", sample.response.replace("\n", " / "))

        rewards, mask = batch.scores.pad(0.0), batch.response_mask.pad(False)
        other = dr_grpo(rewards, mask, batch.group_id).advantages
        print("largest advantage:", float(batch.advantages.values.max()))
        print("with Dr. GRPO's estimator:", float(other.max()))

        trainer.step()
        print("after:", trainer.evaluate()["eval/accuracy"])


if __name__ == "__main__":
    main()
