"""Starting vLLM: graph sizes, what a GPU engine is asked for, and the times of a start's parts."""

import time
from itertools import pairwise
from pathlib import Path

import pytest

from hybridrl.config.choices import SleepMode
from hybridrl.rollout.start import StartTimes, engine_options, graph_sizes, prompt_graph_sizes
from tests.support.role_configs import rollout_config

pytestmark = pytest.mark.full


def config(**changes):
    values = {"gpu_memory_utilization": 0.5, "kv_cache_mb": None, "max_num_seqs": 24}
    return rollout_config(Path("model"), **(values | changes))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (9, [1, 2, 4, 8, 9]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (130, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 130]),
    ],
)
def test_graph_sizes_by_hand(max_num_seqs, sizes):
    assert graph_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [2, 4, 8]), (256, [512, 1024, 2048]), (1000, [2000]), (2049, [])],
)
def test_sizes_of_steps_with_prompts_by_hand(max_num_seqs, sizes):
    assert prompt_graph_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize("max_num_seqs", [17, 256, 1000, 1024])
def test_graphs_reach_the_largest_batch_and_pad_it_little(max_num_seqs):
    """From 32 sequences on a batch is padded by less than a quarter, or by less than 64."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for low, high in pairwise(sizes):
        assert high - low <= max(8, min(64, low // 4))


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_sets_of_kept_tokens_are_asked_for_where_some_are_cut(top_p):
    options = engine_options(config(top_p=top_p), "cuda")
    assert options.get("return_sampling_mask", False) == (top_p < 1)
    assert options["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize("mode", SleepMode)
def test_sleeping_memory_is_asked_for_where_something_sleeps(mode):
    options = engine_options(config(sleep=mode), "cuda")
    assert options["enable_sleep_mode"] == (mode is not SleepMode.none)
    assert options["enable_prefix_caching"]
    assert options["max_model_len"] == 128
    sizes = [1, 2, 4, 8, 16, 24, 48, 96, 192]
    assert options["compilation_config"] == {"cudagraph_capture_sizes": sizes}


@pytest.mark.parametrize(("all_reduce", "passes"), [(None, None), ("1", None), ("0", False)])
def test_the_fused_all_reduce_is_vllms_choice_unless_flashinfers_is_off(
    all_reduce, passes, monkeypatch
):
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER", raising=False)
    if all_reduce is not None:
        monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", all_reduce)
    compilation = engine_options(config(tensor_parallel_size=2), "cuda")["compilation_config"]
    assert compilation.get("pass_config", {}).get("fuse_allreduce_rms") is passes


def test_without_a_gpu_the_cache_has_a_size_and_prompts_are_whole():
    options = engine_options(config(kv_cache_mb=3), "cpu")
    assert options["kv_cache_memory_bytes"] == 3 * 2**20
    assert options["enable_chunked_prefill"] is False
    assert "enable_sleep_mode" not in options


def test_parts_inside_parts_count_once():
    times = StartTimes()
    with times.part("outer"):
        time.sleep(0.02)
        with times.part("inner"):
            time.sleep(0.05)
    assert 0.02 <= times.seconds["outer"] < 0.05 <= times.seconds["inner"]
    assert str(times) == "0.1 s (outer 0.0, inner 0.1)"


def test_methods_are_counted():
    class Worker:
        def run(self):
            return "own"

    times = StartTimes()
    counted = times.part("run")(Worker.run)
    assert (counted(Worker()), list(times.seconds)) == ("own", ["run"])
