"""Files of own code: which count, and what a resume says of changed ones."""

import sys

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.trainer.checkpointing.own_code import own_code
from hybridrl.trainer.checkpointing.resume import find_resume
from tests.support.resume_cases import PROMPTS, resumable
from tests.support.run_configs import run_config

REWARD = "from {helper} import right\n\n\ndef score(prompt, response, example): return right()\n"
HELPER = "def right():\n    return 0.0\n"
RULE = "def rule(prompt, response, example):\n    return 1.0\n"


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A folder with a reward, what it imports, a rule, and a module that nothing imports."""
    folder = tmp_path / "code"
    folder.mkdir()
    helper = f"helper_of_{tmp_path.name.replace('-', '_')}"
    for name, text in (("reward", REWARD.format(helper=helper)), (helper, HELPER), ("rule", RULE)):
        (folder / f"{name}.py").write_text(text)
    (folder / "other.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder, f"{helper}.py"


def config_of(folder, *overrides):
    rule = f"+eval.rules.mine={{function: {folder}/rule.py:rule, args: {{}}}}"
    own = [f"reward.function={folder}/reward.py:score", rule]
    return run_config(*own, "checkpoint.every_steps=2", *overrides)


def test_own_files_count_and_those_beside_them_that_they_import(code):
    folder, helper = code
    found = own_code(config_of(folder))
    assert {key: sorted(files) for key, files in found.items()} == {
        "reward.function": sorted([helper, "reward.py"]),
        "eval.rules.mine.function": ["rule.py"],
    }
    assert own_code(run_config()) == {}


def test_parts_losses_and_estimators_count(code):
    folder, helper = code
    (folder / "loss.py").write_text(
        "from hybridrl.algorithms.token_loss import TokenLoss\n\n\n"
        "def loss(log_probs, old_log_probs, advantages, response_mask):\n"
        "    return TokenLoss(log_probs, {})\n"
    )
    listed = f"reward.function=[{folder}/reward.py:score,{folder}/rule.py:rule]"
    loss = [f"algorithm.loss.function={folder}/loss.py:loss"]
    loss += ["~algorithm.loss.args.clip_low", "~algorithm.loss.args.clip_high"]
    found = own_code(run_config(listed, *loss))
    assert {key: sorted(files) for key, files in found.items()} == {
        "reward.args.parts.score.function": sorted([helper, "reward.py"]),
        "reward.args.parts.rule.function": ["rule.py"],
        "algorithm.loss.function": ["loss.py"],
    }


@pytest.mark.parametrize(
    "line",
    [
        "from {} import VALUE",
        "import {} as other",
        "def late():\n    from {} import VALUE",
        "import pack.inner",
        "from pack import inner",
    ],
)
def test_a_module_counts_however_it_is_imported(code, line):
    folder, helper = code
    name = helper.removesuffix(".py")
    (folder / helper).write_text("VALUE = 1.0\n")
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "inner.py").write_text(f"from {name} import VALUE\n")
    (folder / "imports.py").write_text(
        f"{line.format(name)}\ndef score(prompt, response, example): return 0.0\n"
    )
    config = run_config(f"reward.function={folder}/imports.py:score")
    assert helper in own_code(config)["reward.function"]


def test_of_an_agents_command_own_files_count(code):
    """The interpreter is not the user's."""
    folder, _ = code
    (folder / "agent.sh").write_text("#!/bin/sh\n")
    for command in ([sys.executable, f"{folder}/other.py", "--fast"], [f"{folder}/agent.sh"]):
        given = f"agent.args.command=[{','.join(command)}]"
        found = own_code(run_config("environment=agent_command", given))
        own = [part for part in command if part.startswith(str(folder))]
        assert {key: list(files) for key, files in found.items()} == {"agent.args.command": own}


def test_changed_code_is_refused_by_file_or_told_if_it_is_allowed(code, tmp_path):
    folder, helper = code
    config = config_of(folder, "resume=auto")
    run_dir = tmp_path / "run"
    resumable(run_dir, config, own_code(config))
    assert not any("function" in note for note in taken_up(config, run_dir))
    (folder / "rule.py").write_text(RULE.replace("1.0", "2.0"))
    (free,) = (note for note in taken_up(config, run_dir) if "function" in note)
    assert free.startswith("changed, without effect") and "(other files: rule.py)" in free
    (folder / helper).write_text(HELPER.replace("0.0", "1.0"))
    told = f"reward.function = {folder}/reward.py:score (other files: {helper})"
    with pytest.raises(ConfigError) as caught:
        taken_up(config, run_dir)
    assert told in str(caught.value)
    config.checkpoint.allow_config_changes = True
    assert f"changed, as allowed: {told}" in taken_up(config, run_dir)


def taken_up(config, run_dir):
    """What a run says that goes on in this folder."""
    resume = find_resume(config, run_dir, own_code(config), PROMPTS)
    assert resume is not None
    return resume.notes
