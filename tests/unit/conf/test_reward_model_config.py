"""reward_model: the group composes, bad checkpoints and combinations are refused by name."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from hybridrl.config.checks.frozen_models import REWARD_MODEL_PATH, frozen_model
from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.load import examine
from hybridrl.config.planner.memory import pinned_bytes, rank_phases
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import NamedModel
from hybridrl.models.resolve import read_model_config
from hybridrl.plan.tables import plan
from tests.support.composing import (
    FASTEST_SET,
    GPU_NODE,
    LAPTOP,
    REPO,
    Mistake,
    composed,
    examined,
    made,
    mistakes,
    named,
)
from tests.support.model_shapes import QWEN, REWARD_HEAD, TINY

WITH = ("reward_model=default", "reward_model.model.path=/rm")


def with_reward_model(*overrides, machine=LAPTOP, policy=TINY, **changes):
    """A config examined with the policy's config.json and a reward model's at /rm."""
    hardware = [] if "hardware=gpu" in overrides else ["hardware=cpu"]
    overrides = [*hardware, *WITH, *overrides]
    files = {"/rm": policy | REWARD_HEAD | changes}
    return examine(
        composed(overrides),
        machine=machine,
        read_model=lambda path: files.get(path, policy),
        provenance=provenance_of(overrides, []),
    )


def test_a_run_has_no_reward_model_unless_it_asks_for_one():
    found = examined(["hardware=cpu"])
    assert found.report.problems == []
    assert found.config.reward_model is None and found.frozen == []


def test_the_default_shares_the_sharding_and_has_a_model_of_its_own():
    found = with_reward_model("reward=none", "reward_model.weight=-0.5", hidden_size=256)
    assert found.report.problems == []
    config = found.config
    assert config.reward_model.fsdp is config.fsdp
    assert (config.reward_model.model.path, config.reward_model.weight) == ("/rm", -0.5)
    assert (found.shape.hidden, found.frozen[0].shape.hidden) == (128, 256)


MISTAKES = """
late_scores algorithm.max_sampling_rounds algorithm.max_sampling_rounds=3 | vLLM is awake
unscored_baseline algorithm.advantage algorithm=remax | greedy | one of gae,
no_reward reward.function reward=none reward_model.weight=0 | reward_model.weight = 0 | every
range reward_model.weight reward_model.weight=nan | neither infinite
type reward_model.weight reward_model.weight=much
unknown_key reward_model.wieght +reward_model.wieght=1 | Did you mean reward_model.weight
copy reward_model.fsdp ++reward_model.fsdp.dp_shard=4 | set fsdp
worker reward_model.worker reward_model.worker=hybridrl.workers.critic.CriticWorker \
    | it is the worker of critic | hybridrl.workers.reward_model.RewardModelWorker
