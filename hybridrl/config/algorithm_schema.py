"""The types of conf/algorithm. Defaults and comments stand in the YAML."""

from dataclasses import dataclass
from typing import Any

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
class KLConfig:
    """conf/algorithm: kl."""

    placement: KLPlacement
    estimator: KLEstimator
    coef: float
    target: float | None
    horizon: int


@dataclass(kw_only=True)
class LossConfig:
    """conf/algorithm/loss: the policy loss and its settings."""

    function: str
    args: dict[str, Any]


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """conf/algorithm: rollout_correction."""

    method: CorrectionMethod
    level: CorrectionLevel
    low: float
    high: float


@dataclass(kw_only=True)
class OverlongConfig:
    """conf/algorithm: overlong."""

    buffer_tokens: int
    penalty: float
    train_on_truncated: bool


@dataclass(kw_only=True)
class AlgorithmConfig:
    """conf/algorithm."""

    advantage: str
    gamma: float
    lam: float
    pass_k: int
    whiten_advantages: bool
    loss: LossConfig
    aggregation: Aggregation
    rollout_correction: RolloutCorrectionConfig
    overlong: OverlongConfig
    max_sampling_rounds: int
    kl: KLConfig
