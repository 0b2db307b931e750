"""An own function replaces the args and rules of the old one, in runs, sweeps and evaluations."""

import pytest
from omegaconf import OmegaConf

from hybridrl.app.compose import conf_dir
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import precompose
from hybridrl.config.command.own_functions import drop_inherited, override_leaves
from hybridrl.config.keys import leaves
from tests.support.composing import GPU_NODE, composed, examined, made, mistakes, only

BASE = ["hardware=cpu"]
MINE = "hybridrl.rewards.format.gsm8k_answer"
RECIPE = "# @package _global_\n"
GSM8K = {"function": "hybridrl.rewards.gsm8k.score", "args": {"mode": "strict"}}
DEFAULTS = {"reward": GSM8K, "eval": {"rules": {"flexible": GSM8K}}}


@pytest.fixture
def recipes(tmp_path):
    """Writes recipes into a folder of the search path; returns the folder."""

    def write(**texts):
        (tmp_path / "recipe").mkdir()
        for name, text in texts.items():
            (tmp_path / "recipe" / f"{name}.yaml").write_text(RECIPE + text)
        return tmp_path

    return write


def sections(*overrides, config_dir=None):
    """reward.args and eval.rules of a run, or of a sweep's job."""
    cfg = composed([*BASE, *overrides], config_dir)
    return cfg.reward.args, cfg.eval.rules


def dropped(*overrides):
    """The same by the rule alone, on the values of conf/reward/gsm8k.yaml and conf/eval."""
    cfg = OmegaConf.create(DEFAULTS)
    layer = override_leaves(overrides)
    for key, value in layer.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    drop_inherited(cfg, [leaves(DEFAULTS), layer])
    return cfg.reward.args, cfg.eval.rules


def test_an_own_reward_drops_the_args_and_rules_of_the_old_one():
    assert sections(f"reward.function={MINE}") == ({}, {})
    args, rules = sections(f"reward.function={MINE}", "+reward.args.free=2", "~eval.rules.flexible")
    assert (args, rules) == ({"free": 2}, {})


@pytest.mark.parametrize(
    ("override", "args"),
    [
        ("reward.args.mode=flexible", {"mode": "flexible"}),
        ("+reward.args={free: {chars: 2}}", {"free": {"chars": 2}}),
        ("++reward.args.free.chars=2", {"free": {"chars": 2}}),
        ("~reward.args.mode", {}),
    ],
)
def test_args_of_the_command_line_stay(override, args):
    assert dropped(f"reward.function={MINE}", override)[0] == args
    assert dropped(override, f"reward.function={MINE}")[0] == args


def test_what_is_checked_before_the_run_is_what_hydra_composes():
    overrides = [*BASE, f"reward.function={MINE}", "+reward.args.free=2", "seed=3"]
    found = precompose(parse_argv(overrides), conf_dir())
    assert found.problems == [] and found.cfg == composed(overrides)


def test_a_new_argument_without_a_plus_is_told_so():
    found = precompose(
        parse_argv([*BASE, f"reward.function={MINE}", "reward.args.n=2"]), conf_dir()
    )
    assert "+reward.args.n=2" in str(found.problems[0])


def test_the_same_function_keeps_its_args_and_rules():
    args, rules = dropped("reward.function=hybridrl.rewards.gsm8k.score", "reward.args.mode=x")
    assert args == {"mode": "x"} and list(rules) == ["flexible"]


def test_a_rule_that_the_user_sets_or_that_uses_another_function_stays():
    rule = "{function: hybridrl.rewards.format.matches, args: {pattern: x}}"
    _, rules = dropped(f"reward.function={MINE}", f"+eval.rules.form={rule}")
    assert list(rules) == ["form"]
    _, rules = dropped(f"reward.function={MINE}", "eval.rules.flexible.args.mode=strict")
    assert list(rules) == ["flexible"]


def test_a_recipe_replaces_the_defaults_and_the_command_line_the_recipe(recipes):
    own = f"reward:\n  function: {MINE}\n  args: {{depth: 1}}\n"
    own += f"eval:\n  rules:\n    mine: {{function: {MINE}, args: {{}}}}\n"
    folder = recipes(mine=own, further="defaults: [mine, _self_]\nseed: 2\n")
    for recipe in ("mine", "further"):
        args, rules = sections(f"+recipe={recipe}", config_dir=folder)
        assert args == {"depth": 1} and list(rules) == ["mine"]
    args, _ = sections("+recipe=mine", "reward.args.depth=2", config_dir=folder)
    assert args == {"depth": 2}
    other = "reward.function=hybridrl.rewards.gsm8k.score"
    assert sections("+recipe=mine", other, config_dir=folder) == ({}, {})


def test_a_recipe_that_chooses_another_group_starts_from_that_group(recipes):
    text = f"defaults:\n  - override /reward: gsm8k_form\nreward:\n  function: {MINE}\n"
    assert sections("+recipe=mine", config_dir=recipes(mine=text)) == ({}, {})
    assert list(sections("reward=gsm8k_form")[0].parts) == ["correct", "form"]


