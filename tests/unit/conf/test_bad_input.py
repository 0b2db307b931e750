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
    composed,
    examined,
    problems,
)
from tests.support.model_shapes import QWEN_7B

# Heads whose size does not follow from the hidden size.
OWN_HEADS = TINY | {"head_dim": 32}
# Overrides on top of the recipe on a CPU -> words that the one problem must hold.
ONE_PROBLEM = [
    (["++actor.fsdp.dp_shard=4"], ["actor.fsdp is a copy", "dp_shard=4", "set fsdp.*"]),
    (["++critic.fsdp.dp_replicate=1"], ["critic.fsdp is a copy", "Remove critic.fsdp.*"]),
    (["++ref.fsdp=${actor.fsdp}"], ["ref.fsdp = ${actor.fsdp}", "${fsdp}"]),
    (["++rollout.model.path=x"], ["rollout.model is a copy", "path=x (shared: embedded)"]),
    (["++actor.algorithm.lam=0.5"], ["actor.algorithm is a copy", "lam=0.5", "algorithm.*"]),
    (["fsdp.dp_shard=3"], ["fsdp.dp_shard = 3", "1 rank", "dp_shard=null"]),
    (["fsdp.dp_replicate=2"], ["fsdp.dp_replicate = 2", "does not divide", "one of 1"]),
    (
        ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=4"],
        ["rollout.tensor_parallel_size = 4", "cluster.gpus_per_node = 2", "one of 1, 2"],
    ),
    (["actor.mini_batch_size=100"], ["actor.mini_batch_size = 100", "512 responses", "128, 256"]),
    (
        ["cluster.gpus_per_node=3", "actor.mini_batch_size=256"],
        ["actor.mini_batch_size = 256", "3 ranks", "multiple of 3"],
    ),
    (
        ["cluster.gpus_per_node=4", "data.prompts_per_step=2", "actor.mini_batch_size=16"],
        ["data.prompts_per_step = 2", "at least 4", "4 engines"],
    ),
    (["cluster.gpus_per_node=16", "actor.mini_batch_size=512"], ["at most 8", "2 cores"]),
    (["cluster.nodes=2", "cluster.gpus_per_node=2"], ["cluster.nodes = 2", "RAY_ADDRESS"]),
    (["rollout.kv_cache_mb=null"], ["rollout.kv_cache_mb = null", "Set rollout.kv_cache_mb=64"]),
    (["rollout.kv_cache_mb=40960"], ["RAM", "32.0 GiB", "KV cache 40.0 GiB"]),
    (["rollout.max_response_tokens=200"], ["392 tokens", "at most 256"]),
    (["data.train_files=/nowhere.jsonl"], ["data.train_files = /nowhere.jsonl", "no such file"]),
    (["data.eval_files=[/a.jsonl]"], ["data.eval_files = /a.jsonl", "no such file"]),
    (["data.train_files=/tmp"], ["data.train_files = /tmp is a folder"]),
    (["data.train_files=[]"], ["data.train_files = []", "list of paths"]),
    (["data=verl_parquet"], ["data.train_files is missing", "Set data.train_files="]),
    (["data.duplicates=remove"], ["data.duplicates = remove", "keep, drop"]),
    (["data.curriculum_steps=5"], ["data.curriculum_steps", "no effect", "curriculum = null"]),
    (["data.solution_key=x"], ["data.solution_key", "no effect", "data.few_shot = 0"]),
    (["data=embedded_mixture", "data.name=x"], ["data.name", "no effect", "data.mixture"]),
    (["+data.mixture.a={name: embedded}"], ["data.mixture.a.weight is missing"]),
    (
        ["data=embedded_mixture", "+data.mixture.one_step.wieght=3"],
        ["data.mixture.one_step.wieght = 3: unknown key", "mean data.mixture.one_step.weight"],
    ),
    (["trainer.total_steps=0"], ["trainer.total_steps = 0", "at least 1"]),
    (["trainer.total_steps=1.5"], ["trainer.total_steps = 1.5", "an integer"]),
    (["trainer.total_steps=null"], ["trainer.total_steps = null", "an integer"]),
    (["actor.optim.lr=fast"], ["actor.optim.lr = fast", "a number"]),
    (["actor.optim.lr=nan"], ["actor.optim.lr = nan", "above 0"]),
    (["reward.failed_score=inf"], ["reward.failed_score = inf", "infinite"]),
    (["cluster.rendezvous_ports=[a,b]"], ["cluster.rendezvous_ports", "a list such as [3, 4]"]),
    (
        ["+eval.rules.greedy_right={function: hybridrl.rewards.gsm8k.score, args: {mode: strict}}"],
        ["eval.rules.greedy_right", "does not begin with greedy"],
    ),
    (
        ["+eval.rules.reward={function: hybridrl.rewards.gsm8k.score, args: {mode: strict}}"],
        ["eval.rules.reward", "is not reward"],
    ),
    (["+cluster.call_timeout_s=60"], ["cluster.call_timeout_s = 60", "cluster.stall_timeout_s"]),
    (["cluster.nvlink_multicast=on"], ["cluster.nvlink_multicast = on", "one of auto, off"]),
    (["cluster.rendezvous_ports=[29500]"], ["rendezvous_ports = [29500]", "first and the last"]),
    (["cluster.rendezvous_ports=[30000,29500]"], ["rendezvous_ports", "first and the last"]),
    (["cluster.rendezvous_ports=[80,90]"], ["cluster.rendezvous_ports = [80, 90]", "1024"]),
    (["actor.optim.betas=[0.9]"], ["actor.optim.betas = [0.9]", "two numbers"]),
    (["actor.optim.betas=[0.9,1.0]"], ["actor.optim.betas = [0.9, 1.0]", "below 1"]),
    (
        ["trainer.profile_steps=[3,31]"],
        ["trainer.profile_steps = [3, 31]", "total_steps = 30", "no step 31"],
    ),
    (["trainer.profile_steps=[a]"], ["trainer.profile_steps"]),
    (["actor.optim.warmup_steps=30"], ["actor.optim.warmup_steps = 30", "total_steps = 30"]),
    (
        ["algorithm.kl.estimator=k9"],
        ["kl.estimator = k9", "one of k1, k2, k3, k1_straight_through, k3_straight_through"],
    ),
    (["fsdp.param_dtype=float16"], ["fsdp.param_dtype = float16", "float32, bfloat16"]),
    ([f"trainer.total_steps={'9' * 400}"], ["trainer.total_steps = 999", "at most 2.8"]),
    ([f"actor.optim.lr={'9' * 400}"], ["actor.optim.lr = 999", "(400 characters)", "a number"]),
    ([f"actor.optim.betas=[0.9,{'9' * 400}]"], ["actor.optim.betas = [0.9, 999", "a list"]),
    (["reward.timeout_s=1e18"], ["reward.timeout_s = 1e+18", "3 weeks"]),
    (["reward.num_processes=100000"], ["reward.num_processes = 100000", "at most 4096"]),
    (["run.dry=maybe"], ["run.dry = maybe", "true or false"]),
    (["actor.temperature=0.5"], ["actor.temperature = 0.5", "rollout.temperature = 1.0"]),
    (["seed=${nothing}"], ["seed = ${nothing} cannot be resolved"]),
    (["seed=${oc.env:NOT_SET}"], ["seed = ${oc.env:NOT_SET}", ": Environment variable 'NOT_SET'"]),
    (
        ["trainer.total_steps=${trainer.total_steps}"],
        ["trainer.total_steps = ${trainer.total_steps} cannot be resolved", "Recursive"],
    ),
    (["+algoritm=grpo"], ["algoritm = grpo: unknown key", "Did you mean algorithm?"]),
    (["+recipie=gsm8k_ppo"], ["recipie = gsm8k_ppo: unknown key", "Did you mean recipe?"]),
    (["data.train_files=http://a/b.jsonl"], ["data.train_files = http://a/b.jsonl", "Download"]),
    (["data.train_files=/dev/zero"], ["data.train_files = /dev/zero", "a device or a pipe"]),
    ([f"data.train_files={'x' * 300}.jsonl"], ["data.train_files = xxx", "File name too long"]),
    (["resume='~nobody_of_this_name/x'"], ["resume = ~nobody_of_this_name/x", "no such folder"]),
    (["~actor.epochs"], ["actor.epochs is missing"]),
    (["+trainer.total_step=3"], ["trainer.total_step = 3", "Did you mean trainer.total_steps"]),
    (["+actor.lr=1"], ["actor.lr = 1: unknown key", "actor.optim.lr"]),
    (["+new.key=1"], ["new.key = 1: unknown key"]),
    (["+recipe.trainer.total_steps=3"], ["# @package _global_", "first line"]),
    (
        ["algorithm.kl.placement=loss"],
        ["algorithm.kl.estimator = k1", "gradient of 0", "k2", "k1_straight_through"],
    ),
    (
        ["algorithm.kl.estimator=k1_straight_through"],
        [
            "= k1_straight_through with algorithm.kl.placement = reward",
            "Set algorithm.kl.estimator=k1, or algorithm.kl.placement=loss.",
        ],
    ),
    (
        ["algorithm.kl.estimator=k3_straight_through"],
        [
            "= k3_straight_through with algorithm.kl.placement = reward",
            "Set algorithm.kl.estimator=k3, or algorithm.kl.placement=loss.",
        ],
    ),
    (
        ["algorithm.kl.target=6", "algorithm.kl.horizon=100"],
        ["algorithm.kl.horizon = 100", "512 responses", "at least 103"],
    ),
    (["algorithm.kl.horizon=3"], ["algorithm.kl.horizon", "no effect", "target = null"]),
    (
        ["algorithm.kl.coef=0", "algorithm.kl.estimator=k1_straight_through"],
        ["algorithm.kl.estimator", "no effect", "coef = 0"],
    ),
    (["algorithm.kl.coef=0", "ref.log_prob_chunk_tokens=8"], ["ref.log_prob_chunk_tokens"]),
    (["rollout.gpu_memory_utilization=0.8"], ["gpu_memory_utilization", "kv_cache_mb"]),
    (["rollout.sleep=none"], ["rollout.sleep", "no effect", "cannot free memory"]),
    (
        ["model.seed=3", "algorithm.advantage=grpo"],
        ["model.seed", "no effect", "set model.init=random"],
    ),
    (["fsdp.layout=plain"], ["fsdp.layout", "no effect", "tensor_parallel_size = 1"]),
    (
        [
            "cluster.gpus_per_node=2",
            "rollout.tensor_parallel_size=2",
            "fsdp.layout=plain",
            "fsdp.columns=[a]",
        ],
        ["fsdp.columns", "no effect", "fsdp.layout = plain"],
    ),
    (
        ["cluster.gpus_per_node=2", "fsdp.tensor_parallel_size=2"],
        ["fsdp.tensor_parallel_size = 2", "set rollout.tensor_parallel_size", "parallel_size = 1"],
    ),
    (
        ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2", "fsdp.columns=3"],
        ["fsdp.columns = 3", "a list such as [a, b] or null"],
    ),
    (
        ["cluster.gpus_per_node=2", "fsdp.ulysses_size=4", "actor.mini_batch_size=256"],
        ["fsdp.ulysses_size = 4", "fsdp.dp_shard = 2", "one of 1, 2"],
    ),
    (
        ["cluster.gpus_per_node=2", "fsdp.dp_replicate=2", "fsdp.ulysses_size=2"],
        ["fsdp.ulysses_size = 2", "fsdp.dp_shard = 1", "one copy of the weights"],
    ),
    (["fsdp.ulysses_size=0"], ["fsdp.ulysses_size = 0", "at least 1"]),
    (
        ["cluster.gpus_per_node=6", "fsdp.ulysses_size=2", "actor.mini_batch_size=256"],
        ["256 does not divide over 3 groups of fsdp.ulysses_size = 2", "multiple of 3"],
    ),
    (
        ["trainer.critic_warmup_steps=5", "actor.optim.warmup_steps=5"],
        ["actor.optim.warmup_steps", "no effect", "critic_warmup_steps = 5, steps in which"],
    ),
    (["critic.optim.min_lr_ratio=0.1"], ["critic.optim.min_lr_ratio", "schedule = constant"]),
    (["actor.total_steps=9"], ["actor.total_steps", "no effect", "schedule = constant"]),
    (["actor.max_response_tokens=9"], ["no effect", "set algorithm.aggregation=sequence_sum"]),
    (["tracking.mlflow_uri=http://x"], ["tracking.mlflow_uri", "pip install mlflow"]),
    (["actor.worker=nowhere.MyActor"], ["actor.worker = nowhere.MyActor", "importing nowhere"]),
    (["actor.worker=MyActor"], ["actor.worker = MyActor", "dotted path"]),
    (["actor.worker=json.JSONDecoder"], ["actor.worker = json.JSONDecoder", "subclass of"]),
    (
        ["actor.worker=hybridrl.workers.critic.CriticWorker"],
        ["is the worker of critic", "Set actor.worker=hybridrl.workers.actor.ActorWorker"],
    ),
    (["reward.function=json.nothing"], ["reward.function = json.nothing", "has no nothing"]),
    (["+reward.args.mood=good"], ["reward.args", "mood"]),
    (["reward.args.mode=lenient"], ["reward.args.mode = lenient", "one of strict, flexible"]),
    (["eval.rules.flexible.args.mode=3"], ["eval.rules.flexible.args.mode = 3", "one of strict"]),
    (
        ["environment=calculator", "environment.args.mode=x"],
        ["environment.args.mode = x", "one of strict, flexible"],
    ),
    (["eval.rules.flexible.function=json.x"], ["eval.rules.flexible.function = json.x"]),
    (["+eval.rules.strict=3"], ["eval.rules.strict = 3", "section"]),
    (["++actor.optim=3"], ["actor.optim = 3", "section"]),
]


