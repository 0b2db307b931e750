"""algorithm.loss and what stands around it: every loss composes, and each mistake is named."""

import inspect

import pytest
import yaml

from hybridrl.config.policy_losses import BUILT_IN_LOSSES, policy_loss_of
from hybridrl.config.user_code.classes import locate
from tests.support.composing import REPO, examined, problems

FOLDER = REPO / "conf" / "algorithm" / "loss"
LOSSES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
CPU = "hardware=cpu"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_composes_and_passes_all_checks(name):
    # nll is refused in reinforcement learning (test_sft_config.py).
    recipe = ["+recipe=gsm8k_sft"] if name == "nll" else []
    found = examined([CPU, *recipe, f"algorithm/loss={name}"])
    assert found.report.problems == []
    assert found.config.actor.algorithm is found.config.algorithm


def test_every_built_in_loss_has_a_file():
    trees = [yaml.safe_load(file.read_text()) for file in FOLDER.glob("*.yaml")]
    named = {tree.get("loss", tree)["function"] for tree in trees}
    assert named == set(BUILT_IN_LOSSES)


@pytest.mark.parametrize("name", BUILT_IN_LOSSES)
def test_the_list_agrees_with_the_functions(name):
    loss = BUILT_IN_LOSSES[name]
    parameters = inspect.signature(locate("test", loss.path)).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY) == loss.tensors
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(loss.settings)
    assert ("selected" in loss.tensors) == (loss.selection is not None)
    if loss.selection is not None:
        chosen = inspect.signature(locate("test", loss.selection)).parameters.values()
        keywords = {p.name for p in chosen if p.kind is p.KEYWORD_ONLY}
        assert keywords == set(loss.selection_settings)


LOSS = "algorithm.loss"
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{LOSS}.function=gsop"], [f"{LOSS}.function = gsop", "ppo_clip, dual_clip", "=<name>"]),
        (
            [f"{LOSS}.function=json.dumps"],
            ["json.dumps: it has unknown parameters obj", "Use only log_probs"],
        ),
        ([f"{LOSS}.function=json.nothing"], ["json has no nothing"]),
        ([f"+{LOSS}.args.clip_hi=0.3"], [f"{LOSS}.args.clip_hi", "Did you mean", "clip_high"]),
        (
            [f"~{LOSS}.args.clip_high"],
            [f"{LOSS}.args.clip_high", "algorithm/loss="],
        ),
        ([f"{LOSS}.args.clip_low=1.5"], [f"{LOSS}.args.clip_low = 1.5", "at most 1"]),
        ([f"{LOSS}.args.clip_high=much"], [f"{LOSS}.args.clip_high = much", "a number"]),
        (
            ["algorithm/loss=dual_clip", f"{LOSS}.args.max_ratio=1.1"],
            [f"{LOSS}.args.max_ratio = 1.1", "above 1 + clip_high"],
        ),
        (
            ["algorithm/loss=clip_cov", f"{LOSS}.args.cov_low=9"],
            [f"{LOSS}.args.cov_low = 9", "cov_high = 5"],
        ),
        (["algorithm.aggregation=token"], ["algorithm.aggregation = token", "sequence_mean"]),
        (
            ["algorithm/loss=dppo_kl", f"{CORRECTION}.high=5"],
            [f"{CORRECTION}.high: no effect", "dppo_kl"],
        ),
        ([f"{CORRECTION}.low=0.1"], [f"{CORRECTION}.low", "no effect", "method=mask"]),
        (
            [f"{CORRECTION}.method=none", f"{CORRECTION}.level=sequence"],
            [f"{CORRECTION}.level", "no effect", "method = none"],
        ),
        ([f"{CORRECTION}.high=0.9"], [f"{CORRECTION}.high = 0.9", "at least 1"]),
        (
            [f"{CORRECTION}.method=mask", f"{CORRECTION}.low=1", f"{CORRECTION}.high=1"],
            [f"{CORRECTION}.low = 1.0", "less than 1"],
        ),
        (["algorithm.overlong.penalty=2"], ["algorithm.overlong.penalty", "no effect"]),
        (
            ["algorithm.overlong.buffer_tokens=49"],
            [
                "algorithm.overlong.buffer_tokens = 49",
                "at most",
                "rollout.max_response_tokens = 48",
            ],
        ),
        (
            [
                "algorithm.max_sampling_rounds=2",
                "rollout.responses_per_prompt=1",
                "data.prompts_per_step=256",
            ],
            ["algorithm.max_sampling_rounds = 2", "responses_per_prompt = 1"],
        ),
        (["algorithm.max_sampling_rounds=0"], ["algorithm.max_sampling_rounds = 0", "at least 1"]),
        (["++actor.algorithm.loss.function=gspo"], ["actor.algorithm", "copy", "set algorithm"]),
        (["+actor.clip_ratio=0.1"], ["actor.clip_ratio", "unknown key"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_one_mistake_gets_one_problem(overrides, words):
    found = problems(CPU, *overrides)
    assert len(found) == 1, found
    missing = [word for word in words if word not in found[0]]
    assert not missing, (missing, found[0])


def test_a_function_of_ones_own_is_taken_with_its_settings(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "def mine(log_probs, advantages, response_mask, sequence_id, *, scale):\n"
        "    return -scale * advantages * log_probs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = [CPU, "algorithm.loss.function=my_losses.mine", "+algorithm.loss.args.scale=2"]
    assert problems(*given) == []
    assert len(problems(*given, "algorithm.loss.args.clip_low=0.1")) == 1
    loss = policy_loss_of("my_losses.mine")
    assert loss.tensors == ("log_probs", "advantages", "response_mask", "sequence_id")
    assert not loss.is_against_rollout
