"""Enumerations of config values.

OmegaConf parses members by name, so names and values are equal.
"""

from enum import StrEnum

# Placement of the penalty against the reference.
KLPlacement = StrEnum("KLPlacement", ["reward", "loss"])
# Estimators of the KL divergence per token (algorithms/losses.py).
KLEstimator = StrEnum(
    "KLEstimator", ["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]
)
# Divergences of student and teacher over the vocabulary (distributed/forward/divergence.py), and
# the model whose likeliest tokens are compared one by one.
Divergence = StrEnum("Divergence", ["reverse_kl", "forward_kl", "jensen_shannon"])
TopOf = StrEnum("TopOf", ["student", "teacher"])
# Aggregation of token losses to the loss of a mini-batch (algorithms/token_loss.py).
Aggregation = StrEnum("Aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
# What supervised runs train on.
Targets = StrEnum(
    "Targets",
    {
        "answers": "reference answers",
        "pairs": "preference pairs",
        "labels": "labelled responses",
    },
)
# Correction of the mismatch between vLLM's and the trainer's probabilities.
CorrectionMethod = StrEnum("CorrectionMethod", ["none", "truncate", "mask"])
# Unit of an importance ratio (algorithms/rollout_correction.py).
CorrectionLevel = StrEnum("CorrectionLevel", ["token", "sequence", "sequence_mean"])
# Learning-rate schedule after warm-up.
LRSchedule = StrEnum("LRSchedule", ["constant", "linear", "cosine"])
# Device of the workers.
Accelerator = StrEnum("Accelerator", ["cpu", "gpu"])
# Floating-point types by torch's names.
DType = StrEnum("DType", ["float32", "bfloat16"])
# Layout of FSDP shards (config/planner/world.py, distributed/columns.py).
Layout = StrEnum("Layout", ["aligned", "plain"])
# Gradients accumulated over micro-batches: full or sharded (distributed/fsdp.py).
Accumulation = StrEnum("Accumulation", ["full", "sharded"])
# State that is offloaded to pinned host memory while unused.
Offload = StrEnum("Offload", ["none", "idle_optimizer", "idle_all"])
# NVLink multicast: reductions inside the switches (config/planner/multicast.py).
NVLinkMulticast = StrEnum("NVLinkMulticast", ["auto", "off"])
# Checks of the machines that a run makes.
DoctorChecks = StrEnum("DoctorChecks", ["quick", "full", "none"])
# Source of a model's initial weights.
Init = StrEnum("Init", ["pretrained", "random"])
# Weights of the rollout engine: of its dtype, or quantised.
RolloutWeights = StrEnum("RolloutWeights", ["dtype", "fp8"])
# Memory that vLLM frees between rollouts.
SleepMode = StrEnum("SleepMode", ["none", "kv_cache", "all"])
# Treatment of requests with other sampling parameters than the run's (agents/format.py).
OtherSampling = StrEnum("OtherSampling", ["refuse", "mask", "ignore"])
# Source of a step's groups (trainer/sampling/).
Schedule = StrEnum("Schedule", ["sync", "partial", "split"])
# Those whose responses may take several steps; those with ranks that only sample.
IN_PARTS, ON_OWN_RANKS = (Schedule.partial, Schedule.split), (Schedule.split,)
# Use of the experts that vLLM chose (rollout/vllm/recorded.py).
RouterReplay = StrEnum("RouterReplay", ["none", "record", "replay"])
# Treatment of prompts longer than rollout.max_prompt_tokens.
TooLongPrompts = StrEnum("TooLongPrompts", ["error", "drop"])
# Treatment of training problems with a repeated question.
Repeated = StrEnum("Repeated", ["keep", "drop"])
# Parameters of a reward function (config/user_code/signatures.py); auto: by their names.
RewardSignature = StrEnum("RewardSignature", ["auto", "hybridrl", "verl", "trl"])
# What is learned from a teacher; sampled: log-probs of sampled tokens (algorithms/distillation.py).
TeacherObjective = StrEnum(
    "TeacherObjective", ["sampled", "reverse_kl", "forward_kl", "jensen_shannon"]
)
# Tokens of a teacher: those of the student, or its own (workers/teacher.py).
TeacherTokenizer = StrEnum("TeacherTokenizer", ["student", "own"])
