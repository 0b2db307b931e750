"""Changes of the config between a checkpoint and its resumption: which of them matter."""

import copy

import pytest

from hybridrl.config.changes import MISSING, Change, changes
from hybridrl.trainer.tracking.provenance import plain
from tests.support.run_configs import run_config


def changed(key: str, value: object, **others: object) -> list[Change]:
    """The changes when one key of a run gets another value; `others` by key with __ for dots."""
    before = plain(run_config())
    for name, other in others.items():
        put(before, name.replace("__", "."), other)
    now = copy.deepcopy(before)
    put(now, key, value)
    return changes(before, now)


def put(config: dict, key: str, value: object) -> None:
    *path, last = key.split(".")
    for name in path:
        config = config[name]
    config[last] = value


@pytest.mark.parametrize(
    "key",
    [
        *("seed", "model.init", "data.prompts_per_step", "algorithm.kl.coef"),
        *("actor.optim.lr", "actor.mini_batch_size", "rollout.temperature", "fsdp.param_dtype"),
        *("reward.function", "critic.worker"),
    ],
)
def test_what_is_computed_matters(key):
    (change,) = changed(key, "another")
    assert (change.key, change.now, change.matters) == (key, "another", True)


@pytest.mark.parametrize(
    "key",
    [
        *("run.name", "cluster.gpus_per_node", "fsdp.dp_shard", "fsdp.offload", "fsdp.compile"),
        "fsdp.share_prefixes",
        *("rollout.tensor_parallel_size", "rollout.sleep", "eval.every_steps", "resume"),
        *("data.num_eval_problems", "eval.greedy"),
        *(
            "model.path",
            "checkpoint.every_steps",
            "actor.max_tokens_per_gpu",
            "trainer.max_restarts",
            "cluster.call_timeout_s",  # of earlier versions
        ),
    ],
)
def test_where_and_how_it_is_computed_does_not_matter(key):
    (change,) = changed(key, "another")
    assert (change.key, change.matters) == (key, False)


def test_the_shared_nodes_count_once():
    """actor.fsdp is fsdp."""
    before, now = plain(run_config()), plain(run_config())
    for section in (now, now["actor"], now["critic"], now["ref"]):
        section["fsdp"]["dp_shard"] = 2
    assert [change.key for change in changes(before, now)] == ["fsdp.dp_shard"]


@pytest.mark.parametrize(("schedule", "matters"), [("constant", False), ("cosine", True)])
def test_a_longer_run_matters_where_the_learning_rate_is_laid_out_over_it(schedule, matters):
    (change,) = changed("actor.total_steps", 99, actor__optim__schedule=schedule)
    assert change.matters is matters
    (change,) = changed("trainer.total_steps", 99)
    assert not change.matters


@pytest.mark.parametrize(("curriculum", "matters"), [(None, False), ("steps", True)])
def test_the_length_of_a_curriculum_matters_if_there_is_one(curriculum, matters):
    (change,) = changed("data.curriculum_steps", 99, data__curriculum=curriculum)
    assert change.matters is matters


@pytest.mark.parametrize(("schedule", "matters"), [("constant", False), ("linear", True)])
def test_what_follows_another_key_is_not_told_beside_it(schedule, matters):
    before, now = plain(run_config()), plain(run_config())
    for config, steps in ((before, 30), (now, 60)):
        config["actor"]["optim"]["schedule"] = schedule
        config["trainer"]["total_steps"] = config["actor"]["total_steps"] = steps
        config["critic"]["total_steps"] = config["data"]["curriculum_steps"] = steps
    assert changes(before, now) == [Change("trainer.total_steps", 30, 60, matters)]
    now["critic"]["total_steps"] = 45
    assert [change.key for change in changes(before, now)] == (
        ["trainer.total_steps", "critic.total_steps"][:: 1 if matters else -1]
    )


def test_a_path_matters_by_the_files_behind_it():
    before, now = plain(run_config()), plain(run_config())
    key, path = "model.path", before["model"]["path"]
    (change,) = changes(before, now, {key: ("a", "b", "c", "d")})
    assert change == Change(key, path, path, matters=True, files=("a", "b", "c", "d"))
    assert str(change) == f"{key} = {path} (other files: a, b, c and 1 more)"
    now["model"]["path"] = "/elsewhere"
    assert changes(before, now) == [Change(key, path, "/elsewhere", matters=False)]
    (change,) = changes(before, now, {key: ("a",)})
    assert change.matters
    assert str(change) == f"{key} = /elsewhere (other files: a), was {path}"


def test_a_key_that_is_new_or_gone_is_a_change():
    before, now = plain(run_config()), plain(run_config())
    now["actor"]["mine"] = 1
    assert changes(before, now) == [Change("actor.mine", MISSING, 1, matters=True)]
    assert changes(now, before) == [Change("actor.mine", 1, MISSING, matters=True)]


def test_an_empty_section_that_older_runs_lack_is_no_change():
    assert changes({"data": {}}, {"data": {"chat_template_kwargs": {}}}) == []
    assert changes({"data": {}}, {"data": {"chat_template_kwargs": {"a": 0}}}) != []


def test_those_that_matter_come_first():
    before, now = plain(run_config()), plain(run_config())
    now["cluster"]["nodes"], now["seed"] = 7, 7
    assert [change.key for change in changes(before, now)] == ["seed", "cluster.nodes"]
    assert str(changes(before, now)[1]) == f"cluster.nodes = 7, was {before['cluster']['nodes']}"
