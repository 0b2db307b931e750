"""docs/algorithms.md: names every estimator and KL form, and keys that exist."""

import re
import shlex

import pytest
import torch
from composing import REPO, composed, examined, problems

from hybridrl.config.choices import KLEstimator
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.config.policy_losses import KEY, policy_loss_of
from hybridrl.config.user_code.classes import locate

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


def test_the_loss_of_ones_own_works_as_written(tmp_path, monkeypatch):
    part = PAGE[PAGE.index("### A loss of your own") :]
    program, command = re.findall(r"```(?:python)?\n(.*?)```", part, re.DOTALL)[:2]
    (tmp_path / "my_loss.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = shlex.split(command.replace("\\\n", " "))[3:]
    assert problems("hardware=cpu", *overrides) == []
    config = examined(["hardware=cpu", *overrides]).config.algorithm.loss
    loss = policy_loss_of(config.function)
    fields = {
        "log_probs": torch.tensor([2.0, 1.0]).log(),
        "old_log_probs": torch.zeros(2),
        "advantages": torch.tensor([3.0, -1.0]),
        "response_mask": torch.tensor([True, True]),
        "sequence_id": torch.tensor([0, 0]),
    }
    given = {name: fields[name] for name in loss.tensors} | config.args
    values, sums = locate(KEY, loss.path)(**given)
    torch.testing.assert_close(values, torch.tensor([-6.0, 1.0]))
    assert float(sums["ratio"]) == pytest.approx(3.0)
