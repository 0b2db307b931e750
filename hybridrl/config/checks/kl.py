"""Checks of the KL penalty."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hybridrl.config.choices import KLEstimator, KLPlacement
from hybridrl.config.schema import RunConfig

# The adaptive coefficient's controller clips its error to this share (Ziegler et al. 2019, section
# 2.2): one step changes the coefficient by at most this share of responses over horizon.
MAX_RELATIVE_ERROR = 0.2

# Estimator with the gradient of k2 -> estimator with the same value.
STRAIGHT_THROUGH: Mapping[KLEstimator, KLEstimator] = MappingProxyType(
    {
        KLEstimator.k1_straight_through: KLEstimator.k1,
        KLEstimator.k3_straight_through: KLEstimator.k3,
    }
)


def kl_problems(config: RunConfig) -> Iterator[str]:
    """Find estimators that do not fit the placement, and a horizon that is too short."""
    kl = config.algorithm.kl
    if kl.coef == 0:
        return
    if kl.placement is KLPlacement.loss and kl.estimator is KLEstimator.k1:
        yield (
            "algorithm.kl.estimator = k1 with algorithm.kl.placement = loss has an expected "
            "gradient of 0: it adds noise and no penalty.\n"
            "Set algorithm.kl.estimator=k2 (its gradient is that of the KL), k1_straight_through "
            "(k1's value with that gradient) or k3, or algorithm.kl.placement=reward."
        )
    base = STRAIGHT_THROUGH.get(kl.estimator)
    if kl.placement is KLPlacement.reward and base is not None:
        yield (
            f"algorithm.kl.estimator = {kl.estimator} with algorithm.kl.placement = reward: only "
            f"its gradient differs from that of {base}, and a reward has no gradient.\n"
            f"Set algorithm.kl.estimator={base}, or algorithm.kl.placement=loss."
        )
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    shortest = int(MAX_RELATIVE_ERROR * responses) + 1
    if kl.target is not None and kl.horizon < shortest:
        yield (
            f"algorithm.kl.horizon = {kl.horizon}, expected at least {shortest}: with the "
            f"{responses} responses of a step the coefficient could fall to 0 in one step, for "
            f"good.\n"
            f"Set algorithm.kl.horizon={20 * responses} for slow changes."
        )
