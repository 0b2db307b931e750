"""Types of conf/algorithm."""

from dataclasses import dataclass
from typing import Annotated, Any

from hybridrl.config.annotations import (
    Range,
    Section,
    above_zero,
    at_least_one,
    at_least_zero,
    share,
)
from hybridrl.config.choices import (
    Aggregation,
    CorrectionLevel,
    CorrectionMethod,
    KLEstimator,
    KLPlacement,
)

# The adaptive KL coefficient's controller clips its relative error to this (Ziegler et al. 2019,
# section 2.2): a step changes the coefficient by at most this share of responses over horizon.
MAX_RELATIVE_KL_ERROR = 0.2


@dataclass(kw_only=True)
class KLConfig(Section):
    """conf/algorithm: kl."""

    placement: KLPlacement
    estimator: KLEstimator
    coef: Annotated[float, Range("a negative penalty drives the policy away; 0 disables it", 0)]
    target: Annotated[float | None, above_zero("the controller divides by it")]
    horizon: Annotated[int, at_least_one("the controller divides by it")]


@dataclass(kw_only=True)
class FunctionConfig(Section):
    """A function, built-in or the user's, and its settings."""

    function: str
    args: dict[str, Any]


@dataclass(kw_only=True)
class RolloutCorrectionConfig(Section):
    """conf/algorithm: rollout_correction."""

    method: CorrectionMethod
    level: CorrectionLevel
    low: Annotated[float, Range("it is a bound of ratios; 0 means none", 0)]
    high: Annotated[float, above_zero("it is a bound of ratios")]


@dataclass(kw_only=True)
class OverlongConfig(Section):
    """conf/algorithm: overlong."""

    buffer_tokens: Annotated[int, at_least_zero("it counts tokens; 0 means no penalty")]
    penalty: Annotated[float, above_zero("it is subtracted from the reward")]
    train_on_truncated: bool


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """conf/algorithm."""

    advantage: str
    gamma: Annotated[float, share("it is a discount per token", low_open=True)]
    lam: Annotated[float, share("1 is Monte Carlo, 0 is one-step TD")]
    pass_k: Annotated[int, at_least_one("a set needs a response")]
    whiten_advantages: bool
    loss: FunctionConfig
    aggregation: Aggregation
    rollout_correction: RolloutCorrectionConfig
    overlong: OverlongConfig
    max_sampling_rounds: Annotated[int, at_least_one("1 means that no prompt is sampled again")]
    kl: KLConfig
