"""Tokens per second and MFU of a step, worked by hand for Qwen2.5-1.5B's shape; peaks by name."""

import pytest

from hybridrl.config.choices import DType
from hybridrl.config.planner.flops import peak_per_rank
from hybridrl.config.planner.machine import GPU
from hybridrl.trainer.timing.throughput import Throughput
from tests.support.model_shapes import QWEN_1_5B

# 512 sequences of 512 tokens: 6 N + 6 L h S = 6 * 1,543,714,304 + 6 * 28 * 1536 * 512
BATCH = {
    "batch/tokens": 512.0 * 512,
    "batch/computed_tokens": 512.0 * 512,
    "batch/attention_flops": 512.0 * 512 * 2 * 28 * 1536 * 512,
}
PER_TOKEN = 9_262_285_824 + 132_120_576


def test_mfu_by_hand():
    two_gpus = Throughput(QWEN_1_5B, epochs=2, peak=2 * 989e12)
    metrics = two_gpus.metrics(BATCH | {"time/old_log_probs_s": 0.5, "time/update_actor_s": 4.0})
    # Two passes of 262,144 tokens in 4 s: 131,072 tokens/s; forward: 524,288 a second.
    assert metrics["tokens_per_s/update_actor"] == 131_072
    assert metrics["tokens_per_s/old_log_probs"] == 524_288
    assert metrics["mfu/update_actor"] == pytest.approx(131_072 * PER_TOKEN / 1.978e15)
    assert metrics["mfu/old_log_probs"] == pytest.approx(524_288 * PER_TOKEN / 3 / 1.978e15)
    assert metrics["mfu/update_actor"] == pytest.approx(0.6225, abs=1e-4)


def test_tokens_that_are_shared_count_once():
    """Of 16 x (1024 + 256) tokens 1024 + 16 x 256: a query attends to all keys before it."""
    pairs = 1024 * 1024 / 2 + 16 * (1280**2 - 1024**2) / 2
    step = {
        "batch/tokens": 16.0 * 1280,
        "batch/computed_tokens": 1024.0 + 16 * 256,
        "batch/attention_flops": 28 * 4 * 1536 * pairs,
        "time/old_log_probs_s": 0.1,
        "time/update_actor_s": 0.3,
    }
    metrics = Throughput(QWEN_1_5B, epochs=1, peak=989e12).metrics(step)
    forward = 2 * 1_543_714_304 * 5120 + 28 * 4 * 1536 * pairs
    assert metrics["mfu/old_log_probs"] == pytest.approx(forward / 0.1 / 989e12)
    assert metrics["mfu/update_actor"] == pytest.approx(metrics["mfu/old_log_probs"])
    assert metrics["tokens_per_s/update_actor"] == pytest.approx(16 * 1280 / 0.3)


def test_without_a_peak_there_are_speeds_alone():
    metrics = Throughput(QWEN_1_5B, epochs=1, peak=None).metrics(
        BATCH | {"time/update_actor_s": 2.0}
    )
    assert metrics == {"tokens_per_s/update_actor": 131_072}


def test_critics_have_a_speed_and_no_mfu():
    step = BATCH | {"time/values_s": 1.0, "time/update_critic_s": 0.0}
    metrics = Throughput(QWEN_1_5B, 1, 1e15).metrics(step)
    assert metrics == {"tokens_per_s/values": 262_144}


def test_an_evaluation_has_no_batch():
    assert Throughput(QWEN_1_5B, 1, 1e15).metrics({"time/evaluate_s": 1.0}) == {}


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_by_the_names_that_nvidia_smi_prints(name, teraflops):
    found = peak_per_rank([GPU(name, 80 * 2**30)], DType.bfloat16)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_peak_of_a_run_needs_one_kind_of_gpu_and_bfloat16():
    h200, a100 = GPU("NVIDIA H200", 141 * 2**30), GPU("NVIDIA A100-SXM4-80GB", 80 * 2**30)
    assert peak_per_rank([h200, h200], DType.bfloat16) == 989e12
    assert peak_per_rank([h200, h200], DType.float32) is None
    assert peak_per_rank([h200, a100], DType.bfloat16) is None
    assert peak_per_rank([], DType.bfloat16) is None