@pytest.mark.parametrize(
    ("overrides", "words"), ONE_PROBLEM, ids=[" ".join(case[0]) for case in ONE_PROBLEM]
)
def test_one_mistake_gets_one_problem_that_says_what_to_do(overrides, words):
    found = problems("+recipe=gsm8k_ppo", "hardware=cpu", *overrides)
    assert len(found) == 1, found
    missing = [word for word in words if word not in found[0]]
    assert not missing, (missing, found[0])


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_straight_through", "k3_straight_through"])
def test_what_pulls_may_act_in_the_loss(estimator):
    placed = ["hardware=cpu", "algorithm.kl.placement=loss"]
    assert problems(*placed, f"algorithm.kl.estimator={estimator}") == []


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
    found = "\n".join(problems("hardware=cpu", *cases))
    for words in (
        "trainer.total_steps = many",
        "actor.mini_batch_size = 7",
        "actor.fsdp is a copy",
        "rollout.tensor_parallel_size = 3 does not divide cluster.gpus_per_node",
        "4 attention heads",
        "actor.foo = 1",
        "/nowhere.jsonl",
        "algorithm.kl.horizon",
    ):
        assert words in found


def test_all_mistakes_of_a_mixture_are_in_one_report():
    found = problems(
        "hardware=cpu",
        "data=embedded_mixture",
        "data.mixture.one_step.weight=0",
        "data.mixture.two_steps.weight=nan",
        "data.mixture.three_steps.name=embedded/steps_1",
        "+data.mixture.nothing={weight: 1}",
        "+data.mixture.both={weight: 1, name: x, train_files: [setup.cfg], num_eval_problems: 0}",
        "+data.mixture.a-b={weight: 1, name: y}",
    )
    expected = [
        "data.mixture.one_step.weight = 0.0, expected above 0",
        "data.mixture.two_steps.weight = nan, expected above 0",
        "data.mixture.three_steps and data.mixture.one_step read the same training problems",
        "data.mixture.nothing has neither of name and train_files",
        "data.mixture.both has both of name and train_files",
        "data.mixture.both.train_files = setup.cfg, expected a file that ends in .jsonl",
        "data.mixture.both.num_eval_problems = 0, expected at least 1",
        "data.mixture.a-b: the name a-b is not allowed",
    ]
    assert len(found) == len(expected), found
    assert all(any(text in problem for problem in found) for text in expected), found


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "9" * 400])
def test_data_with_a_wrong_weight_is_not_looked_at(weight):
    result = examined(
        ["hardware=cpu", "data=embedded_mixture", f"data.mixture.one_step.weight={weight}"]
    )
    (found,) = result.report.problems
    assert "data.mixture.one_step.weight" in found
    assert examine_data(result) is None


