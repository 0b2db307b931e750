"""`hybridrl plan` and the settings chosen for the GPUs' memory: sizes, times, choices, recipes."""

import math
import re
from pathlib import Path

import pytest

from hybridrl.commands.plan import make_plan, plan
from hybridrl.config.choices import SleepMode
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import load_resolved
from hybridrl.config.planner.fitting import ROOM, MemoryCase, remedy, savings
from hybridrl.config.planner.machine import GIB, GPU, Machine, Node, planned_machine
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.step_time import step_seconds
from hybridrl.models.known_shapes import KNOWN, OLMOE_1B_7B, QWEN2_5, QWEN3_30B_A3B
from hybridrl.trainer.tracking.provenance import plain
from tests.support.composing import FASTEST_SET, GPU_NODE, H200, LAPTOP, examined, named, only

# Of the models' pages on the hub.
PUBLISHED = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}
REPO = Path(__file__).resolve().parents[3]
SEVEN_B, ONE_B = "+recipe=qwen2_5_7b_grpo_8gpu", "+recipe=qwen2_5_1_5b_grpo_1gpu"


def on(count, gib):
    return planned_machine([count], GPU("GPUs", gib * GIB))


def planned(*overrides, count=8, gib=80):
    return make_plan(list(overrides), on(count, gib))


def chosen(made):
    return [str(change) for change in made.examined.chosen]


def test_known_models_have_their_published_sizes():
    found = {size: model_shape(config).parameters for size, config in QWEN2_5.items()}
    assert found == PUBLISHED
    assert KNOWN["Qwen/Qwen2.5-7B-Instruct"] == QWEN2_5["7B"]


def test_total_and_active_parameters_of_published_mixtures():
    """30.5 and 3.3 billion of Qwen3-30B-A3B, 6.9 and 1.3 of OLMoE-1B-7B, by their pages."""
    for config, total, active in ((QWEN3_30B_A3B, 30.5, 3.3), (OLMOE_1B_7B, 6.9, 1.3)):
        shape = model_shape(config)
        assert shape.parameters / 1e9 == pytest.approx(total, abs=0.06)
        assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    ("gpus", "vocab", "prompts", "tokens", "measured"),
    [
        (4, 151936, 256, 512, {"rollout": 3.904, "old log-probs": 0.922, "update actor": 2.655}),
        (2, 49152, 128, 256, {"rollout": 1.979, "old log-probs": 0.496, "update actor": 1.41}),
    ],
)
def test_the_estimate_is_near_the_steps_that_were_measured(gpus, vocab, prompts, tokens, measured):
    """benchmarks/RESULTS.md, "A whole step of GRPO", whose prompts have about 96 tokens."""
    machine = Machine((Node("node", 64, 512 * GIB, gpus=(H200,) * gpus),))
    overrides = [
        *("hardware=gpu", "algorithm=grpo", "algorithm.kl.coef=0", *FASTEST_SET),
        "fsdp.share_prefixes=false",
        *("rollout.tensor_parallel_size=2", "rollout.responses_per_prompt=4"),
        *("rollout.max_prompt_tokens=96", f"rollout.max_response_tokens={tokens}"),
        *(f"data.prompts_per_step={prompts}", f"actor.mini_batch_size={4 * prompts}"),
    ]
    model = QWEN2_5["1.5B"] | {"vocab_size": vocab}
    found = examined(overrides, machine=machine, model=model)
    parts = step_seconds(found.config, found.shape, (), H200)
    for name, seconds in measured.items():
        assert parts[name] == pytest.approx(seconds, rel=0.15), name
    assert sum(parts.values()) == pytest.approx(7.875 if gpus == 4 else 4.12, rel=0.15)


def test_seven_b_on_eight_gpus_fits_with_what_is_chosen():
    made = planned(SEVEN_B)
    assert made.case.fits(ROOM)
    assert 50 < made.case.peak() / GIB < 80 * ROOM
    assert chosen(made) == [
        *("fsdp.accumulation=sharded", "rollout.sleep=all", "actor.max_tokens_per_gpu=8192")
    ]
    assert 30 < made.case.seconds() < 90
    for alone in chosen(made):
        assert not planned(SEVEN_B, *FASTEST_SET, alone).case.fits()


