"""Patches of vLLM are made only where they fit."""

import pytest

from hybridrl.rollout import compat


def test_a_patch_that_does_not_fit_is_named():
    class Executor:
        pass

    with pytest.raises(RuntimeError, match=r"Executor\._distributed_args is gone"):
        compat._replace(Executor, "_distributed_args", None)