def test_a_column_that_is_not_there_is_told_once():
    result = examined(["hardware=cpu", "data.prompt_key=nope"])
    examine_data(result)
    assert [p.splitlines()[0] for p in result.report.problems] == [
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
        "model.path",
    }
    for key in leaves(tree):
        broken = copy.deepcopy(cfg)
        OmegaConf.update(broken, key, "gar-bage", merge=False)
        result = examine(
            broken, machine=LAPTOP, read_model=lambda path: TINY, provenance=Provenance()
        )
        found = result.report.problems
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
        assert any(section in problem for problem in result.report.problems), section


def test_a_recipe_without_the_package_line_is_refused(tmp_path):
    """Hydra nests it under `recipe`, where it would change nothing."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# My licence\n# @package _global_\ntrainer:\n  total_steps: 3\n"
    )
    (found,) = problems("+recipe=mine", "hardware=cpu", config_dir=tmp_path)
    assert "# @package _global_" in found


def test_a_recipe_that_copies_the_sharding_spec_is_refused(tmp_path):
    """Even with the same value: later changes to fsdp would not reach the role."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nactor:\n  fsdp:\n    dp_replicate: 1\n"
    )
    (found,) = problems("+recipe=mine", "hardware=cpu", config_dir=tmp_path)
    assert "actor.fsdp is a copy of the shared fsdp: same values" in found


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
    (found,) = problems(*base, config_dir=tmp_path)
    assert "algorithm.kl.estimator is set but has no effect" in found


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
    found = problems(
        "hardware=gpu",
        f"rollout.tensor_parallel_size={tp}",
        f"cluster.gpus_per_node={2 * tp}",
        f"actor.mini_batch_size={128 * tp}",
        "rollout.responses_per_prompt=12",
        machine=GPU_NODE,
    )
    assert len(found) == bool(words)
    for word in words:
        assert word in found[0]
        assert "one of 1, 2." in found[0]


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
    found = problems("+recipe=gsm8k_ppo", "hardware=cpu", *overrides, model=model)
    assert len(found) == bool(words), found
    for word in words:
        assert f"fsdp.ulysses_size = {size}" in found[0]
        assert word in found[0]
        assert "to one of 1, 2." in found[0]


