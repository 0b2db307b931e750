"""What every number of the config may be."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from hybridrl.config.command.report import shown

# Counts and sizes are multiplied with each other, and torch and vLLM hold them in 64 bits.
LARGEST_COUNT = 2**48
# Three weeks: the system counts the milliseconds of a wait in 31 bits.
LONGEST_S = 1_814_400


class Range(NamedTuple):
    """Numbers a key may take.

    Attributes:
        low, high: the bounds.
        low_open, high_open: whether the bound itself is excluded.
        why: what goes wrong outside, as a sentence.
    """

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    why: str = ""

    def contains(self, value: float) -> bool:
        """Whether `value` lies within; infinities and NaN do not."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and -math.inf < value < math.inf

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a number neither infinite nor NaN"
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        if self.high in (LARGEST_COUNT, math.inf):
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high:g}"


def _count(why: str) -> Range:
    return Range(1, high=LARGEST_COUNT, why=why)


def _from_zero(why: str) -> Range:
    return Range(0, high=LARGEST_COUNT, why=why)


def _seconds(why: str) -> Range:
    return Range(0, high=LONGEST_S, low_open=True, why=f"{why}, and a wait lasts 3 weeks at most")


_OPTIM = {
    "lr": Range(0, high=1, low_open=True, why="AdamW needs a positive step; above 1 it diverges"),
    "betas": Range(0, high=1, high_open=True, why="they are decay rates of averages"),
    "eps": Range(0, low_open=True, why="it keeps AdamW from dividing by zero"),
    "weight_decay": Range(0, why="a negative one makes weights grow"),
    "max_grad_norm": Range(0, low_open=True, why="gradients are scaled down to it"),
    "warmup_steps": _from_zero("0 means no warm-up"),
    "min_lr_ratio": Range(0, high=1, why="it is a share of the peak learning rate"),
}

