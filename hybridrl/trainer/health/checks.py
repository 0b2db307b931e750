"""The health checks by id, which is also the threshold's key (conf/health) and the metric's name.

A new check is one more entry here, and its threshold in conf/health/default.yaml and HealthConfig.
"""

from typing import NamedTuple

from hybridrl.trainer.health.judges import (
    Judge,
    above,
    below,
    blind_critic,
    clipped_gradient,
    clipped_ratio,
    collapsed_entropy,
    constant_reward,
    exploded_entropy,
    fallen_accuracy,
    frozen_actor,
    mismatch,
    slow_engine,
    slow_reward,
    stale_policy,
    still_policy,
    unmixed_groups,
    wrong_form,
)


class Check(NamedTuple):
    """A health check.

    Attributes:
        judge: returns the evidence if the run is ill.
        remedy: what to try; {scorer} is what gives the run's rewards.
        always: true warns at each such step.
    """

    judge: Judge
    remedy: str
    always: bool = False


CHECKS = {
    # Data, before the first step.
    "unknown_tokens": Check(
        above(
            "{value:.1%} of the prompts' tokens are unknown to the model's tokenizer",
            "data/unknown_fraction",
        ),
        "Use a model whose tokenizer knows this text (most work on bytes and know all), or other "
        "data.",
    ),
    "duplicate_prompts": Check(
        above(
            "{value:.1%} of the training prompts repeat an earlier one", "data/duplicate_fraction"
        ),
        "They count several times in each pass. Set data.duplicates=drop.",
    ),
    "overlap": Check(
        above(
            "{value:.1%} of the held-out prompts are training prompts, too", "data/overlap_fraction"
        ),
        "The held-out accuracy will be too high. Set data.held_out_overlap=drop.",
    ),
    "no_generation_marker": Check(
        above(
            "the chat template has no generation marker: prompts end before the assistant's turn",
            "data/no_generation_marker",
        ),
        "The model would continue the user's turn. Correct the template "
        "(`if add_generation_prompt` in chat_template.jinja).",
    ),
    # Rewards.
    "constant_reward": Check(
        constant_reward,
        "Look at some responses (trainer.samples_every_steps=1); check that reward.function fits "
        "the data. If all answers are right, take harder problems. If none is, take easier ones, a "
        "higher rollout.temperature, or supervised fine-tuning on the form of the answers first.",
    ),
    "unmixed_groups": Check(
        unmixed_groups,
        "Raise rollout.responses_per_prompt, use problems that the model solves sometimes, or "
        "raise algorithm.max_sampling_rounds, which replaces such prompts.",
    ),
    "wrong_form": Check(
        wrong_form,
        "Say in the prompt how to answer (data.system_prompt), train on the form first "
        "(algorithm=sft), or accept the other form in the reward.",
    ),
    "fallen_accuracy": Check(
        fallen_accuracy,
        "If the reward rose, the policy has found a way to it other than solving problems: read "
        "responses with high rewards, and correct the reward. If not, updates are too large: "
        "lower actor.optim.lr, or raise algorithm.kl.coef.",
    ),
    "failed_rewards": Check(
        above("{value:.0f} rewards failed and got reward.failed_score", "reward/failed"),
        "Correct the {scorer} for these problems.",
        always=True,
    ),
    "failed_eval_rewards": Check(
        above(
            "{value:.0f} rewards of held-out responses failed: the accuracies count them as wrong",
            "eval/failed",
        ),
        "Correct the {scorer} for these problems.",
        always=True,
    ),
    "slow_reward": Check(
        slow_reward,
        "Raise reward.num_processes, or reward.concurrency for an async reward; lower "
        "reward.timeout_s if single problems hang.",
    ),
    # Responses.
    "truncated": Check(
        above(
            "{value:.0%} of the responses were cut off at rollout.max_response_tokens (or "
            "environment.max_turns)",
            "response/truncated_fraction",
        ),
        "Raise it, or ask for short answers (data.system_prompt). A model that never ends its "
        "answers lacks a chat template and end token of its training.",
    ),
    "unended_responses": Check(
        above(
            "{value:.0%} of the responses end neither with an end token nor at the length limit",
            "response/unended_fraction",
        ),
        "The policy does not learn when to stop. Check eos_token_id in the model's "
        "generation_config.json and an own rollout worker's responses.",
    ),
    "empty_responses": Check(
        above("{value:.0%} of the responses have no text", "response/empty_fraction"),
        "Check the prompt's end (`hybridrl check`) and what the reward pays for an empty answer.",
    ),
    "special_tokens": Check(
        above(
            "{value:.0%} of the responses contain special tokens other than end tokens",
            "response/special_fraction",
        ),
        "The model goes on after the end of its turn. Add that token to eos_token_id in the "
        "model's generation_config.json, or use the chat template that the model was trained on.",
    ),
    "repeated_responses": Check(
        above(
            "{value:.0%} more of the pairs of responses to a prompt are the same than their "
            "probabilities explain",
            "response/repeated_fraction",
        ),
        "Samples of a prompt need seeds of their own: check rollout.seed and an own rollout "
        "worker.",
    ),
    # Policy.
    "collapsed_entropy": Check(
        collapsed_entropy,
        "Lower actor.optim.lr, raise actor.entropy_coef or algorithm.kl.coef, or use "
        "algorithm/loss=clip_cov.",
    ),
    "exploded_entropy": Check(
        exploded_entropy,
        "The policy turns to noise. Lower actor.optim.lr, or raise algorithm.kl.coef.",
    ),
    "exploded_kl": Check(
        above("the policy is {value:.3g} nats per token from the reference", "actor/kl"),
        "Lower actor.optim.lr, or raise algorithm.kl.coef.",
    ),
    "exploded_ratio": Check(
        above(
            "the step's updates moved the policy by {value:.3g} nats per token (KL)", "actor/ppo_kl"
        ),
        "Lower actor.optim.lr or actor.epochs.",
    ),
    "clipped_ratio": Check(
        clipped_ratio,
        "Lower actor.optim.lr or actor.epochs: the policy moves too far in a step.",
    ),
    "still_policy": Check(
        still_policy,
        "Raise actor.optim.lr; check that advantages are not 0 (reward/std).",
    ),
    "frozen_actor": Check(
        frozen_actor,
        "Either the actor is not trained (frozen weights, a learning rate of 0), or the reference "
        "follows it. Check own worker classes.",
    ),
    "clipped_gradient": Check(
        clipped_gradient,
        "The step no longer depends on the gradient's size. Check the rewards' scale, or raise "
        "the limit.",
    ),
    "no_learning_rate": Check(
        below("the {role}'s learning rate is {value:g}", "actor/lr", "critic/lr"),
        "Check its optim.lr, schedule and warmup_steps.",
    ),
    "skipped_updates": Check(
        above(
            "{value:.0f} updates of the {role} were skipped: loss or gradient was not finite",
            "actor/skipped_steps",
            "critic/skipped_steps",
        ),
        "A lower learning rate may help; `hybridrl replay` shows the batch if the run ends.",
        always=True,
    ),
    "blind_critic": Check(
        blind_critic,
        "Raise critic.optim.lr or trainer.critic_warmup_steps, or use algorithm=grpo, which needs "
        "no critic.",
    ),
    # Rollout engines.
    "mismatch": Check(
        mismatch,
        "Between bfloat16 kernels 0.02 is usual. Compare rollout.dtype with fsdp.param_dtype; "
        "algorithm.rollout_correction.method corrects for it.",
    ),
    "stale_policy": Check(
        stale_policy,
        "Check an own rollout worker's reshard; rollout.verify_reshard=true compares the weights.",
    ),
    "missing_adapters": Check(
        below(
            "vLLM's log-probs show {value:.0%} of what the adapters have learned",
            "rollout/adapter_share",
        ),
        "vLLM samples without the adapters, or with old ones. Check an own rollout worker's "
        "reshard.",
    ),
    "slow_engine": Check(
        slow_engine,
        "The others wait for it. Check for another process on its GPU, a throttled GPU, or a busy "
        "host.",
    ),
}