def test_a_recipes_sum_has_the_parts_that_it_names_alone(recipes):
    """With the best response worth 1, nothing else adds to it; a null drops a recipe's part."""
    part = f"{{function: {MINE}, args: {{}}, weight: 0.5}}"
    text = "defaults:\n  - override /reward: weighted\nreward:\n  args:\n    parts:\n"
    text += f"      mine: {part}\n      other: {part}\n"
    fewer = "defaults: [mine, _self_]\nreward: {args: {parts: {other: null}}}\n"
    folder = recipes(mine=text, fewer=fewer)
    for recipe, names in (("mine", ["mine", "other"]), ("fewer", ["mine"])):
        result = examined([*BASE, f"+recipe={recipe}"], config_dir=folder)
        assert result.report.problems == []
        assert list(result.config.reward.args["parts"]) == names


def test_a_list_of_functions_is_their_sum(recipes):
    """On the command line and in a recipe, and nothing of the replaced reward stays."""
    other = "hybridrl.rewards.none.score"
    given = f"reward.function=[{MINE},{other}]"
    folder = recipes(mine=f"reward:\n  function: [{MINE}, {other}]\n")
    for overrides in ([given], ["reward=trl", given], ["+recipe=mine"]):
        result = examined([*BASE, *overrides], config_dir=folder)
        assert result.report.problems == []
        assert list(result.config.eval.rules) == (["flexible"] if "reward=trl" in overrides else [])
        reward = result.config.reward
        assert reward.function == "hybridrl.rewards.weighted.score" and reward.args == {
            "parts": {
                "gsm8k_answer": {"function": MINE, "args": {}, "weight": 1.0},
                "score": {"function": other, "args": {}, "weight": 1.0},
            }
        }


def test_functions_of_one_name_in_a_list_are_told_apart_by_their_modules():
    both = "hybridrl.rewards.none.score", "hybridrl.rewards.gsm8k.score"
    result = examined([*BASE, f"reward.function=[{','.join(both)}]"])
    assert result.report.problems == []
    parts = result.config.reward.args["parts"]
    assert {name: part["function"] for name, part in parts.items()} == {
        "none_score": both[0],
        "gsm8k_score": both[1],
    }
    problem = only(*BASE, f"reward.function=[{both[0]},{both[0]}]")
    assert (problem.id, problem.value) == ("same_names", f"[{both[0]}, {both[0]}]")
    assert only(*BASE, "reward.function=[]").key == "reward.function"


def test_a_part_of_a_sum_drops_its_own_args_alone():
    args, rules = sections("reward=gsm8k_form", f"reward.args.parts.correct.function={MINE}")
    assert args.parts.correct == {"function": MINE, "args": {}, "weight": 1.0}
    assert list(args.parts) == ["correct", "form"] and list(rules) == ["flexible"]


def test_an_own_environment_starts_from_an_empty_one():
    own = "environment.function=builtins.dict"
    for choice in ("custom", "calculator"):
        config = composed([*BASE, f"environment={choice}", own, "+environment.args.tries=3"])
        assert config.environment.args == {"tries": 3} and config.environment.stop == []
    kept = composed([*BASE, "environment=calculator", own, "environment.stop=['?']"])
    assert kept.environment.stop == ["?"]


def test_an_own_loss_drops_settings_that_a_built_in_one_shares():
    own = composed([*BASE, "algorithm.loss.function=my_loss.vanilla"])
    assert own.algorithm.loss.args == {}
    shared = composed(
        [*BASE, "algorithm.loss.function=dual_clip", "+algorithm.loss.args.max_ratio=3"]
    )
    assert sorted(shared.algorithm.loss.args) == ["clip_high", "clip_low", "max_ratio"]


def test_dropped_args_may_be_garbage():
    for garbage in (
        "reward.args=null",
        "reward.args=3",
        "eval.rules=null",
        "reward.function=[a.b]",
    ):
        dropped(f"reward.function={MINE}", garbage)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ([], 256),
        (["data.prompts_per_step=7"], 28),
        (["data.prompts_per_step=100", "rollout.responses_per_prompt=3"], 150),
        (["data.prompts_per_step=7", "rollout.responses_per_prompt=1", "algorithm=ppo"], 7),
        (["actor.mini_batch_size=0.3"], 128),
        (["actor.mini_batch_size=1.0"], 512),
        (["actor.mini_batch_size=1"], 512),
        (["actor.mini_batch_size=0.001"], 1),
        (["cluster.gpus_per_node=2", "data.prompts_per_step=9", "actor.mini_batch_size=0.5"], 36),
        (["cluster.gpus_per_node=2", "data.prompts_per_step=3", "actor.mini_batch_size=0.01"], 2),
    ],
)
def test_a_share_becomes_the_nearest_mini_batch_that_divides(overrides, size):
    result = examined([*BASE, *overrides])
    assert result.report.problems == []
    found = result.config.actor.mini_batch_size
    assert found == size and isinstance(found, int)


def test_hardware_gpu_keeps_mini_batches_of_256():
    result = examined(["hardware=gpu"], machine=GPU_NODE)
    assert result.config.actor.mini_batch_size == 256


MISTAKES = """
mini_batch actor.mini_batch_size actor.mini_batch_size=2.0 | a share | of at most 1
range actor.mini_batch_size actor.mini_batch_size=0.0 | above 0
range actor.mini_batch_size actor.mini_batch_size=0 | above 0
type actor.mini_batch_size actor.mini_batch_size=half | a number
mini_batch_share actor.mini_batch_size cluster.gpus_per_node=2 data.prompts_per_step=9 \
    rollout.responses_per_prompt=3 | 0.5, expected a share of the 27 responses | 2 ranks \
    | prompts_per_step to a multiple of 2
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_a_share_without_a_fitting_size_is_refused(mistake):
    assert made(mistake, *BASE) == [mistake]
