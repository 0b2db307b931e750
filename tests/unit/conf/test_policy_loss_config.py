"""algorithm.loss and what stands around it: every loss composes, and each mistake is named."""

import inspect

import pytest
import yaml

from hybridrl.config.policy_losses import BUILT_IN_LOSSES, policy_loss_of
from hybridrl.config.user_code.classes import locate
from tests.support.composing import REPO, examined, made, mistakes, problems

FOLDER = REPO / "conf" / "algorithm" / "loss"
LOSSES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
CPU = "hardware=cpu"
SUPERVISED = ("nll", "dpo", "ipo", "kto", "bradley_terry")


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_composes_and_passes_all_checks(name):
    # Some are refused in reinforcement learning (test_sft_config.py).
    recipe = ["+recipe=gsm8k_sft"] if name in SUPERVISED else []
    if name == "bradley_terry":  # that recipe has settings of the policy
        recipe = ["algorithm=bradley_terry", "rollout.responses_per_prompt=1"]
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


MISTAKES = """
no_path algorithm.loss.function algorithm.loss.function=gsop | ppo_clip, dual_clip | =<name>
loss_parameters algorithm.loss.function algorithm.loss.function=json.dumps \
    | parameters obj | Use only log_probs
no_such_name algorithm.loss.function algorithm.loss.function=json.nothing
loss_setting algorithm.loss.args.clip_hi +algorithm.loss.args.clip_hi=0.3 | Did you mean | clip_high
missing algorithm.loss.args.clip_high ~algorithm.loss.args.clip_high | algorithm/loss=
range algorithm.loss.args.clip_low algorithm.loss.args.clip_low=1.5 | at most 1
range algorithm.loss.args.clip_high algorithm.loss.args.clip_high=much
dual_clip algorithm.loss.args.max_ratio algorithm/loss=dual_clip algorithm.loss.args.max_ratio=1.1
clip_cov algorithm.loss.args.cov_low algorithm/loss=clip_cov algorithm.loss.args.cov_low=9 \
    | cov_high = 5
type algorithm.aggregation algorithm.aggregation=token | sequence_mean
no_effect algorithm.rollout_correction.high algorithm/loss=dppo_kl \
    algorithm.rollout_correction.high=5
no_effect algorithm.rollout_correction.low algorithm.rollout_correction.low=0.1 | method=mask
no_effect algorithm.rollout_correction.level algorithm.rollout_correction.method=none \
    algorithm.rollout_correction.level=sequence | method = none
ratios algorithm.rollout_correction.high algorithm.rollout_correction.high=0.9 | at least 1
ratios algorithm.rollout_correction.low algorithm.rollout_correction.method=mask \
    algorithm.rollout_correction.low=1 algorithm.rollout_correction.high=1 | less than 1
no_effect algorithm.overlong.penalty algorithm.overlong.penalty=2
overlong_buffer algorithm.overlong.buffer_tokens algorithm.overlong.buffer_tokens=49 \
    | at most | rollout.max_response_tokens = 48
lone_response algorithm.max_sampling_rounds algorithm.max_sampling_rounds=2 \
    rollout.responses_per_prompt=1 data.prompts_per_step=256 | responses_per_prompt = 1
range algorithm.max_sampling_rounds algorithm.max_sampling_rounds=0
copy actor.algorithm ++actor.algorithm.loss.function=gspo | set algorithm
unknown_key actor.clip_ratio +actor.clip_ratio=0.1
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, CPU) == [mistake]


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
