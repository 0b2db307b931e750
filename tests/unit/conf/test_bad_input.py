"""What bad input gets: one table of overrides and words, and properties over every key."""

import copy

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.app.data import examine_data
from hybridrl.config.choices import Accelerator
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.keys import leaves, similar_keys
from hybridrl.config.load import examine
from hybridrl.config.planner.machine import GIB, GPU, Machine, Node
from tests.support.composing import (
    FASTEST_SET,
    GPU_NODE,
    LAPTOP,
    TINY,
    Mistake,
    composed,
    examined,
    made,
    mistakes,
    named,
    only,
    problems,
)
from tests.support.model_shapes import QWEN_7B

# Heads whose size does not follow from the hidden size.
OWN_HEADS = TINY | {"head_dim": 32}
# On top of the recipe on a CPU.
MISTAKES = """
copy actor.fsdp ++actor.fsdp.dp_shard=4
copy critic.fsdp ++critic.fsdp.dp_replicate=1
copy ref.fsdp ++ref.fsdp=${actor.fsdp}
copy rollout.model ++rollout.model.path=x
copy actor.algorithm ++actor.algorithm.lam=0.5
mesh fsdp.dp_shard fsdp.dp_shard=3
copies fsdp.dp_replicate fsdp.dp_replicate=2
engine_ranks rollout.tensor_parallel_size cluster.gpus_per_node=2 rollout.tensor_parallel_size=4
mini_batch actor.mini_batch_size actor.mini_batch_size=100
mini_batch_ranks actor.mini_batch_size cluster.gpus_per_node=3 actor.mini_batch_size=256
prompts data.prompts_per_step cluster.gpus_per_node=4 data.prompts_per_step=2 \
    actor.mini_batch_size=16
slots cluster.gpus_per_node cluster.gpus_per_node=16 actor.mini_batch_size=512
nodes cluster.nodes cluster.nodes=2 cluster.gpus_per_node=2
cpu_cache rollout.kv_cache_mb rollout.kv_cache_mb=null
slot_memory cluster.gpus_per_node rollout.kv_cache_mb=40960
positions rollout.max_response_tokens rollout.max_response_tokens=200
data_file data.train_files data.train_files=/nowhere.jsonl
data_file data.eval_files data.eval_files=[/a.jsonl]
data_file data.train_files data.train_files=/tmp
data_paths data.train_files data.train_files=[]
missing data.train_files data=verl_parquet
type data.duplicates data.duplicates=remove
no_effect data.curriculum_steps data.curriculum_steps=5
no_effect data.solution_key data.solution_key=x
no_effect data.name data=embedded_mixture data.name=x
missing data.mixture.a.weight +data.mixture.a={name:embedded}
unknown_key data.mixture.one_step.wieght data=embedded_mixture +data.mixture.one_step.wieght=3
range trainer.total_steps trainer.total_steps=0
type trainer.total_steps trainer.total_steps=1.5
type trainer.total_steps trainer.total_steps=null
type actor.optim.lr actor.optim.lr=fast
range actor.optim.lr actor.optim.lr=nan
range reward.failed_score reward.failed_score=inf
type cluster.rendezvous_ports cluster.rendezvous_ports=[a,b]
rule_name eval.rules.greedy_right \
    +eval.rules.greedy_right={function:hybridrl.rewards.gsm8k.score,args:{mode:strict}}
rule_name eval.rules.reward \
    +eval.rules.reward={function:hybridrl.rewards.gsm8k.score,args:{mode:strict}}
unknown_key cluster.call_timeout_s +cluster.call_timeout_s=60
type cluster.nvlink_multicast cluster.nvlink_multicast=on
ports cluster.rendezvous_ports cluster.rendezvous_ports=[29500]
ports cluster.rendezvous_ports cluster.rendezvous_ports=[30000,29500]
range cluster.rendezvous_ports cluster.rendezvous_ports=[80,90]
betas actor.optim.betas actor.optim.betas=[0.9]
range actor.optim.betas actor.optim.betas=[0.9,1.0]
profile_steps trainer.profile_steps trainer.profile_steps=[3,31]
type trainer.profile_steps trainer.profile_steps=[a]
warm_up actor.optim.warmup_steps actor.optim.warmup_steps=30
type algorithm.kl.estimator algorithm.kl.estimator=k9
type fsdp.param_dtype fsdp.param_dtype=float16
range reward.timeout_s reward.timeout_s=1e18
range reward.num_processes reward.num_processes=100000
type run.dry run.dry=maybe
copy actor.temperature ++actor.temperature=0.5
unresolved seed seed=${nothing}
unresolved seed seed=${oc.env:NOT_SET}
unresolved trainer.total_steps trainer.total_steps=${trainer.total_steps}
unknown_key algoritm +algoritm=grpo
unknown_key recipie +recipie=gsm8k_ppo
data_file data.train_files data.train_files=http://a/b.jsonl
data_file data.train_files data.train_files=/dev/zero
resume_path resume resume='~nobody_of_this_name/x'
missing actor.epochs ~actor.epochs
unknown_key trainer.total_step +trainer.total_step=3
unknown_key actor.lr +actor.lr=1
unknown_key new.key +new.key=1
package_line recipe +recipe.trainer.total_steps=3
kl_no_gradient algorithm.kl.estimator algorithm.kl.placement=loss
kl_unused_gradient algorithm.kl.estimator algorithm.kl.estimator=k1_straight_through
kl_unused_gradient algorithm.kl.estimator algorithm.kl.estimator=k3_straight_through
kl_horizon algorithm.kl.horizon algorithm.kl.target=6 algorithm.kl.horizon=100
no_effect algorithm.kl.horizon algorithm.kl.horizon=3
no_effect algorithm.kl.estimator algorithm.kl.coef=0 algorithm.kl.estimator=k1_straight_through
no_effect ref.log_prob_chunk_tokens algorithm.kl.coef=0 ref.log_prob_chunk_tokens=8
no_effect rollout.gpu_memory_utilization rollout.gpu_memory_utilization=0.8
no_effect rollout.sleep rollout.sleep=none
no_effect model.seed model.seed=3 algorithm.advantage=grpo
no_effect fsdp.layout fsdp.layout=plain
no_effect fsdp.columns cluster.gpus_per_node=2 rollout.tensor_parallel_size=2 fsdp.layout=plain \
    fsdp.columns=[a]
copy fsdp.tensor_parallel_size cluster.gpus_per_node=2 ++fsdp.tensor_parallel_size=2
type fsdp.columns cluster.gpus_per_node=2 rollout.tensor_parallel_size=2 fsdp.columns=3
sequence_ranks fsdp.ulysses_size cluster.gpus_per_node=2 fsdp.ulysses_size=4 \
    actor.mini_batch_size=256
sequence_ranks fsdp.ulysses_size cluster.gpus_per_node=2 fsdp.dp_replicate=2 fsdp.ulysses_size=2
range fsdp.ulysses_size fsdp.ulysses_size=0
mini_batch_ranks actor.mini_batch_size cluster.gpus_per_node=6 fsdp.ulysses_size=2 \
    actor.mini_batch_size=256
no_effect actor.optim.warmup_steps trainer.critic_warmup_steps=5 actor.optim.warmup_steps=5
no_effect critic.optim.min_lr_ratio critic.optim.min_lr_ratio=0.1
no_effect actor.total_steps actor.total_steps=9
no_effect actor.max_response_tokens actor.max_response_tokens=9
package tracking.mlflow_uri tracking.mlflow_uri=http://x
import actor.worker actor.worker=nowhere.MyActor
no_path actor.worker actor.worker=MyActor
worker actor.worker actor.worker=json.JSONDecoder
worker actor.worker actor.worker=hybridrl.workers.critic.CriticWorker
no_such_name reward.function reward.function=json.nothing
arguments reward.function +reward.args.mood=good
text reward.args.mode reward.args.mode=lenient
text eval.rules.flexible.args.mode eval.rules.flexible.args.mode=3
text environment.args.mode environment=calculator environment.args.mode=x
no_such_name eval.rules.flexible.function eval.rules.flexible.function=json.x
section eval.rules.strict +eval.rules.strict=3
section actor.optim ++actor.optim=3
callback trainer.callbacks trainer.callbacks=[json.JSONDecoder]
"""
DIGITS = "9" * 400
LONG = f"""
range trainer.total_steps trainer.total_steps={DIGITS}
type actor.optim.lr actor.optim.lr={DIGITS}
type actor.optim.betas actor.optim.betas=[0.9,{DIGITS}]
data_file data.train_files data.train_files={"x" * 300}.jsonl
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES) + mistakes(LONG))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, "+recipe=gsm8k_ppo", "hardware=cpu") == [mistake]


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_straight_through", "k3_straight_through"])
def test_what_pulls_may_act_in_the_loss(estimator):
    placed = ["hardware=cpu", "algorithm.kl.placement=loss"]
    assert problems(*placed, f"algorithm.kl.estimator={estimator}") == []


def test_links_in_a_circle_are_named():
    found = named("hardware=cpu", "seed=${model.seed}")
    assert found == [("links", "model.seed, rollout.seed, seed")]


def test_all_mistakes_are_in_one_report():
    cases = [
        "trainer.total_steps=many",
        "actor.mini_batch_size=7",
        "++actor.fsdp.dp_shard=4",
        "rollout.tensor_parallel_size=3",
        "+actor.foo=1",
        "data.train_files=/nowhere.jsonl",
        "algorithm.kl.horizon=3",
    ]
    assert {*named("hardware=cpu", *cases)} >= {
        ("type", "trainer.total_steps"),
        ("mini_batch", "actor.mini_batch_size"),
        ("copy", "actor.fsdp"),
        ("engine_ranks", "rollout.tensor_parallel_size"),
        ("slices", "rollout.tensor_parallel_size"),
        ("unknown_key", "actor.foo"),
        ("data_file", "data.train_files"),
        ("no_effect", "algorithm.kl.horizon"),
    }


def test_all_mistakes_of_a_mixture_are_in_one_report():
    found = named(
        "hardware=cpu",
        "data=embedded_mixture",
        "data.mixture.one_step.weight=0",
        "data.mixture.two_steps.weight=nan",
        "data.mixture.three_steps.name=embedded/steps_1",
        "+data.mixture.nothing={weight: 1}",
        "+data.mixture.both={weight: 1, name: x, train_files: [setup.cfg], num_eval_problems: 0}",
        "+data.mixture.a-b={weight: 1, name: y}",
    )
    assert sorted(found) == [
        ("data_file", "data.mixture.both.train_files"),
        ("mixture_name", "data.mixture.a-b"),
        ("mixture_source", "data.mixture.both"),
        ("mixture_source", "data.mixture.nothing"),
        ("mixture_twice", "data.mixture.three_steps"),
        ("range", "data.mixture.both.num_eval_problems"),
        ("range", "data.mixture.one_step.weight"),
        ("range", "data.mixture.two_steps.weight"),
    ]


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "9" * 400])
def test_data_with_a_wrong_weight_is_not_looked_at(weight):
    result = examined(
        ["hardware=cpu", "data=embedded_mixture", f"data.mixture.one_step.weight={weight}"]
    )
    (problem,) = result.report.problems
    assert problem.key == "data.mixture.one_step.weight"
    assert examine_data(result) is None


def test_a_column_that_is_not_there_is_told_once():
    result = examined(["hardware=cpu", "data.prompt_key=nope"])
    examine_data(result)
    assert [str(p).splitlines()[0] for p in result.report.problems] == [
        "data.prompt_key = nope: embedded (from data.name) has no such column."
    ]


def test_any_key_may_be_garbage_without_hiding_the_others():
    """Whatever leaf is broken, the checks go on, name it, and still find another mistake."""
    cfg = composed(["hardware=cpu", "data.eval_files=/nowhere.jsonl"])
    tree = OmegaConf.to_container(cfg, resolve=False)
    text_keys = {"run.name", "hardware.reason", "data.name", "data.prompt_key", "data.answer_key"}
    text_keys |= {
        "data.system_prompt",
        "data.solution_key",
        "data.curriculum",
        "data.chosen_key",
        "data.rejected_key",
        "data.label_key",
        "data.images_key",
        "model.path",
    }
    for key in leaves(tree):
        broken = copy.deepcopy(cfg)
        OmegaConf.update(broken, key, "gar-bage", merge=False)
        result = examine(
            broken, machine=LAPTOP, read_model=lambda path: TINY, provenance=Provenance()
        )
        found = [*map(str, result.report.problems)]
        expected = "eval_files = gar-bage" if key == "data.eval_files" else "/nowhere.jsonl"
        assert any(expected in problem for problem in found), (key, found)
        if key not in text_keys:
            assert any(key in problem for problem in found), (key, found)


def test_any_section_may_be_missing_without_a_crash():
    cfg = composed(["hardware=cpu"])
    for section in cfg:
        broken = copy.deepcopy(cfg)
        with open_dict(broken):
            del broken[section]
        result = examine(
            broken, machine=LAPTOP, read_model=lambda path: TINY, provenance=Provenance()
        )
        assert any(section in str(problem) for problem in result.report.problems), section


def test_a_recipe_without_the_package_line_is_refused(tmp_path):
    """Hydra nests it under `recipe`, where it would change nothing."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# My licence\n# @package _global_\ntrainer:\n  total_steps: 3\n"
    )
    found = named("+recipe=mine", "hardware=cpu", config_dir=tmp_path)
    assert found == [("package_line", "recipe")]


