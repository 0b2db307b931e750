"""Health checks: a run with a fault names it within two steps; clean runs name none."""

import json
import re
import shutil

import pytest

from tests.support.runs import ROOT, SMALL, started

PARTS = "tests.support.ill_parts"
TINY = ROOT / "hybridrl" / "models" / "tiny"
STRICT = "+eval.rules.strict={function: hybridrl.rewards.gsm8k.score, args: {mode: strict}}"
# On CPUs the run would stop at a much smaller difference of log-probs.
LIMIT = "trainer.max_log_prob_diff=0.1"
TAUGHT = ["+recipe=gsm8k_grpo", *SMALL[1:], "algorithm.kl.coef=0", "teacher=default"]
GRPO = ["+recipe=gsm8k_grpo", *SMALL[1:]]

# Smaller steps than the recipes', and as many seeds as make fifty runs with those of
# test_recipe_learns_slow.py, in which no check may find anything either.
SEEDS, STEPS = 5, 3
CLEAN = [
    "hardware=cpu",
    f"trainer.total_steps={STEPS}",
    "data.prompts_per_step=32",
    "data.num_eval_problems=40",
    "eval.every_steps=0",
    "eval.samples=1",
    "tracking.report=false",
]


def own(key, name):
    return f"{key}={PARTS}.{name}"


def reward(name):
    return own("reward.function", name)