def test_one_and_a_half_b_on_one_gpu_leaves_the_allocator_room():
    made = planned(ONE_B, count=1)
    settings = ["rollout.sleep=kv_cache", "actor.max_tokens_per_gpu=8192"]
    assert chosen(made) == settings and made.case.fits(ROOM)
    assert 55 < made.case.peak() / GIB < 80 * ROOM
    assert 25 < made.case.seconds() < 75
    reason = made.examined.config.hardware.reason
    assert f"chosen for its memory: {' '.join(settings)}" in reason


def test_the_page_of_the_first_recipe_has_the_planned_memory():
    page = (REPO / "recipes" / "gsm8k_ppo" / "README.md").read_text()
    for recipe in ("gsm8k_ppo", "gsm8k_grpo"):
        peak = planned(f"+recipe={recipe}", count=1).case.peak() / GIB
        assert f" {peak:.1f} GiB" in page


def test_a_kv_cache_that_is_kept_does_not_sleep():
    """The same run sleeps otherwise, as the test above shows."""
    keep_kv = ["rollout.schedule=partial", "rollout.keep_kv=true"]
    made = planned(ONE_B, *keep_kv, count=1)
    assert made.examined.config.rollout.sleep is SleepMode.none and made.case.fits(ROOM)
    with pytest.raises(ConfigError, match=r"rollout\.sleep = all frees the KV cache"):
        planned(ONE_B, *keep_kv, "rollout.sleep=all", count=1)


def test_seven_b_does_not_fit_small_gpus_and_the_advice_is_right():
    made = planned(SEVEN_B, gib=24)
    assert not made.case.fits()
    found = remedy(made.case)
    settings = [str(change) for change in found]
    assert settings[0] == "cluster.nodes=2" and "fsdp.offload=idle_all" in settings
    two_nodes = planned_machine([8, 8], GPU("GPUs", 24 * GIB))
    after = make_plan([SEVEN_B, *settings], two_nodes)
    assert after.case.fits(ROOM) and after.case.peak() == made.case.changed(found).peak()


@pytest.mark.parametrize(("model", "count", "gib"), [("7b", 8, 40), ("1_5b", 1, 40)])
def test_what_can_fit_does_and_a_second_look_chooses_the_same(model, count, gib):
    overrides = [f"model=qwen2_5_{model}", "algorithm=grpo"]
    made = planned(*overrides, count=count, gib=gib)
    assert made.examined.chosen and made.case.fits()
    assert all(change in made.examined.config.hardware.reason for change in chosen(made))
    assert chosen(planned(*overrides, count=count, gib=gib)) == chosen(made)
    assert not planned(*overrides, *FASTEST_SET, count=count, gib=gib).case.fits(ROOM)


def test_what_the_user_sets_stands():
    given = ["fsdp.accumulation=full", "fsdp.offload=none"]
    made = planned(SEVEN_B, *given)
    config = made.examined.config
    assert (config.fsdp.accumulation, config.fsdp.offload) == ("full", "none")
    assert made.case.fits() and not {"fsdp.accumulation", "fsdp.offload"} & {
        change.key for change in made.examined.chosen
    }


def test_chosen_values_are_saved_resolved():
    config = planned(SEVEN_B).examined.config
    again = load_resolved(plain(config))
    assert again.fsdp == config.fsdp and again.actor.fsdp.accumulation == "sharded"
    assert again.actor.max_tokens_per_gpu == 8192


def test_a_node_without_ranks_needs_no_memory():
    gpus = (GPU("GPUs", 80 * GIB),) * 8
    machine = Machine((Node("head", 4, 2 * GIB), Node("big", 64, 1024 * GIB, gpus)))
    made = make_plan([SEVEN_B], machine)
    assert made.case.fits(ROOM) and chosen(made) == chosen(planned(SEVEN_B))


@pytest.mark.parametrize(
    ("overrides", "machine"), [(["hardware=gpu"], GPU_NODE), (["hardware=cpu"], LAPTOP)]
)
def test_small_models_keep_the_fastest_settings(overrides, machine):
    found = examined(overrides, machine=machine)
    assert found.chosen == []
    fsdp = found.config.fsdp
    assert (fsdp.accumulation, fsdp.offload) == ("full", "none")
    assert fsdp.activation_checkpointing is False
    assert found.config.actor.max_tokens_per_gpu == (32768 if machine is GPU_NODE else 8192)


