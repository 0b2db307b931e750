"""conf/: recipes, comments, size, and agreement of the YAML with the dataclasses, key by key."""

import dataclasses
import re
import typing

import pytest
from omegaconf import OmegaConf

from hybridrl.config import schema
from hybridrl.config.annotations import Range
from hybridrl.config.keys import leaves
from hybridrl.config.schema_keys import fields_along, shared_by
from hybridrl.config.sections import HealthConfig
from hybridrl.config.typed import optional_class
from hybridrl.config.user_code.classes import BUILT_IN
from tests.support.composing import GPU_NODE, LAPTOP, REPO, composed, examined

RECIPES = sorted(path.stem for path in (REPO / "conf" / "recipe").glob("*.yaml"))
CONF_FILES = sorted((REPO / "conf").rglob("*.yaml"))
GROUPS = {
    group.name: sorted(path.stem for path in group.glob("*.yaml"))
    for group in (REPO / "conf").iterdir()
    if group.is_dir()
}
ONE_PART = "{a: {function: hybridrl.rewards.gsm8k.score, args: {mode: strict}, weight: 1}}"
OWN_REWARDS = {"custom": "own", "verl": "verl_score", "trl": "trl_score"}
WITH_REWARD_MODEL = ["reward_model=default", "reward_model.model.path=/rm"]
WITH_TEACHER = ["teacher=default", "teacher.models=/rm"]
OWN_AGENT = {
    "agent": [
        "agent.function=hybridrl.environments.calculator_agent.run",
        "+agent.args.mode=strict",
        "+agent.args.max_turns=2",
    ],
    "agent_command": ["agent.args.command=[ls]"],
    "gymnasium": ["agent.args.env=Game-v0"],
    "openenv": ["agent.args.url=http://127.0.0.1:8000"],
    "verifiers": ["agent.args.env=reverse-text"],
}
OWN_ENVIRONMENT = [
    "environment.function=hybridrl.environments.calculator.Calculator",
    "+environment.args.mode=strict",
]
LEAF_LINE = re.compile(r"^(\s*)([\w.]+):\s*(\S.*)$")


def asked_for(recipe):
    """The overrides that choose a recipe, with what it asks for."""
    return [f"+recipe={recipe}", *(WITH_TEACHER[1:] if recipe == "gsm8k_distill" else [])]


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_passes_all_checks(recipe, hardware):
    machine = GPU_NODE if hardware == "gpu" else LAPTOP
    result = examined([*asked_for(recipe), f"hardware={hardware}"], machine=machine)
    assert result.report.problems == []
    assert result.config.cluster.gpus_per_node == (8 if hardware == "gpu" else 1)
    assert result.config.fsdp.dp_shard == result.config.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group, choices in GROUPS.items() for choice in choices],
)
def test_every_choice_of_every_group_fits_the_schema(group, choice, tmp_path):
    """Alone, but for what it asks for: files, functions, a sandbox, a class, a checkpoint."""
    train = tmp_path / "a.parquet"
    train.touch()
    overrides = asked_for(choice) if group == "recipe" else [f"{group}={choice}"]
    overrides += [] if group == "hardware" else ["hardware=cpu"]
    overrides += ["cluster.gpus_per_node=2"] if choice == "hybrid_shard" else []
    overrides += [f"data.train_files={train}"] if choice == "verl_parquet" else []
    overrides += ["reward.args.isolation=none"] if choice == "code" else []
    overrides += OWN_ENVIRONMENT if (group, choice) == ("environment", "custom") else []
    overrides += OWN_AGENT.get(choice, []) if group == "environment" else []
    overrides += ["reward.args.model=judge"] if choice == "judge" else []
    if (group, choice) == ("reward", "weighted"):
        overrides.append(f"+reward.args.parts={ONE_PART}")
    if group == "reward" and choice in OWN_REWARDS:
        overrides.append(f"reward.function=tests.support.own_rewards.{OWN_REWARDS[choice]}")
    if group == "algorithm" and choice in ("sft", "dpo", "ipo", "kto", "bradley_terry"):
        overrides.append("rollout.responses_per_prompt=1")
    overrides += [] if group != "model" else ["actor.max_tokens_per_gpu=256"]
    on_gpu, scores = choice == "gpu", (group, choice) == ("reward", "none")
    overrides += WITH_REWARD_MODEL if scores else []
    overrides += WITH_REWARD_MODEL[1:] if (group, choice) == ("reward_model", "default") else []
    overrides += WITH_TEACHER[1:] if (group, choice) == ("teacher", "default") else []
    result = examined(overrides, machine=GPU_NODE if on_gpu else LAPTOP)
    assert result.report.problems == []


def test_recipe_files_and_recipe_folders_are_one_to_one():
    folders = sorted(path.name for path in (REPO / "recipes").iterdir() if path.is_dir())
    assert folders == RECIPES
    assert all((REPO / "recipes" / name / "README.md").is_file() for name in folders)


