"""tests/support/hydra_cache.py: what is kept equals what Hydra composes."""

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from tests.support import hydra_cache
from tests.support.composing import composed

RECIPE = ["+recipe=gsm8k_ppo", "hardware=cpu"]


def everything(overrides):
    """The job's config and Hydra's own."""
    own = composed(overrides)
    return [OmegaConf.to_container(cfg, resolve=False) for cfg in (own, HydraConfig.get())]


@pytest.mark.parametrize(
    "overrides",
    [
        [*RECIPE, "seed=3"],
        [*RECIPE, "algorithm=grpo", "~reward.timeout_s"],
        ["+recipe=gsm8k_dapo", "hardware=cpu", "+algorithm.new={a: 1}"],
    ],
)
def test_a_kept_composition_is_hydras(overrides, monkeypatch):
    everything([*overrides, "seed=4"])
    kept = everything(overrides)
    monkeypatch.setattr(hydra_cache, "OURS", {})  # nothing is kept
    assert everything(overrides) == kept