def test_the_memory_of_absent_gpus_counts_in_a_dry_run_alone():
    given = ["hardware=gpu", "cluster.gpus_per_node=8", "cluster.gpu_memory_gb=10", *FASTEST_SET]
    problem = only(*given, "run.dry=true")
    assert problem.id == "gpu_memory" and "the GPU has 10.0 GiB" in problem.why
    assert examined(given, machine=GPU_NODE).report.problems == []
    on_cpu = ["hardware=cpu", "run.dry=true", "cluster.gpu_memory_gb=80"]
    assert named(*on_cpu, "cluster.gpus_per_node=16") == [("slots", "cluster.gpus_per_node")]
    problem = only("hardware=cpu", "fsdp.offload=7")
    assert problem.id == "type" and "idle_all or null" in problem.expected
    planned_on_cpus = named("hardware=gpu", "run.dry=true")
    assert ("gpus_to_plan", "cluster.gpus_per_node") in planned_on_cpus


def test_a_supervised_step_is_its_update():
    found = examined(["+recipe=gsm8k_sft", "hardware=gpu"], machine=GPU_NODE)
    parts = step_seconds(found.config, found.shape, (), GPU_NODE.gpus[0])
    assert parts.keys() <= {"update actor", "exchange of weights and gradients", "other"}


def told(capsys, *arguments):
    """The exit code and output of the command."""
    with pytest.raises(SystemExit) as end:
        plan(list(arguments))
    return end.value.code, re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("same", ["cluster.gpus_per_node=8", "cluster.nodes=1"])
def test_sizes_may_be_given_twice_if_they_are_equal(empty_folder, capsys, same):
    assert told(capsys, SEVEN_B, "gpus=8x80GB", same)[0] == 0


def test_the_steps_of_epochs_are_not_guessed(empty_folder, capsys):
    """Here they are those of a recipe, which epochs replace; the data is not read."""
    said = told(capsys, SEVEN_B, "gpus=8xH100", "trainer.epochs=2")[1]
    assert "The steps of trainer.epochs depend on the data" in said
    assert not re.search(r"\d steps: ", said)


def test_the_command_says_what_fits_and_what_to_type(empty_folder, capsys):
    code, said = told(capsys, SEVEN_B, "gpus=8xH100")
    assert code == 0
    assert "It fits: at most 63.1 GiB (update actor) of a GPU's 80.0 GiB." in said
    assert re.search(r"Time of a step: \d+ s \+- 30%", said)
    switches = re.findall(r"([\w.]+=\w+) │ ([\d.]+) GiB │ ([\d.]+) s a step", said)
    cheapest_first = {name for name, _, _ in switches[:4]}
    assert cheapest_first == {*chosen(planned(SEVEN_B)), "rollout.sleep=kv_cache"}
    assert "fsdp.activation_checkpointing=true" in [name for name, _, _ in switches]
    rounded = [(float(seconds), float(saved)) for _, saved, seconds in switches]
    least = [(seconds - 0.05) / (saved + 0.05) for seconds, saved in rounded]
    most = [(seconds + 0.05) / (saved - 0.05) for seconds, saved in rounded]
    assert all(low <= high for low, high in zip(least, most[1:], strict=False)), rounded
    assert "hybridrl train +recipe=qwen2_5_7b_grpo_8gpu " in said
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "gpus", "more", "proposed"),
    [
        (SEVEN_B, "8xH100", [], True),
        (SEVEN_B, "8xH100", ["rollout.weights=fp8"], False),
        (SEVEN_B, "8xH100", ["rollout.exact=true"], False),
        (SEVEN_B, "8xA100", [], False),
        (ONE_B, "1xH100", [], False),
    ],
)
def test_fp8_weights_are_proposed_where_they_are_faster(
    empty_folder, capsys, recipe, gpus, more, proposed
):
    said = told(capsys, recipe, f"gpus={gpus}", *more)[1]
    now = re.search(r"Time of a step: (\d+) s", said)
    faster = re.search(r"rollout.weights=fp8 samples faster .* (\d+) s a step", said)
    assert (faster is not None) is proposed
    if faster is not None:
        assert int(faster[1]) < int(now[1])


def test_the_command_calls_settings_without_room_for_the_allocator_tight(empty_folder, capsys):
    settings = ["rollout.sleep=all", *FASTEST_SET[:3], "actor.max_tokens_per_gpu=16384"]
    for given, is_tight in (([], False), (settings, True)):
        code, said = told(capsys, ONE_B, "gpus=1xH100", *given)
        assert (code, "It is tight" in said) == (0, is_tight)


