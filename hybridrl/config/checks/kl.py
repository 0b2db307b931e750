"""Whether the KL penalty, as configured, does what a penalty is for."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hybridrl.config.algorithm_schema import MAX_RELATIVE_KL_ERROR
from hybridrl.config.choices import KLEstimator, KLPlacement
from hybridrl.config.schema import RunConfig

# Estimators with the gradient of k2 -> the one that has their value.
STRAIGHT_THROUGH: Mapping[KLEstimator, KLEstimator] = MappingProxyType(
    {
        KLEstimator.k1_straight_through: KLEstimator.k1,
        KLEstimator.k3_straight_through: KLEstimator.k3,
    }
)


def kl_problems(config: RunConfig) -> Iterator[str]:
    """Estimators in the wrong place, and a horizon shorter than the controller allows."""
    kl = config.algorithm.kl
    if kl.coef == 0:
        return
    if kl.placement is KLPlacement.loss and kl.estimator is KLEstimator.k1:
        yield (
            "algorithm.kl.estimator = k1 with algorithm.kl.placement = loss has an expected "
            "gradient of 0: it adds noise and holds the policy to nothing.\n"
            "Set algorithm.kl.estimator=k2 (its gradient is that of the KL), k1_straight_through "
            "(k1's value with that gradient) or k3, or algorithm.kl.placement=reward."
        )
    base = STRAIGHT_THROUGH.get(kl.estimator)
    if kl.placement is KLPlacement.reward and base is not None:
        yield (
            f"algorithm.kl.estimator = {kl.estimator} with algorithm.kl.placement = reward: it "
            f"differs from {base} in its gradient alone, and a reward has none.\n"
            f"Set algorithm.kl.estimator={base}, or algorithm.kl.placement=loss."
        )
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    shortest = int(MAX_RELATIVE_KL_ERROR * responses) + 1
    if kl.target is not None and kl.horizon < shortest:
        yield (
            f"algorithm.kl.horizon = {kl.horizon}, but a step has {responses} responses: the "
            "coefficient could fall to 0 in one step and would never rise again.\n"
            f"Set algorithm.kl.horizon to at least {shortest}; {20 * responses} moves it gently."
        )
