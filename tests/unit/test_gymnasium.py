"""environment=gymnasium with the real package: text games, seeds as data, other spaces refused."""

import sys

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.environments.others.gymnasium import rows, run
from tests.support.other_environments import played

pytest.importorskip("gymnasium", reason="pip install 'hybridrl[gymnasium]'")

GAME = """
import gymnasium
from gymnasium.spaces import Text

class Guess(gymnasium.Env):
    observation_space = Text(40, charset="abcdefghijklmnopqrstuvwxyz 0123456789?.")
    action_space = Text(2, charset="0123456789")

    def __init__(self, most=9):
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(0, self.most + 1))
        return f"up to {self.most}?", {}

    def step(self, action):
        if int(action) == self.number:
            return "right.", 1.0, True, False, {}
        near = "higher" if int(action) < self.number else "lower"
        return near, -0.25, False, False, {}

gymnasium.register("Guess-v0", Guess)
"""


@pytest.fixture
def args(tmp_path, monkeypatch):
    (tmp_path / "text_games.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {
        "env": "text_games:Guess-v0",
        "options": {"most": 3},
        "num_tasks": 6,
        "invalid_reward": -1.0,
        "max_turns": 3,
        "turn_rewards": True,
    }
    sys.modules.pop("text_games", None)


def upwards(prompt: str) -> str:
    return str(prompt.count("higher"))


def test_its_seeds_are_the_data_and_actions_have_their_rewards(args):
    tasks = rows("train", **args)
    assert [task["seed"] for task in tasks] == [0, 1, 2, 3, 4, 5]
    assert rows("test", **args) is None
    rewards, prompts = played(run, tasks, upwards, **args)
    parts = [[*reward.turns.values()] for reward in rewards]
    # A number is guessed by as many actions as it is large, but 3 takes one too many.
    assert {tuple(part) for part in parts} <= {
        (1.0,),
        (-0.25, 1.0),
        (-0.25, -0.25, 1.0),
        (-0.25, -0.25, -0.25),
    }
    assert [reward.total for reward in rewards] == [sum(part) for part in parts]
    assert "<|user|>up to 3?<|assistant|>0<|end|><|user|>higher<|assistant|>" in prompts
    whole, _ = played(run, tasks, upwards, **args | {"turn_rewards": False})
    assert [(reward.total, reward.turns) for reward in whole] == [(sum(p), {}) for p in parts]


def test_an_answer_outside_of_the_space_ends_the_episode(args):
    (reward,), prompts = played(run, rows("train", **args)[:1], lambda prompt: "three", **args)
    assert [*reward.turns.values()] == [-1.0] and len(prompts) == 1


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("FrozenLake-v1", "texts as observations and actions: has Discrete"),
        ("text_games:Guess-v1", "VersionNotFound"),
        ("NoGame-v0", "NameNotFound"),
        ("no_such_module:Game-v0", "ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_played_is_named(args, env, why):
    options = {} if env == "FrozenLake-v1" else args["options"]
    with pytest.raises(
        ConfigError, match=f"(?s)agent.args.env = {env}, expected .*{why}.*agent.args.env=my_module"
    ):
        rows("train", **args | {"env": env, "options": options})
