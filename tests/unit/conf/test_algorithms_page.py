"""docs/algorithms.md: names every estimator and KL form, and keys that exist."""

import re

from hybridrl.config.choices import KLEstimator
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from tests.support.composing import REPO, composed

PAGE = (REPO / "docs" / "algorithms.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]


def in_rows(key: str) -> list[str]:
    """The values that rows of the tables give a key as their config."""
    return [found for row in ROWS for found in re.findall(rf"\| `{key}=(\w+)[^`]*` \|", row)]


def test_every_estimator_and_every_kl_form_has_a_row():
    methods = ["gae" if name == "ppo" else name for name in in_rows("algorithm")]
    assert set(BUILT_IN_ESTIMATORS) <= set(methods)
    assert all((REPO / "conf/algorithm" / f"{name}.yaml").exists() for name in in_rows("algorithm"))
    assert in_rows(r"algorithm\.kl\.estimator") == list(KLEstimator)


def test_every_key_it_names_exists():
    config = composed(["hardware=cpu"])
    keys = set(re.findall(r"`(?:\S+ )?(algorithm\.[a-z_.]+[a-z])", PAGE))
    assert len(keys) > 5
    for key in keys:
        node = config
        for name in key.split("."):
            assert name in node, key
            node = node[name]