def test_the_first_page_has_the_accuracies_of_the_recipes_pages():
    row = re.compile(r"\(recipes/(\w+)/.* \| ([\d.]+) to ([\d.]+) \| ([\d.]+) to ([\d.]+) \|")
    rows = row.findall((REPO / "README.md").read_text())
    assert len(rows) > 9
    for name, greedy, better_greedy, sampled, better_sampled in rows:
        page = (REPO / "recipes" / name / "README.md").read_text()
        found = [
            re.search(rf"^\|(?: 1 \|)? {step} \| ([\d.]+) \S+ [\d.]+ \| ([\d.]+)", page, re.M)
            for step in (0, 30)
        ]
        assert [one and one.groups() for one in found] == [
            *((greedy, sampled), (better_greedy, better_sampled))
        ], name


def test_the_composed_config_has_at_most_174_leaves():
    """Besides health's thresholds; the last are rollout.num_scheduler_steps and weights."""
    cfg = composed(["+recipe=gsm8k_ppo", "hardware=cpu"])
    found = [*leaves(OmegaConf.to_container(cfg, resolve=False))]
    thresholds = [key for key in found if key.startswith("health.")]
    assert len(found) - len(thresholds) <= 174
    assert len(thresholds) == len(dataclasses.fields(HealthConfig))


@pytest.mark.parametrize("path", CONF_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_leaf_has_a_comment(path):
    """Directly above, on its line, or above a block of links; hardware and recipes only repeat."""
    if path.parent.name in ("hardware", "recipe"):
        lines = [line for line in path.read_text().splitlines() if "accelerator:" in line]
        assert len(lines) == (path.parent.name == "hardware")
        return
    lines = path.read_text().splitlines()
    commented = True
    in_defaults = False
    for number, line in enumerate(lines):
        if line.strip() == "" or not line.startswith(" "):
            in_defaults = line.startswith("defaults:") or (in_defaults and line.strip() == "")
        leaf = LEAF_LINE.match(line)
        if in_defaults or leaf is None:
            continue
        above = lines[number - 1].strip() if number else ""
        is_link = leaf[3].startswith("${")
        commented = above.startswith("#") or " #" in leaf[3] or (is_link and commented)
        assert commented, f"{path}:{number + 1}: {line}"


def _schema_keys(cls: type, prefix: str = "") -> set[str]:
    """Dotted keys, those of optional sections included; mappings and lists are leaves."""
    keys = set()
    for name, hint in typing.get_type_hints(cls).items():
        section = optional_class(hint) or hint
        role = BUILT_IN[name][1] if cls is schema.RunConfig and name in BUILT_IN else section
        nested = dataclasses.is_dataclass(role)
        keys |= _schema_keys(role, f"{prefix}{name}.") if nested else {f"{prefix}{name}"}
    return keys


def test_dataclasses_and_yaml_have_the_same_keys():
    """With every optional section; what roles share are no keys of theirs."""
    sections = ["lora=default", "environment=calculator", *WITH_REWARD_MODEL, *WITH_TEACHER]
    cfg = composed(["hardware=cpu", *sections])
    OmegaConf.set_struct(cfg, False)
    cfg = OmegaConf.merge(cfg, composed(["hardware=cpu", "environment=calculator_agent"]))
    tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    mappings = {
        "environment.args",
        "agent.args",
        "reward.args",
        "eval.rules",
        "algorithm.loss.args",
    }
    found = {next((m for m in mappings if key.startswith(f"{m}.")), key) for key in leaves(tree)}
    keys = {key for key in found if shared_by(key) is None}
    assert keys == {key for key in _schema_keys(schema.RunConfig) if shared_by(key) is None}


def test_dataclasses_have_no_defaults():
    """Defaults stand in YAML only."""
    classes = [
        value
        for value in vars(schema).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]
    assert len(classes) > 15
    for cls in classes:
        for field in dataclasses.fields(cls):
            assert field.default is dataclasses.MISSING, (cls, field.name)
            assert field.default_factory is dataclasses.MISSING, (cls, field.name)


def test_every_number_has_a_range():
    """Shared nodes are checked where they stand, not in each role."""
    number = {int, float, int | float, int | None, float | None}
    number |= {list[float], list[int], list[int] | None}
    fields = {
        key: [*fields_along(key)][-1]
        for key in _schema_keys(schema.RunConfig)
        if shared_by(key) is None
    }
    with_range = {k for k, f in fields.items() if any(isinstance(n, Range) for n in f.notes)}
    assert {key for key, field in fields.items() if field.hint in number} == with_range


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_hardware(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /fsdp: hybrid_shard\n"
        "trainer:\n  total_steps: 7\nactor:\n  optim:\n    lr: 2.0e-5\n"
    )
    overrides = ["+recipe=mine", "hardware=cpu", "actor.optim.lr=3e-5", "cluster.gpus_per_node=2"]
    config = examined(overrides, config_dir=tmp_path).config
    assert config.trainer.total_steps == 7
    assert config.actor.optim.lr == 3e-5
    assert (config.fsdp.dp_replicate, config.fsdp.dp_shard) == (2, 1)


def test_a_recipe_may_choose_another_model_than_the_hardware_does(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: smollm2_135m\n"
    )
    cfg = composed(["+recipe=mine", "hardware=cpu"], tmp_path)
    assert cfg.model.path == "smollm2_135m"
    assert composed(["+recipe=mine", "hardware=cpu", "model=embedded"], tmp_path).model.path == (
        "embedded"
    )