@pytest.mark.parametrize(("gpus", "sizes"), [(1, []), (4, [2, 4])])
def test_savings_have_no_engine_larger_than_the_node(gpus, sizes):
    case = planned(ONE_B, f"cluster.gpus_per_node={gpus}", count=gpus).case
    changes = [saving.change for saving in savings(case)]
    assert [c.value for c in changes if c.key == "rollout.tensor_parallel_size"] == sizes


def test_the_command_says_what_does_not_fit_and_what_does(empty_folder, capsys):
    code, said = told(capsys, "model=qwen2_5_7b", "gpus=1x24GB")
    assert code == 1
    assert "No settings make it fit on 1 GPU. On 16 GPUs it fits" in said
    assert "On these GPUs fit: algorithm=grpo model=qwen2_5_1_5b lora=default" in said
    assert "Time of a step: not estimated" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpus=8x80"], "gpus=8x80, expected GPUs and their memory: 8x80GB"),
        (["gpus=0x80GB"], "expected 1 to 1024 GPUs"),
        (["gpus=99999999x80GB"], "expected 1 to 1024 GPUs"),
        (["gpus=9x80GB"], "in whole nodes of 8"),
        (["gpus=8xRTX4090"], "8xH100 (or A100"),
        (["gpus=1x80GB", "modle=qwen2_5_7b"], "Did you mean model"),
        (["gpus=1x80GB", "hardware=cpu"], "no GPUs to plan for"),
        (["gpus=8x80GB", "cluster.nodes=3"], "cluster.nodes=3: gpus= has the nodes"),
        (["gpus=1x80GB", "rollout.kv_cache_mb=1", "model=qwen2_5_7b"], "expected at least"),
    ],
)
def test_nonsense_is_refused_with_what_is_expected(empty_folder, arguments, words):
    with pytest.raises(ConfigError) as refused:
        plan(arguments)
    assert words in refused.value.texts[0]


def gathers(*overrides, count=4, gib=141):
    """Whether a run of 1.5B frees gathered weights after forward, why, and its memory."""
    given = ["hardware=gpu", "algorithm=grpo", *FASTEST_SET, "rollout.sleep=all", *overrides]
    machine = on(count, gib)
    found = examined(given, machine=machine, model=QWEN2_5["1.5B"])
    assert found.report.problems == []
    case = MemoryCase(found.config, found.shape, (), machine)
    return found.config.fsdp.reshard_after_forward, found.config.hardware.reason, case


def test_weights_stay_gathered_where_they_leave_room_for_the_allocator():
    freed, reason, case = gathers()
    update = next(phase for phase in case.phases() if phase.name == "update actor")
    assert update.parts["gathered weights"] == pytest.approx(2 * PUBLISHED["1.5B"], rel=1e-3)
    most = case.peak() / GIB
    assert freed is False and f"fsdp.reshard_after_forward=false ({most:.1f} GiB at most)" in reason
    assert gathers(gib=math.ceil(most / ROOM))[0] is False
    freed, reason, smaller = gathers(gib=math.floor(most / ROOM))
    assert freed is True and "gather" not in reason
    assert smaller.fits(ROOM)  # without them


def test_micro_batches_are_larger_where_they_leave_room_for_the_allocator():
    most = planned("+recipe=gsm8k_grpo", count=1).case.peak() / GIB
    chosen_tokens = []
    for gib in (math.ceil(most / ROOM), math.floor(most / ROOM)):
        config = planned("+recipe=gsm8k_grpo", count=1, gib=gib).examined.config
        tokens = config.actor.max_tokens_per_gpu
        chosen_tokens.append(tokens)
        assert (f"max_tokens_per_gpu={tokens}" in config.hardware.reason) == (tokens == 32768)
    assert chosen_tokens == [32768, 16384]


def test_weights_of_one_shard_stay_gathered_too_and_what_is_set_stands():
    """FSDP2 casts and copies them for each micro-batch otherwise."""
    freed, reason, _ = gathers("fsdp.dp_replicate=4")
    assert freed is False and "chosen for its speed: fsdp.reshard_after_forward=false" in reason
    freed, reason, _ = gathers("fsdp.reshard_after_forward=true")
    assert freed is True and "gather" not in reason
