"""Patches of vLLM are made only where they fit; the installed Ray has the names that we use."""

import importlib
from operator import attrgetter

import pytest

from hybridrl.controller.ray.compat import PRIVATE_NAMES
from hybridrl.rollout import compat


def test_a_patch_that_does_not_fit_is_named():
    class Executor:
        pass

    with pytest.raises(RuntimeError, match=r"Executor\._distributed_args is gone"):
        compat._replace(Executor, "_distributed_args", None)


@pytest.mark.parametrize(("module", "attribute"), PRIVATE_NAMES)
def test_the_installed_ray_has_the_private_names(module, attribute):
    attrgetter(attribute)(importlib.import_module(module))