def test_a_mini_batch_divides_over_groups_that_share_sequences():
    """A mini-batch of 2 for 4 ranks: refused, unless two of them share each sequence."""
    args = ["+recipe=gsm8k_ppo", "hardware=cpu", "cluster.gpus_per_node=4"]
    args += ["actor.mini_batch_size=2"]
    assert "actor.mini_batch_size = 2" in problems(*args)[0]
    assert problems(*args, "fsdp.ulysses_size=2") == []


def test_kv_heads_may_be_divided_or_divide():
    """8 heads and 2 KV heads: tp 4 replicates each KV head on two ranks."""
    model = TINY | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    args = ["hardware=cpu", "cluster.gpus_per_node=4", "rollout.tensor_parallel_size=4"]
    assert problems(*args, model=model) == []


def test_other_architectures_and_quantized_models_are_refused():
    (found,) = problems("hardware=cpu", model=TINY | {"model_type": "bloom"})
    assert "bloom" in found and "llama, qwen2, qwen3" in found
    (found,) = problems("hardware=cpu", model=TINY | {"quantization_config": {"bits": 4}})
    assert "quantized" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, ["gemma2", "capped"]),
        ({"model_type": "gpt_oss"}, ["gpt_oss", "sinks"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention = True"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type = dynamic"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5, expected 1"]),
        ({"hidden_act": "gelu"}, ["hidden_act = gelu, expected silu"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias = True", "o_proj"]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            ["max_window_layers = 1, expected 0 or"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            ["rope_type = dynamic"],
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 100}},
            ["expected at most 100"],
        ),
    ],
)
def test_what_the_numerics_do_not_support_is_refused_by_name(changes, words):
    (found,) = problems("hardware=cpu", model=TINY | changes)
    assert all(word in found for word in words)


