"""docs/extending.md: each example as written, through all checks and the real calls.

Also the tutorial on own code, whose example is one run. Workers train in
tests/runs/test_layouts.py.
"""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from hybridrl.algorithms.token_loss import aggregate, as_token_loss
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import Totals
from hybridrl.environments.base import StepRequest, environment_task, trial_problems
from hybridrl.trainer.advantage import AdvantageEstimator
from tests.support.batches import batch_of
from tests.support.composing import REPO, examined

PAGE = (REPO / "docs" / "extending.md").read_text()
EXAMPLE = re.compile(r"`(my_\w+\.py)`:\n\n```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
EXAMPLES = {file: (code, command) for file, code, command in EXAMPLE.findall(PAGE)}


def configured(file: str, folder, monkeypatch) -> RunConfig:
    """The config of an example's command, in a folder with its file, after all checks."""
    code, command = EXAMPLES[file]
    (folder / file).write_text(code)
    monkeypatch.chdir(folder)
    found = examined(["hardware=cpu", *shlex.split(command.replace("\\\n", " "))[3:]])
    assert found.report.problems == []
    assert f"{folder}/{file}" in str(found.config)
    return found.config


def test_every_kind_has_an_example():
    kinds = {"reward", "environment", "advantage", "loss", "actor"}
    assert EXAMPLES.keys() == {f"my_{kind}.py" for kind in kinds}
    assert PAGE.count("```") == 4 * len(EXAMPLES)


def test_the_tutorial_on_own_code_passes_all_checks(tmp_path, monkeypatch):
    page = (REPO / "docs" / "tutorial_own_code.md").read_text()
    files = re.findall(r"`(my_\w+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL)
    [command] = re.findall(r"```\n(hybridrl .*?)```", page, re.DOTALL)
    for file, code in files:
        (tmp_path / file).write_text(code)
    monkeypatch.chdir(tmp_path)
    found = examined(["hardware=cpu", *shlex.split(command.replace("\\\n", " "))[2:]])
    assert found.report.problems == []
    assert len(files) == 3 and all(f"{tmp_path}/{file}" in str(found.config) for file, _ in files)


def test_the_reward(tmp_path, monkeypatch):
    config = configured("my_reward.py", tmp_path, monkeypatch).reward
    function = locate("reward.function", config.function)
    assert function("", "two words" + "." * 291, {}, **config.args) == (0.5, {"words": 2})


def test_the_environment(tmp_path, monkeypatch):
    config = configured("my_environment.py", tmp_path, monkeypatch).environment
    assert config is not None
    row = {"answer": "so it is\n#### 1,200"}
    assert trial_problems(config, row) == []
    answer = environment_task(config.function, config.args)
    begun = answer(row)
    low = answer(StepRequest(begun.state, "900"))
    assert (begun.result.text, low.result) == ("", ("higher", 0.0, False))
    assert answer(StepRequest(low.state, "It is 1200.")).result == ("", 1.0, True)


def test_the_estimator(tmp_path, monkeypatch):
    config = configured("my_advantage.py", tmp_path, monkeypatch).algorithm
    batch = batch_of([2, 1, 3])
    scores = batch.responses.like(torch.tensor([0.0, 4.0, 1.0, 0.0, 0.0, 0.0]))
    batch = replace(batch, group_id=torch.tensor([7, 7, 7]))
    found = AdvantageEstimator(config).estimate(batch, scores)
    # Outcomes 4, 1 and 0: their median is 1.
    assert found.keys() == {"advantages"}
    assert found["advantages"].values.tolist() == [3.0, 3.0, 0.0, -1.0, -1.0, -1.0]


def test_the_loss(tmp_path, monkeypatch):
    config = configured("my_loss.py", tmp_path, monkeypatch).algorithm
    mask, sequence_id = torch.tensor([True, True, False]), torch.tensor([0, 1, 1])
    log_probs = torch.tensor([2.0, 1.0, 5.0]).log().requires_grad_()
    found = locate("algorithm.loss.function", config.loss.function)(
        log_probs, torch.zeros(3), torch.tensor([3.0, -1.0, 9.0]), mask, **config.loss.args
    )
    loss = as_token_loss(found, config.loss.function, log_probs)
    assert loss.sums == {"ratio": pytest.approx(3.0)}
    aggregate(config.aggregation, loss.values, mask, sequence_id, Totals(2, 2), 9).backward()
    # The derivative of -ratio * advantage by the log-prob is itself, over 2 tokens.
    torch.testing.assert_close(log_probs.grad, torch.tensor([-3.0, 0.5, 0.0]))
