"""docs/algorithms.md: names every estimator and KL form, and what it says to type is taken."""

import re

import pytest
from composing import REPO, composed

from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.config.schema import KLEstimator

PAGE = (REPO / "docs" / "algorithms.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
CONFIGS = [
    cell.strip("`").split()
    for row in ROWS
    for cell in row
    if re.fullmatch(r"`algorithm[.\w]*=[^`]*`", cell)
]


def test_every_estimator_and_every_kl_form_has_a_row():
    composable = [overrides for overrides in CONFIGS if overrides[0].startswith("algorithm=")]
    named = [composed(["hardware=cpu", *o]).algorithm.advantage for o in composable]
    assert set(named) == set(BUILT_IN_ESTIMATORS)
    forms = [o[0].partition("=")[2] for o in CONFIGS if o[0].startswith("algorithm.kl.estimator=")]
    assert forms == list(KLEstimator)


@pytest.mark.parametrize("setting", sorted(set(re.findall(r"algorithm\.[a-z_.]+[a-z]", PAGE))))
def test_every_key_it_names_exists(setting):
    node = composed(["hardware=cpu"])
    for name in setting.split("."):
        assert name in node, setting
        node = node[name]
