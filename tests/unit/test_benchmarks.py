"""What benchmarks compute and compare: lengths, the plan of memory, a sync's parts, aims."""

import json
from dataclasses import replace

import pytest

from benchmarks.grpo_step import aims, sync_ms
from benchmarks.shapes import QWEN2_5
from benchmarks.training import planned
from benchmarks.training_workload import Size, draw_lengths, run_config
from hybridrl.config.planner.machine import GIB
from hybridrl.config.planner.memory import GPU_PROCESS_BYTES, rank_phases
from hybridrl.config.planner.model_shape import model_shape

SIZE = Size(32, length=4096, prompt=256, max_tokens=16384, chunk_tokens=4096, sigma=0.5)
FSDP = {"activation_checkpointing": True, "accumulation": "sharded", "compile": True}


@pytest.mark.parametrize("ulysses", [1, 2])
def test_log_normal_lengths_have_the_sum_of_equal_ones(ulysses):
    size = replace(SIZE, max_tokens=16384 // ulysses, ulysses=ulysses)
    equal, unequal = (draw_lengths(name, 4, size) for name in ("equal", "lognormal"))
    assert equal.unique().tolist() == [4096]
    assert unequal.sum() == equal.sum() == 4 * 32 * 4096
    # A micro-batch of all ranks that share it holds the longest, which is cut here.
    assert unequal.max() == 16384


def test_lengths_that_no_micro_batch_holds_are_named():
    size = replace(SIZE, sequences=4, length=32768, ulysses=2)
    assert draw_lengths("equal", 2, size).tolist() == [32768] * 8
    with pytest.raises(ValueError, match=r"lognormal lengths of 32768 .* of 32768"):
        draw_lengths("lognormal", 2, size)


def test_the_plan_is_the_validators_without_the_process(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5["1.5b"]))
    shape = model_shape(QWEN2_5["1.5b"])
    config = run_config(tmp_path, SIZE, 2, FSDP, on_gpu=True)
    phases = {phase.name: phase for phase in rank_phases(config, shape, 140 * GIB)}
    update = planned(config, shape)["planned_update_actor"] * GIB
    assert update == pytest.approx(phases["update actor"].total - GPU_PROCESS_BYTES)
    # 12 bytes of weights and moments and 4 of gradients, on two ranks; then activations: with
    # checkpointing a layer keeps its input, 2 bytes of 1,536 features and 16,384 tokens.
    least = 16 * shape.parameters / 2 + shape.layers * 2 * 1536 * 16384
    assert least < update < 2 * least


def test_a_sync_is_the_sum_of_its_parts_in_each_step():
    # Sums: 1 + 2 + 3 = 6, 10 + 0 + 0 = 10, 0 + 3 + 4 = 7 ms, whose median is 7; waiting is apart.
    rows = [(1, 2, 3, 8), (10, 0, 0, 9), (0, 3, 4, 7)]
    keys = [f"reshard/{part}_s" for part in ("prepare", "move", "verify", "wait")]
    found = sync_ms([dict(zip(keys, (ms / 1e3 for ms in row), strict=True)) for row in rows])
    assert found == {"prepare": 1.0, "move": 2.0, "verify": 3.0, "wait": 8.0, "sum": 7.0}


def test_a_preset_has_its_own_aims():
    found = {"step_s": 4.1, "setup_s": 58.2, "outside_fraction": 0.08, "sync_ms": {"sum": 4.9}}
    assert aims("whole_step", found).keys() == {"outside_fraction", "setup_s"}
    assert aims("field", found)["sync_ms"] == {"at_most": 15, "measured": 4.9}
    assert aims("one_gpu", found) == {}