FAULTS = {
    "always right": ("constant_reward", [reward("constant")]),
    "never right": ("constant_reward", [reward("zero")]),
    "the reward sees the prompt only": ("unmixed_groups", [*GRPO, reward("of_prompt")]),
    "the reward wants another form": ("wrong_form", [reward("in_tags"), STRICT]),
    "the reward pays wrong answers": (
        "fallen_accuracy",
        [reward("reversed_"), STRICT, "actor.optim.lr=3e-3", "data.num_eval_problems=200"],
    ),
    "rewards raise": ("failed_rewards", [reward("raising")]),
    "rewards hang": ("failed_rewards", [reward("hanging"), "reward.timeout_s=0.3"]),
    "a rule raises": (
        "failed_eval_rewards",
        [f"+eval.rules.odd={{function: {PARTS}.raising, args: {{}}}}"],
    ),
    "rewards are slow": ("slow_reward", [reward("slow"), "data.num_eval_problems=4"]),
    "short limit": ("truncated", ["rollout.max_response_tokens=4"]),
    "end tokens are cut off": ("unended_responses", [own("rollout.worker", "WithoutEndTokens")]),
    "one seed": ("repeated_responses", [own("rollout.worker", "SameSeeds")]),
    "two seeds": (
        "repeated_responses",
        [
            own("rollout.worker", "HalfTheSeeds"),
            "data.prompts_per_step=32",
            "rollout.responses_per_prompt=8",
        ],
    ),
    "updates add noise": ("exploded_entropy", [own("actor.worker", "NoisyActor")]),
    "every sample is wrong": (
        "collapsed_entropy",
        [own("algorithm.loss.function", "unlikely"), "actor.epochs=8", "actor.optim.lr=3e-3"],
    ),
    "another reference": ("exploded_kl", [own("ref.worker", "OtherReference")]),
    "huge learning rate": ("exploded_ratio", ["actor.optim.lr=0.1"]),
    "tiny clip range": (
        "clipped_ratio",
        [f"algorithm.loss.args.clip_{side}=1e-7" for side in ("low", "high")] + ["actor.epochs=8"],
    ),
    "tiny learning rate": ("still_policy", ["actor.optim.lr=1e-10"]),
    "no learning rate": ("no_learning_rate", ["actor.optim.lr=1e-30"]),
    "no learning rate of the critic": ("no_learning_rate", ["critic.optim.lr=1e-30"]),
    "frozen actor": ("frozen_actor", [own("actor.worker", "FrozenActor")]),
    "the reference follows": ("frozen_actor", [own("ref.worker", "FollowingReference")]),
    "the norm's limit is tiny": ("clipped_gradient", ["actor.optim.max_grad_norm=1e-4"]),
    "rewards of ten thousand": ("clipped_gradient", [reward("scaled")]),
    "NaN in the actor": ("skipped_updates", [own("actor.worker", "SometimesNaN")]),
    "NaN in the critic": ("skipped_updates", [own("critic.worker", "CriticSometimesNaN")]),
    "values are noise": ("blind_critic", [own("critic.worker", "WildCritic")]),
    "a teacher of wrong answers": (
        "contrary_teacher",
        [*TAUGHT, f"teacher.models={TINY}", own("teacher.worker", "FlatTeacher")],
    ),
    "away from the teacher": (
        "growing_teacher_kl",
        [*TAUGHT, f"teacher.models={TINY}", "teacher.reward_coef=1", "actor.optim.lr=0.03"],
    ),
    "other log-probs": ("mismatch", [own("rollout.worker", "OtherLogProbs"), LIMIT]),
    "old weights": ("stale_policy", [own("rollout.worker", "OldWeights"), LIMIT]),
    "old adapters": (
        "missing_adapters",
        [*["+recipe=gsm8k_lora", *SMALL[1:]], own("rollout.worker", "OldWeights"), LIMIT],
    ),
    "a slow engine": (
        "slow_engine",
        [own("rollout.worker", "SlowOnRank1"), "cluster.gpus_per_node=2"],
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recipe",
    [
        "gsm8k_ppo",
        "gsm8k_grpo",
        "gsm8k_rloo",
        "gsm8k_reinforce_pp",
        "gsm8k_dapo",
        "gsm8k_gspo",
        "gsm8k_partial",
        "gsm8k_lora",
        "gsm8k_sft",
        "calculator_tool",
    ],
)
def test_clean_runs_raise_nothing(tmp_path, recipe):
    seeds = f"seed={','.join(str(seed) for seed in range(1, SEEDS + 1))}"
    overrides = [f"+recipe={recipe}", seeds, *CLEAN, f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m"]
    with started(tmp_path / "run", *overrides) as run:
        output = run.output(timeout=580)
        assert run.process.returncode == 0, output
    for job in range(SEEDS):
        lines = (tmp_path / "sweep" / str(job) / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == STEPS + 1
        assert not any("health/" in line for line in lines), output


def check(run_dir, fault, overrides):
    """Run with a fault; return the console's text."""
    whole = overrides if overrides[0].startswith("+recipe") else [*SMALL, *overrides]
    with started(run_dir, *whole) as run:
        output = run.output(timeout=200)
        assert run.process.returncode == 0, output
        rows = run.metrics()
    assert any(f"health/{fault}" in row for row in rows), (rows, output)
    said = re.findall(rf"health\.{fault}\b", output)
    assert said, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_within_two_steps(tmp_path, name):
    fault, overrides = FAULTS[name]
    check(tmp_path / "run", fault, overrides)


def problems(count):
    return [{"question": f"What is {k} plus 1?", "answer": f"#### {k + 1}"} for k in range(count)]


def write_data(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_repeated_prompts_are_named(tmp_path):
    train = write_data(tmp_path / "train.jsonl", problems(40) * 2)
    held_out = write_data(tmp_path / "held_out.jsonl", problems(60)[40:])
    files = [f"data.train_files={train}", f"data.eval_files={held_out}"]
    check(tmp_path / "run", "duplicate_prompts", files)


@pytest.mark.slow
def test_held_out_prompts_that_are_trained_on_are_named(tmp_path):
    train = write_data(tmp_path / "train.jsonl", problems(60))
    held_out = write_data(tmp_path / "held_out.jsonl", problems(20))
    files = [f"data.train_files={train}", f"data.eval_files={held_out}"]
    check(tmp_path / "run", "overlap", [*files, "data.held_out_overlap=keep"])


def model_with(folder, file, change):
    """A copy of the embedded model whose JSON `file` is changed in place."""
    if not folder.exists():
        shutil.copytree(TINY, folder)
    settings = json.loads((folder / file).read_text())
    change(settings)
    (folder / file).write_text(json.dumps(settings))
    return f"model.path={folder}"


@pytest.mark.slow
def test_a_template_without_generation_marker_is_named(tmp_path):
    def change(settings):
        template = settings["chat_template"]
        settings["chat_template"] = template.partition("{%- if add_generation_prompt")[0]

    model = model_with(tmp_path / "model", "tokenizer_config.json", change)
    check(tmp_path / "run", "no_generation_marker", [model])


@pytest.mark.slow
def test_a_teacher_with_another_template_is_named(tmp_path):
    def change(settings):
        settings["chat_template"] = settings["chat_template"] + " "

    teacher = model_with(tmp_path / "model", "tokenizer_config.json", change)
    models = teacher.replace("model.path", "teacher.models")
    check(tmp_path / "run", "teacher_template", [*TAUGHT, models])


@pytest.mark.slow
def test_a_wrong_end_token_is_named(tmp_path):
    folder = tmp_path / "model"
    for file in ("config.json", "generation_config.json"):
        model_with(folder, file, lambda settings: settings.update(eos_token_id=0))
    model = model_with(
        folder, "tokenizer_config.json", lambda settings: settings.update(eos_token="<|pad|>")
    )
    check(tmp_path / "run", "special_tokens", [model])


@pytest.mark.slow
def test_responses_without_text_are_named(tmp_path):
    every = {"eos_token_id": [*range(1, 640)]}
    model = model_with(
        tmp_path / "model", "generation_config.json", lambda settings: settings.update(every)
    )
    check(tmp_path / "run", "empty_responses", [model])


@pytest.mark.slow
def test_text_that_the_tokenizer_does_not_know_is_named(tmp_path):
    """Its words are single characters, and no digit is among them."""

    def tokens(settings):
        chars = [c for c in settings["model"]["vocab"] if len(c) == 1 and not c.isdigit()]
        known = {**{t["content"]: t["id"] for t in settings["added_tokens"]}, "<|unknown|>": 5}
        known |= {char: index for index, char in enumerate(chars, start=6)}
        settings["model"] = {"type": "WordLevel", "vocab": known, "unk_token": "<|unknown|>"}
        pattern = {"Regex": "."}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        settings["pre_tokenizer"], settings["decoder"] = split, {"type": "Fuse"}

    folder = tmp_path / "model"
    model_with(folder, "tokenizer.json", tokens)
    unknown = {"unk_token": "<|unknown|>"}
    model = model_with(folder, "tokenizer_config.json", lambda settings: settings.update(unknown))
    limit = ["rollout.max_prompt_tokens=400", "rollout.max_response_tokens=16"]
    check(tmp_path / "run", "unknown_tokens", [model, *limit])