"""
HEADS = {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 32}
MODELS = [
    ("reward_labels", {"id2label": None}, ["expected 1 label", "it has 2 labels"]),
    ("reward_labels", {"id2label": {"0": "a", "1": "b", "2": "c"}}, ["3 labels", "reward=http"]),
    ("reward_labels", {"id2label": None, "num_labels": 5}, ["has 5 labels"]),
    ("reward_head", {"architectures": ["Qwen2ForCausalLM"]}, ["a Qwen2ForCausalLM", "reward.func"]),
    ("reward_head", {"architectures": None}, ["it is a model without a class"]),
    ("family", {"model_type": "gemma2"}, ["reward_model.model.path", "gemma2"]),
    ("quantized", {"quantization_config": {"bits": 4}}, ["reward_model.model.path"]),
    ("reward_vocabulary", {"vocab_size": 64}, ["it has 64", "policy's 65", "reward=http"]),
    ("positions", {"max_position_embeddings": 100}, ["at most 100", "another reward_model.model"]),
    ("sequence_heads", HEADS, ["fsdp.ulysses_size = 2", "7 attention heads", "/rm"]),
]


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, "hardware=cpu", *WITH) == [mistake]


@pytest.mark.parametrize(("id_", "changes", "words"), MODELS)
def test_a_model_that_cannot_give_the_reward_is_refused(id_, changes, words):
    shared = ["cluster.gpus_per_node=2", "fsdp.ulysses_size=2", "actor.mini_batch_size=256"]
    overrides = shared if changes is HEADS else []
    (problem,) = with_reward_model(*overrides, **changes).report.problems
    assert problem.id == id_
    assert all(word in str(problem) for word in words), problem


def test_a_reward_model_is_no_policy():
    (problem,) = with_reward_model(policy=TINY | REWARD_HEAD).report.problems
    assert (problem.id, problem.value) == ("classifier", "embedded")
    assert "a Qwen2ForS" in problem.why and "no language-modelling head" in problem.why


def test_it_asks_for_its_checkpoint():
    found = named("hardware=cpu", "reward_model=default")
    assert found == [("missing", "reward_model.model.path")]


def test_no_reward_without_a_reward_model_is_refused():
    case = Mistake("no_reward", "reward.function", ["reward=none"], ["Set reward_model=default"])
    assert made(case, "hardware=cpu") == [case]


def test_a_path_that_is_nowhere_is_told_of_the_reward_model():
    of_nowhere = NamedModel(
        name="reward_model", key=REWARD_MODEL_PATH, path="/nowhere", has_head=False
    )
    with pytest.raises(ValueError) as caught:
        frozen_model(of_nowhere, read_model_config)
    text = str(caught.value)
    assert "reward_model.model.path = /nowhere: /nowhere does not exist" in text
    assert "reward_model.model.path=/path/to/folder" in text and "reward_model=none" in text
    assert " model.path" not in text and "embedded" not in text


def test_a_larger_vocabulary_is_no_problem():
    """Checkpoints of one family are padded to other multiples, or have a token for padding."""
    assert with_reward_model(vocab_size=80).report.problems == []


def test_its_weights_have_neither_gradients_nor_moments():
    """Backbone and head of 896 without bias, 4 bytes each over 8 ranks, in every phase."""
    found = with_reward_model("hardware=gpu", machine=GPU_NODE, policy=QWEN)
    phases = {
        p.name: p.parts for p in rank_phases(found.config, found.shape, 140 * 2**30, found.frozen)
    }
    elements = model_shape(QWEN).backbone_parameters + 896
    for parts in phases.values():
        assert parts["reward_model weights"] == 4 * elements // 8
    scoring = phases["score reward_model"]
    assert not [name for name in scoring if name.startswith("reward_model A") or "grad" in name]
    # gathered once in bfloat16, its head aside
    assert scoring["gathered weights"] == 2 * model_shape(QWEN).backbone_parameters
    assert "logits" not in scoring
    alone = rank_phases(found.config, found.shape, 140 * 2**30)
    assert not any("reward_model" in name for phase in alone for name in phase.parts)


def test_under_idle_all_its_weights_are_there_while_it_scores_alone():
    found = with_reward_model(
        "hardware=gpu", "fsdp.offload=idle_all", machine=GPU_NODE, policy=QWEN
    )
    phases = rank_phases(found.config, found.shape, 140 * 2**30, found.frozen)
    there = [phase.name for phase in phases if "reward_model weights" in phase.parts]
    assert there == ["score reward_model"]
    more = pinned_bytes(found.config, found.shape, found.frozen) - pinned_bytes(
        found.config, found.shape
    )
    bytes_of_one_rank = 4 * (model_shape(QWEN).backbone_parameters + 896) // 8
    assert bytes_of_one_rank <= more < bytes_of_one_rank + 2**20


def test_one_too_large_for_the_gpu_is_named():
    """Of 32 B parameters a GPU has 128 GB of weights in float32, and 64 GB gathered."""
    large = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    large |= {"num_attention_heads": 40, "num_key_value_heads": 8}
    found = with_reward_model(
        "hardware=gpu",
        "cluster.gpus_per_node=1",
        *FASTEST_SET,
        machine=GPU_NODE,
        policy=QWEN,
        **large,
    ).report.problems
    ids = [(p.id, p.key) for p in found if p.why.startswith("score reward_model")]
    assert ids == [("gpu_memory", "reward_model.model.path")]


def test_the_plan_shows_it():
    found = with_reward_model()
    console = Console(width=200)
    with console.capture() as capture:
        console.print(plan(found.config, found.shape, LAPTOP, found.frozen))
    text = capture.get()
    assert "/rm: qwen2" in text and "weight 1" in text
    assert "hybridrl.workers.reward_model.RewardModelWorker" in text
    assert "score reward_model" in text


def test_other_tokens_are_refused_before_anything_starts(tmp_path):
    policy = REPO / "hybridrl" / "models" / "tiny"
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((policy / "config.json").read_text()) | REWARD_HEAD)
    )
    text = (policy / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = subprocess.run(
        [
            *(sys.executable, "-m", "hybridrl.main", "hardware=cpu", "run.dry=true"),
            *("reward_model=default", f"reward_model.model.path={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert (
        f"reward_model.model.path = {tmp_path}, expected the vocabulary of model.path"
        in found.stderr
    )
    assert "2 of 640 tokens differ" in found.stderr
