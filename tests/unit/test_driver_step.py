"""The driver's part of a step of long responses: seconds, memory, and what whitening counts."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.driver_step import config_of, train

pytestmark = pytest.mark.full


@pytest.mark.parametrize("responses", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_step_of_long_responses_costs_the_driver_little(responses):
    """Less than three times the batch, and 1.5 s for 4,096 responses.

    In CPU time: the clock says nothing where other tests run beside.
    """
    command = [sys.executable, "-m", "tests.support.driver_step", "--responses", str(responses)]
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}
    result = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    found = json.loads(result.stdout)
    assert found["peak"] < 3 * found["batch"], found
    limit = 1.5 if responses == 4096 else 0.8  # a loaded machine computes slower, too
    assert min(step["driver_cpu"] for step in found["steps"]) < limit, found


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_responses_that_were_cut_off_have_no_part_in_whitening(algorithm):
    """Of 256 responses one has CAP tokens, 3 % of all; it earned nothing."""
    overrides = ["algorithm.overlong.train_on_truncated=false", f"algorithm={algorithm}"]
    if algorithm == "ppo":
        overrides.append("algorithm.whiten_advantages=true")
    driver, _ = train(config_of(256, 1, overrides), 256, keeps_batch=True)
    mask, advantages = driver.batch.counted.values, driver.batch.advantages.values
    counted = advantages[mask].double()
    assert len(advantages[~mask]) == 32768
    assert float(counted.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(counted.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