def test_a_recipe_that_copies_the_sharding_spec_is_refused(tmp_path):
    """Even with the same value: later changes to fsdp would not reach the role."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nactor:\n  fsdp:\n    dp_replicate: 1\n"
    )
    found = named("+recipe=mine", "hardware=cpu", config_dir=tmp_path)
    assert found == [("copy", "actor.fsdp")]


def test_a_critic_that_is_not_there_has_no_warm_up_too_long(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ntrainer: {total_steps: 20, critic_warmup_steps: 15}\n"
        "critic: {optim: {warmup_steps: 15}}\n"
    )
    shorter = ["+recipe=mine", "hardware=cpu", "trainer.total_steps=10"]
    assert len(problems(*shorter, "algorithm=ppo", config_dir=tmp_path)) == 2
    assert problems(*shorter, "algorithm=grpo", config_dir=tmp_path) == []


def test_switching_off_what_a_recipe_sets_is_no_mistake(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nalgorithm:\n  kl:\n    estimator: k3\n"
    )
    base = ["+recipe=mine", "hardware=cpu"]
    assert problems(*base, "algorithm.kl.coef=0", config_dir=tmp_path) == []
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nalgorithm:\n  kl:\n    estimator: k3\n    coef: 0\n"
    )
    assert named(*base, config_dir=tmp_path) == [("no_effect", "algorithm.kl.estimator")]


def test_a_key_of_the_users_own_may_be_referred_to():
    assert problems("hardware=cpu", "+steps=4", "trainer.total_steps=${steps}") == []


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (4, ["14 attention heads"]),
        (3, ["14 attention heads", "2 KV heads", "intermediate size 4864", "151936"]),
        (2, []),
    ],
)
def test_tensor_parallel_sizes_of_qwen_0_5b(tp, words):
    """14 heads, 2 KV heads, 4864 = 2^8 * 19, 151936 = 64 * 2374: only 1 and 2 divide all."""
    key = "rollout.tensor_parallel_size"
    overrides = ["hardware=gpu", f"{key}={tp}", f"cluster.gpus_per_node={2 * tp}"]
    overrides += [f"actor.mini_batch_size={128 * tp}", "rollout.responses_per_prompt=12"]
    case = Mistake("slices", key, overrides, [*words, "one of 1, 2."])
    assert made(case, machine=GPU_NODE) == [case] * bool(words)


@pytest.mark.parametrize(
    ("size", "model", "words"),
    [
        (4, OWN_HEADS | {"num_attention_heads": 14}, ["14 attention heads"]),
        (4, OWN_HEADS | {"num_attention_heads": 12, "num_key_value_heads": 6}, ["6 KV heads"]),
        (2, TINY, []),
        # fewer KV heads than ranks
        (4, TINY, []),
    ],
)
def test_ranks_that_share_sequences_have_equally_many_heads(size, model, words):
    """TINY has 4 heads and 2 KV heads."""
    overrides = ["cluster.gpus_per_node=4", f"fsdp.ulysses_size={size}"]
    case = Mistake("sequence_heads", "fsdp.ulysses_size", overrides, [*words, "to one of 1, 2."])
    found = made(case, "+recipe=gsm8k_ppo", "hardware=cpu", model=model)
    assert found == [case] * bool(words)


def test_a_mini_batch_divides_over_groups_that_share_sequences():
    """A mini-batch of 2 for 4 ranks: refused, unless two of them share each sequence."""
    args = ["+recipe=gsm8k_ppo", "hardware=cpu", "cluster.gpus_per_node=4"]
    args += ["actor.mini_batch_size=2"]
    assert named(*args)[0] == ("mini_batch_ranks", "actor.mini_batch_size")
    assert problems(*args, "fsdp.ulysses_size=2") == []


def test_kv_heads_may_be_divided_or_divide():
    """8 heads and 2 KV heads: tp 4 replicates each KV head on two ranks."""
    model = TINY | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    args = ["hardware=cpu", "cluster.gpus_per_node=4", "rollout.tensor_parallel_size=4"]
    assert problems(*args, model=model) == []


LONG_ROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 100,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}


@pytest.mark.parametrize(
    ("changes", "id_", "words"),
    [
        ({"num_hidden_layers": 10**9}, "model_sizes", "1000000000, expected at most 1024"),
        ({"model_type": "bloom"}, "family", "llama, qwen2, qwen3"),
        ({"quantization_config": {"bits": 4}}, "quantized", ""),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized", "save_original_format"),
        ({"model_type": "gemma2"}, "family", "softcap"),
        ({"final_logit_softcapping": 30.0}, "family", "logits are biased, or no multiple"),
        ({"attn_logit_softcapping": 50.0}, "model_setting", "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "model_setting", "bidirectional_attention = true"),
        ({"rope_scaling": {"type": "dynamic"}}, "model_setting", "rope_type = dynamic"),
        ({"partial_rotary_factor": 0.5}, "model_setting", "rotary_factor = 0.5, expected 1"),
        ({"hidden_act": "gelu"}, "model_setting", "hidden_act = gelu, expected silu"),
        ({"model_type": "qwen3", "attention_bias": True}, "model_setting", "o_proj"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "model_setting",
            "max_window_layers = 1, expected 0 or",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "model_setting",
            "rope_type = dynamic",
        ),
        (
            {"rope_scaling": LONG_ROPE},
            "positions",
            "a sum of at most 100",
        ),
    ],
)
def test_what_the_numerics_do_not_support_is_refused_by_name(changes, id_, words):
    (problem,) = examined(["hardware=cpu"], model=TINY | changes).report.problems
    assert problem.id == id_ and words in str(problem)


def test_a_cache_that_holds_no_sequence_is_refused():
    longest = ["rollout.max_prompt_tokens=192", "rollout.max_response_tokens=900"]
    case = Mistake("cache", "rollout.kv_cache_mb", ["rollout.kv_cache_mb=1"], ["1,092 tokens"])
    found = made(case, "hardware=cpu", *longest, model=TINY | {"max_position_embeddings": 2048})
    assert found == [case]


def test_gpus_are_counted_per_node():
    two = Machine(tuple(Node(n, 32, 512 * GIB, (GPU("H", 80 * GIB),) * 4) for n in "ab"))
    args = ["hardware=gpu", "cluster.nodes=2"]
    assert examined(args, machine=two).config.fsdp.dp_shard == 8
    case = Mistake("slots", "cluster.gpus_per_node", ["cluster.gpus_per_node=8"], ["at most 4"])
    assert made(case, *args, machine=two) == [case]


def test_the_variable_that_hides_gpus_is_named(monkeypatch):
    one = Machine((Node("a", 32, 512 * GIB, (GPU("H", 80 * GIB),) * 2),))
    args = ["hardware=gpu", "cluster.gpus_per_node=4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problem = only(*args, machine=one)
    assert problem.id == "slots" and "CUDA_VISIBLE_DEVICES" not in str(problem)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "CUDA_VISIBLE_DEVICES=0,1 shows no more" in str(only(*args, machine=one))


def test_hardware_gpu_without_gpus_is_refused_but_can_be_planned(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problem = only("hardware=gpu")
    assert (problem.id, problem.value) == ("no_gpu", "gpu")
    assert problem.why == "this machine has no NVIDIA GPU, 2 cores, 32 GiB RAM"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    problem = only("hardware=gpu")
    assert problem.why.endswith("RAM; CUDA_VISIBLE_DEVICES=7 shows no more")
    assert problem.remedy.startswith("Set hardware=cpu")
    assert problems("hardware=gpu", "run.dry=true", "cluster.gpus_per_node=8") == []


def test_a_model_too_large_for_the_gpus_is_refused():
    """7B: actor and critic alone have 24 bytes a parameter in every phase, 170 GiB."""
    args = ["hardware=gpu", "cluster.gpus_per_node=1", *FASTEST_SET]
    problem = only(*args, machine=GPU_NODE, model=QWEN_7B)
    assert problem.id == "gpu_memory" and "update actor needs" in problem.why
    advised = problem.remedy.rpartition("Set ")[2].partition(": ")[0].split()
    assert "fsdp.offload=idle_all" in advised
    assert problems(*args, *advised, machine=GPU_NODE, model=QWEN_7B) == []
    assert problems(*args[:2], machine=GPU_NODE, model=QWEN_7B) == []  # they are chosen
    assert problems("hardware=gpu", machine=GPU_NODE, model=QWEN_7B) == []


def test_roles_share_the_nodes_and_nulls_are_resolved():
    config = examined(["hardware=cpu", "cluster.gpus_per_node=4", "fsdp.dp_replicate=2"]).config
    assert config.actor.fsdp is config.critic.fsdp is config.ref.fsdp is config.fsdp
    assert config.actor.algorithm is config.algorithm
    assert config.rollout.model is config.model
    assert (config.fsdp.dp_replicate, config.fsdp.dp_shard) == (2, 2)
    assert config.hardware.accelerator is Accelerator.cpu
    assert config.reward.num_processes == 2  # one per core of the laptop


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 1e-3),
        (["fsdp.param_dtype=bfloat16"], 0.1),
        (["rollout.dtype=bfloat16"], 0.1),
        (["trainer.max_log_prob_diff=0.5"], 0.5),
        (["hardware=gpu"], 0.1),
    ],
)
def test_the_limit_of_log_probs_is_that_of_their_dtypes(overrides, limit):
    machine = GPU_NODE if "hardware=gpu" in overrides else LAPTOP
    hardware = [] if "hardware=gpu" in overrides else ["hardware=cpu"]
    found = examined([*hardware, *overrides], machine=machine)
    assert found.report.problems == []
    assert found.config.trainer.max_log_prob_diff == limit


def test_an_extended_worker_brings_its_own_keys(tmp_path, monkeypatch):
    """A subclass's keys are read, its typos refused, and its own checks reported."""
    (tmp_path / "my_package.py").write_text(
        "from dataclasses import dataclass\n"
        "from hybridrl.config.schema import ActorConfig\n"
        "from hybridrl.workers.base import Worker\n"
        "@dataclass(kw_only=True)\n"
        "class MyConfig(ActorConfig):\n"
        "    bonus: float\n"
        "    power: int = 2\n"
        "    def __post_init__(self):\n"
        "        if self.bonus < 0: raise ValueError('bonus must not be negative')\n"
        "class MyActor(Worker):\n"
        "    config_class = MyConfig\n"
        "class NoConfig(Worker):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = ["hardware=cpu", "actor.worker=my_package.MyActor"]
    config = examined([*base, "+actor.bonus=0.5"]).config
    assert (config.actor.bonus, config.actor.power) == (0.5, 2)
    assert type(config.actor).__name__ == "MyConfig"
    assert named(*base) == [("missing", "actor.bonus")]
    case = Mistake("unknown_key", "actor.powr", ["+actor.powr=3"], ["actor.power"])
    assert made(case, *base, "+actor.bonus=0.5") == [case]
    assert named(*base, "+actor.bonus=-1") == [("own_check", "actor")]
    found = named("hardware=cpu", "actor.worker=my_package.NoConfig")
    assert found == [("config_class", "actor.worker")]


def test_a_module_that_fails_to_import_is_a_problem_not_a_crash(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import json\nraise RuntimeError('half written')\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = only("hardware=cpu", "reward.function=broken_module.f")
    assert problem.id == "import" and "RuntimeError: half written" in problem.why


def test_similar_keys_are_found_across_sections():
    known = ["actor.optim.lr", "critic.optim.lr", "trainer.total_steps", "seed"]
    assert similar_keys("trainer.totalsteps", known)[0] == "trainer.total_steps"
    assert similar_keys("actor.lr", known) == ["actor.optim.lr", "critic.optim.lr"]
    assert similar_keys("xyzzy", known) == []


def test_examine_leaves_the_composed_config_as_it_was():
    """Sweeps compose each job anew, but callers may keep theirs."""
    cfg = composed(["hardware=cpu"])
    before = OmegaConf.to_yaml(cfg)
    examine(cfg, machine=LAPTOP, read_model=lambda path: TINY, provenance=Provenance())
    assert isinstance(cfg, DictConfig) and OmegaConf.to_yaml(cfg) == before
