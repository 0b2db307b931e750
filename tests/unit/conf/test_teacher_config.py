"""teacher: the group composes, and settings that an objective cannot have are refused by name."""

import pytest

from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.load import examine
from hybridrl.config.planner.memory import host_parts, rank_phases
from hybridrl.config.planner.model_shape import model_shape
from tests.support.composing import GPU_NODE, LAPTOP, composed, made, mistakes, named
from tests.support.model_shapes import QWEN, TINY

WITH = ("algorithm=grpo", "algorithm.kl.coef=0", "teacher=default", "teacher.models=/big")
WHOLE = "teacher.objective=reverse_kl"


def taught(*overrides, machine=LAPTOP, policy=TINY, **changes):
    """A config examined with the policy's config.json, and a teacher's at /big."""
    hardware = [] if "hardware=gpu" in overrides else ["hardware=cpu"]
    overrides = [*hardware, *WITH, *overrides]
    return examine(
        composed(overrides),
        machine=machine,
        read_model=lambda path: policy | changes if path == "/big" else policy,
        provenance=provenance_of(overrides, []),
    )


MISTAKES = f"""
teacher_coef teacher.coef teacher.coef=0 | nothing would be learned
teacher_models teacher.models teacher.models=[/a,/b] | {{math: ..., code: ...}}
teacher_tokens teacher.objective teacher.tokenizer=own {WHOLE} | no divergence
teacher_tokens environment teacher.tokenizer=own environment=calculator | of one turn
teacher_objective actor.epochs {WHOLE} actor.epochs=2 | teacher.objective=sampled
given_answers rollout.schedule {WHOLE} teacher.given_fraction=0.5 rollout.schedule=partial \
    | not sampled
given_answers algorithm.kl.coef {WHOLE} teacher.given_fraction=0.5 algorithm.kl.coef=0.1 \
    | teacher.given_fraction=0
given_answers algorithm.advantage {WHOLE} teacher.given_fraction=0.5 algorithm=ppo \
    algorithm.kl.coef=0 | algorithm=grpo
range teacher.beta teacher.objective=jensen_shannon teacher.beta=1
type teacher.objective teacher.objective=kl
no_effect teacher.beta teacher.beta=0.2 | teacher.objective
no_effect teacher.top_of {WHOLE} teacher.top_of=teacher | teacher.top_k
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, "hardware=cpu", *WITH) == [mistake]


def test_it_asks_for_its_models():
    assert named("hardware=cpu", "teacher=default") == [("teacher_models", "teacher.models")]


def test_teachers_are_named_models_of_their_own():
    assert taught().report.problems == []
    found = taught("teacher.models={math: /big, code: embedded}", hidden_size=256)
    assert found.report.problems == []
    assert [(model.name, model.key, model.path) for model in found.frozen] == [
        ("teacher math", "teacher.models.math", "/big"),
        ("teacher code", "teacher.models.code", "embedded"),
    ]
    assert [model.shape.hidden for model in found.frozen] == [256, 128]


def test_given_answers_need_answers():
    given = WHOLE, "teacher.given_fraction=0.5", "data.answer_key=null", "reward=none"
    problems = taught(*given).report.problems
    (problem,) = [problem for problem in problems if problem.id == "no_solutions"]
    assert problem.key == "data.solution_key"
    assert "teacher.given_fraction trains on" in problem.why
    assert not taught(*given[:2], "data.solution_key=answer").report.problems


def test_groups_are_not_asked_for_where_rewards_teach_nothing():
    assert taught("rollout.responses_per_prompt=1").report.problems == []
    alone = taught("rollout.responses_per_prompt=1", "teacher.reward_coef=1").report.problems
    assert [problem.id for problem in alone] == ["group_size"]


def test_its_layers_are_checked_as_the_policys_are():
    """Of a mixture in float32 that would be compiled."""
    changes = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2}
    found = taught("fsdp.compile=true", **changes).report.problems
    assert [problem.id for problem in found] == ["compiled_experts"]
    assert "teacher.models = /big" in found[0].why


def test_one_that_reads_too_little_is_refused():
    (problem,) = taught(max_position_embeddings=100).report.problems
    assert problem.id == "positions" and "teacher.models = /big" in problem.why


def test_the_plan_counts_weights_heads_and_states():
    """Weights in every phase, 4 bytes over 8 ranks; the head of 896 gathered in bfloat16."""
    found = taught("hardware=gpu", WHOLE, machine=GPU_NODE, policy=QWEN)
    phases = {p.name: p.parts for p in rank_phases(found.config, found.shape, 2**37, found.frozen)}
    shape = model_shape(QWEN)
    assert all(parts["teacher weights"] == shape.parameters // 2 for parts in phases.values())
    assert "logits" in phases["score teacher"] and "teacher AdamW" not in phases["update actor"]
    assert phases["update actor"]["teachers' heads"] == 2 * shape.vocab * 896
    rollout = found.config.rollout
    tokens = found.config.data.prompts_per_step * rollout.responses_per_prompt // 8
    states = host_parts(found.config, found.shape, found.frozen)["teachers' states"]
    assert states == 2 * 896 * tokens * rollout.max_response_tokens
    sampled = taught("hardware=gpu", machine=GPU_NODE, policy=QWEN)
    parts = {p.name: p.parts for p in rank_phases(sampled.config, shape, 2**37, sampled.frozen)}
    assert "teachers' heads" not in parts["update actor"]
