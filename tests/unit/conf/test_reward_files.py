"""conf/reward and docs/rewards.md: overrides of parts, garbage anywhere, the page's commands.

That each file composes and passes all checks is tested in test_files.py.
"""

import contextlib
import shlex

import pytest
from omegaconf import OmegaConf

from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import leaves
from hybridrl.config.user_code.classes import check_reward_function
from tests.support.composing import REPO, examined, named, only, problems

FILES = sorted(path.stem for path in (REPO / "conf" / "reward").glob("*.yaml"))
# Where there is no bubblewrap, the default is refused: tests/unit/test_sandbox.py.
ANYWHERE = {"code": ["reward.args.isolation=none"]}
PAGE = REPO / "docs" / "rewards.md"
# Modules of the page's examples, in their order.
MODULES = ("my_reward", "my_verl_reward", "my_trl_reward", "my_judge")
BASE = ["+recipe=gsm8k_grpo", "hardware=cpu"]


def test_a_part_is_overridden_added_and_removed_on_the_command_line():
    more = "{function: hybridrl.rewards.gsm8k.score, args: {mode: strict}, weight: -2}"
    config = examined(
        [
            *BASE,
            "reward=gsm8k_form",
            "reward.args.parts.correct.weight=3",
            "reward.args.parts.correct.args.mode=strict",
            "~reward.args.parts.form",
            f"+reward.args.parts.more={more}",
        ]
    ).config
    assert config.reward.args == {
        "parts": {
            "correct": {
                "function": "hybridrl.rewards.gsm8k.score",
                "args": {"mode": "strict"},
                "weight": 3,
            },
            "more": {
                "function": "hybridrl.rewards.gsm8k.score",
                "args": {"mode": "strict"},
                "weight": -2,
            },
        }
    }


def test_every_problem_of_every_part_is_in_one_report():
    found = problems(
        *BASE,
        "reward=gsm8k_form",
        "reward.args.parts.correct.function=hybridrl.rewards.gsm8k.scoer",
        "reward.args.parts.form.weight=heavy",
        "+reward.args.parts.form.args.mood=good",
        "+reward.args.parts.form.weigth=1",
    )
    text = "\n".join(found)
    assert len(found) == 4, text
    for words in (
        "reward.args.parts.correct.function = hybridrl.rewards.gsm8k.scoer",
        "reward.args.parts.form.weight = heavy",
        "reward.args.parts.form.args = {'mood': 'good'}",
        "reward.args.parts.form.weigth = 1",
        "Did you mean reward.args.parts.form.weight?",
    ):
        assert words in text, (words, text)


def test_a_rule_of_the_evaluation_may_be_a_weighted_sum():
    parts = "{a: {function: hybridrl.rewards.gsm8k.score, args: {mood: bad}, weight: 1}}"
    rule = f"{{function: hybridrl.rewards.weighted.score, args: {{parts: {parts}}}}}"
    (found,) = problems(*BASE, f"+eval.rules.sum={rule}")
    assert "eval.rules.sum.args.parts.a.args = {'mood': 'bad'}" in found
    assert "Did you mean eval.rules.sum.args.parts.a.args.mode?" in found


@pytest.mark.parametrize("name", FILES)
def test_any_argument_may_be_garbage_without_a_crash(name):
    """It passes or is refused, and nothing but a ConfigError is raised."""
    reward = OmegaConf.load(REPO / "conf" / "reward" / f"{name}.yaml")
    args = {f"args.{key}" for key in leaves(OmegaConf.to_container(reward.args, resolve=True))}
    for key in args | ({"args.parts"} if name == "weighted" else set()):
        for garbage in ("gar-bage", None, [1, 2], {"a": 1}, -1, True):
            broken = OmegaConf.create(OmegaConf.to_container(reward))
            OmegaConf.update(broken, key, garbage, merge=False)
            with contextlib.suppress(ConfigError):
                check_reward_function(
                    "reward", broken.function, OmegaConf.to_container(broken.args)
                )


def commands() -> list[list[str]]:
    """The overrides of each command on the page, and the code reward's isolation for anywhere."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines if line.startswith("    python -m hybridrl.main ")]
    return [c[3:] + (ANYWHERE["code"] if "reward=code" in c else []) for c in found]


def examples() -> dict[str, str]:
    """The source of each module on the page."""
    sources = [part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    return dict(zip(MODULES, sources, strict=True))


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_the_pages_commands_pass_all_checks(overrides, tmp_path, monkeypatch):
    for module, source in examples().items():
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert problems("hardware=cpu", *overrides) == []


def test_the_pages_functions_do_what_they_say():
    names: dict = {}
    for source in examples().values():
        exec(source, names)
    assert names["compute_score"]("d", "#### 42", "42") == {"score": 1.0, "length": 7}
    assert names["exact"](["p"] * 2, ["is 42", "43"], ["42", "42"], dataset=[]) == [1.0, 0.0]
    values = [names["brevity"]("", "x" * n, {}, free_chars=10) for n in (0, 10, 15, 20, 30)]
    assert values == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_the_page_names_every_file():
    assert [name for name in FILES if f"`reward={name}`" not in PAGE.read_text()] == []


def test_concurrency_of_a_function_that_is_not_async_is_refused():
    problem = only(*BASE, "reward.concurrency=256")
    assert (problem.id, problem.key) == ("no_effect", "reward.concurrency")
    assert problems(*BASE, "reward=http", "reward.concurrency=256") == []
    args = "{url: 'http://127.0.0.1:1/', timeout_s: 1, retries: 0, token_env: null}"
    part = f"{{function: hybridrl.rewards.http.score, args: {args}, weight: 1}}"
    part = f"+reward.args.parts.judge={part}"
    assert problems(*BASE, "reward=weighted", part, "reward.concurrency=256") == []


@pytest.mark.parametrize("name", ["custom", "verl", "trl"])
def test_an_own_reward_starts_without_settings_and_asks_for_its_function(name):
    assert named(*BASE, f"reward={name}") == [("missing", "reward.function")]