RANGES: dict[str, Range] = {
    "seed": Range(0, high=2**63 - 1, why="generators take 63 bits"),
    "model.seed": Range(0, high=2**63 - 1, why="generators take 63 bits"),
    "data.num_eval_problems": _count("null scores all of them"),
    "data.few_shot": _from_zero("it counts examples; 0 means none"),
    "data.curriculum_steps": _count("a curriculum takes steps"),
    "data.prompts_per_step": _count("a step needs prompts"),
    "fsdp.dp_shard": _count("it counts ranks"),
    "fsdp.dp_replicate": _count("it counts copies; 1 means no replication"),
    "fsdp.tensor_parallel_size": _count("1 means no tensor parallelism"),
    "fsdp.ulysses_size": _count("1 means that no sequence is split"),
    "cluster.nodes": _count("a run needs a machine"),
    "cluster.gpus_per_node": _count("a node needs a process; null takes what is there"),
    "cluster.rendezvous_ports": Range(1024, high=65535, why="lower ports are the system's"),
    "placement.slots_on_nodes": _count("a node of the run has a process"),
    "cluster.start_timeout_s": _seconds("workers need time to start"),
    "cluster.stall_timeout_s": Range(
        0, high=LONGEST_S, why="it is a length of time; 0 never ends a run for it"
    ),
    "algorithm.gamma": Range(0, high=1, low_open=True, why="it is a discount per token"),
    "algorithm.lam": Range(0, high=1, why="1 is Monte Carlo, 0 is one-step TD"),
    "algorithm.pass_k": _count("a set needs a response; 1 is the reward itself"),
    "algorithm.rollout_correction.low": Range(0, why="it is a bound of ratios; 0 is none"),
    "algorithm.rollout_correction.high": Range(0, low_open=True, why="it caps ratios"),
    "algorithm.overlong.buffer_tokens": _from_zero("it counts tokens; 0 means no penalty"),
    "algorithm.overlong.penalty": Range(0, low_open=True, why="it is taken off the reward"),
    "algorithm.max_sampling_rounds": _count("1 means that nothing is sampled again"),
    "algorithm.kl.coef": Range(0, why="a negative one drives the policy away; 0 leaves it out"),
    "algorithm.kl.target": Range(0, low_open=True, why="adaptation divides by it"),
    "algorithm.kl.horizon": _count("adaptation divides by it"),
    "lora.rank": _count("lora=none leaves adapters out"),
    "lora.alpha": Range(0, low_open=True, why="it scales the update"),
    "lora.seed": Range(0, high=2**63 - 1, why="generators take 63 bits"),
    "environment.max_turns": _count("a turn is sampled"),
    "actor.total_steps": _count("the learning rate is laid out over it"),
    "actor.max_response_tokens": _count("losses are divided by it"),
    "actor.temperature": Range(0, low_open=True, why="logits are divided by it"),
    "actor.mini_batch_size": _count("an optimizer step needs responses"),
    "actor.epochs": _count("responses must be used at least once"),
    "actor.max_tokens_per_gpu": _count("a forward needs tokens"),
    "actor.entropy_coef": Range(0, why="a negative one punishes exploration"),
    "actor.log_prob_chunk_tokens": _count("logits are computed chunk by chunk"),
    "critic.total_steps": _count("the learning rate is laid out over it"),
    "critic.value_clip": Range(0, low_open=True, why="values may move by it"),
    "ref.temperature": Range(0, low_open=True, why="logits are divided by it"),
    "ref.log_prob_chunk_tokens": _count("logits are computed chunk by chunk"),
    "rollout.seed": Range(0, high=2**63 - 1, why="generators take 63 bits"),
    "rollout.tensor_parallel_size": _count("1 means no tensor parallelism"),
    "rollout.responses_per_prompt": _count("a prompt needs an answer"),
    "rollout.temperature": Range(
        0, low_open=True, why="logits are divided by it; greedy evaluation is eval.greedy"
    ),
    "rollout.top_p": Range(0, high=1, low_open=True, why="it is a share of probability; 1 is all"),
    "rollout.max_prompt_tokens": _count("a prompt has tokens"),
    "rollout.max_response_tokens": _count("a response has tokens"),
    "rollout.gpu_memory_utilization": Range(
        0, high=1, low_open=True, high_open=True, why="it is a share of the GPU's memory"
    ),
    "rollout.kv_cache_mb": _count("vLLM needs a KV cache"),
    "rollout.max_num_seqs": _count("vLLM decodes at least one sequence"),
    "rollout.reshard_bucket_mb": _count("weights are moved in buckets"),
    "reward.timeout_s": _seconds("a reward needs time"),
    "reward.num_processes": Range(
        1, high=4096, why="each is a process of its own, which takes tens of megabytes"
    ),
    "reward.failed_score": Range(-math.inf, why="NaN or infinity would spoil the whole batch"),
    "reward_model.weight": Range(-math.inf, why="scores are multiplied with it"),
    "trainer.total_steps": _count("a run needs a step"),
    "trainer.critic_warmup_steps": _from_zero("0 means none"),
    "trainer.max_log_prob_diff": Range(0, low_open=True, why="it is a limit on a mean of |x|"),
    "trainer.samples_every_steps": _from_zero("0 means never"),
    "trainer.profile_steps": _count("steps are counted from 1; [] profiles none"),
    "trainer.max_skipped_steps": _count("a step that is skipped is worth a look"),
    "trainer.max_restarts": _from_zero("0 means that the run ends"),
    "checkpoint.every_steps": _from_zero("0 means never"),
    "checkpoint.keep_last": _from_zero("it counts checkpoints; 0 keeps all"),
    "checkpoint.on_sigterm": Range(
        0, high=LONGEST_S, why="it is a length of time; 0 leaves at once"
    ),
    "eval.every_steps": _from_zero("0 means only before and after training"),
    **{
        f"{role}.optim.{key}": range_
        for role in ("actor", "critic")
        for key, range_ in _OPTIM.items()
    },
}


def range_problems(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers out of range: key and problem.

    Args:
        values: dotted key -> typed value; lists are checked element by element.
    """
    for key, allowed in RANGES.items():
        value = values.get(key)
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if not all(allowed.contains(number) for number in numbers):
            kind = f"each {allowed}" if isinstance(value, list) else str(allowed)
            if max(numbers) > allowed.high == LARGEST_COUNT:
                kind = f"{kind} and at most {LARGEST_COUNT:g}"
            yield key, f"{key} = {shown(value)}, expected {kind}: {allowed.why}."