def test_a_cache_that_holds_no_sequence_is_refused():
    longest = ["rollout.max_prompt_tokens=192", "rollout.max_response_tokens=900"]
    overrides = ["hardware=cpu", "rollout.kv_cache_mb=1", *longest]
    (found,) = problems(*overrides, model=TINY | {"max_position_embeddings": 2048})
    assert "kv_cache_mb = 1, expected at least" in found and "1,092 tokens" in found


def test_gpus_are_counted_per_node():
    two = Machine(tuple(Node(n, 32, 512 * GIB, (GPU("H", 80 * GIB),) * 4) for n in "ab"))
    args = ["hardware=gpu", "cluster.nodes=2"]
    assert examined(args, machine=two).config.fsdp.dp_shard == 8
    (found,) = problems(*args, "cluster.gpus_per_node=8", machine=two)
    assert "cluster.gpus_per_node = 8, expected at most 4" in found


def test_the_variable_that_hides_gpus_is_named(monkeypatch):
    one = Machine((Node("a", 32, 512 * GIB, (GPU("H", 80 * GIB),) * 2),))
    args = ["hardware=gpu", "cluster.gpus_per_node=4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = problems(*args, machine=one)
    assert "CUDA_VISIBLE_DEVICES" not in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (found,) = problems(*args, machine=one)
    assert "CUDA_VISIBLE_DEVICES=0,1 shows no more" in found


def test_hardware_gpu_without_gpus_is_refused_but_can_be_planned(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = problems("hardware=gpu")
    assert "hardware = gpu, but this machine has no NVIDIA GPU, 2 cores, 32 GiB RAM.\n" in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    (found,) = problems("hardware=gpu")
    assert "RAM; CUDA_VISIBLE_DEVICES=7 shows no more.\nSet hardware=cpu" in found
    assert problems("hardware=gpu", "run.dry=true", "cluster.gpus_per_node=8") == []


def test_a_model_too_large_for_the_gpus_is_refused():
    """7B: actor and critic alone have 24 bytes a parameter in every phase, 170 GiB."""
    args = ["hardware=gpu", "cluster.gpus_per_node=1", *FASTEST_SET]
    (found,) = problems(*args, machine=GPU_NODE, model=QWEN_7B)
    assert "update actor needs" in found
    advised = found.rpartition("Set ")[2].partition(": ")[0].split()
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
    (found,) = problems(*base)
    assert "actor.bonus is missing" in found and "+actor.bonus=" in found
    (found,) = problems(*base, "+actor.bonus=0.5", "+actor.powr=3")
    assert "actor.powr = 3" in found and "actor.power" in found
    (found,) = problems(*base, "+actor.bonus=-1")
    assert "bonus must not be negative" in found
    (found,) = problems("hardware=cpu", "actor.worker=my_package.NoConfig")
    assert "config_class" in found


def test_a_module_that_fails_to_import_is_a_problem_not_a_crash(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import json\nraise RuntimeError('half written')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = problems("hardware=cpu", "reward.function=broken_module.f")
    assert "RuntimeError: half written" in found


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
