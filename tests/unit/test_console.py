"""What the user sees, as text: on a terminal and in a log; header arithmetic, steps, summary."""

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybridrl.config.changes import may_grow
from hybridrl.data.sources.prompts import DataSetSummary, PromptSets
from hybridrl.trainer.record import RolloutRecord
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.header import count_text, evaluation_steps, header_lines
from hybridrl.trainer.tracking.provenance import plain
from hybridrl.trainer.tracking.rollout_log import pick_samples
from hybridrl.trainer.tracking.summary import (
    SUPERVISED_COLUMNS,
    Eta,
    duration_text,
    legend,
    step_line,
    step_row,
    title_row,
)
from tests.support.run_configs import run_config

STEP = {
    "step": 12,
    "reward/mean": 0.3125,
    "actor/kl": 0.00123,
    "actor/log_ratio_max": 0.0953,  # ln 1.1
    "response/length_mean": 31.25,
    "rollout/tokens_per_second": 5120.0,
    "time/rollout_s": 2.0,
    "time/update_actor_s": 1.2,
    "time/step_s": 4.0,
    "eval/accuracy": None,
}
EVALUATED = STEP | {"eval/accuracy": 0.297, "eval/accuracy_greedy": 0.44}


def screen(terminal: bool, width: int = 80) -> tuple[RunConsole, io.StringIO]:
    """A run's console that writes into a text."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, highlight=False, color_system=None
    )
    return RunConsole(40, console), file


def shown(file: io.StringIO) -> str:
    """What was printed, without the codes that move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def header(*overrides: str, run_dir="outputs/gsm8k_ppo/today", **changes) -> list[tuple[str, str]]:
    """The header of a run with these overrides; `changes` are of its prompts."""
    data_sets = [DataSetSummary("", "embedded", 1.0, 8192, 320)]
    prompts = PromptSets(**({"train": [], "held_out": [], "data_sets": data_sets} | changes))
    about = "no NVIDIA GPU, 4 cores, 64 GiB RAM"
    return header_lines(run_config(*overrides), Path(run_dir), about, prompts, 674_304)


def test_header_says_what_runs_where_on_what_and_how_much():
    config = ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2"]
    lines = dict(header(*config, notes=["be warned"], template="none"))
    assert lines["run"] == "gsm8k_ppo, seed 1"
    assert lines["hardware"] == "cpu: hardware=cpu was given"
    assert lines["reward"] == "hybridrl.rewards.gsm8k.score (mode strict)"
    assert lines["chat template"] == "none"
    assert lines["model"] == "embedded, 674 k parameters, float32"
    assert lines["data"] == "embedded: 8,192 training, 320 held out"
    assert lines["workers"] == "2 ranks = dp_replicate 1 x dp_shard 2; 1 vLLM engine of tp 2"
    # 64 prompts x 8 responses in mini-batches of 256, on two ranks; 30 * 64 / 8192 passes.
    batch = "64 prompts x 8 responses = 512 a step; 2 updates of 256 (128 a rank)"
    assert lines["batch"] == batch
    assert lines["steps"] == "30 (0.23 passes over the data); evaluated at 0, 10, 20, 30"
    assert lines["note"] == "be warned"
    assert "schedule" not in lines
    partial = dict(header("rollout.schedule=partial", "rollout.max_versions=3"))
    age = "no token is older than 3 updates when it is trained"
    assert partial["schedule"] == f"partial: up to 128 prompts in flight; {age}"


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        # 2 mini-batches x 2 epochs
        (["actor.epochs=2"], "4 updates of 256 (64 a rank)"),
        # 4 ranks are 2 groups
        (["fsdp.ulysses_size=2"], "2 updates of 256 (128 a group of 2 ranks)"),
    ],
)
def test_header_counts_updates_over_all_epochs_and_responses_where_they_are(overrides, updates):
    lines = dict(header("cluster.gpus_per_node=4", *overrides))
    assert lines["batch"] == f"64 prompts x 8 responses = 512 a step; {updates}"


def test_header_has_a_line_for_each_data_set_of_a_mixture():
    sets = [
        DataSetSummary("sums", "sums.jsonl", 0.75, 1000, 50),
        DataSetSummary("words", "embedded", 0.25, 8192, 320),
    ]
    lines = header(data_sets=sets)
    at = lines.index(("data", "sums, 75 % of the prompts, sums.jsonl: 1,000 training, 50 held out"))
    assert lines[at + 1] == (
        "",
        "words, 25 % of the prompts, embedded: 8,192 training, 320 held out",
    )
    # 30 steps of 64 prompts: 1920 * 3/4 / 1000 and 1920 / 4 / 8192.
    assert dict(lines)["steps"].startswith("30 (1.4 passes over sums, 0.059 passes over words);")


def test_header_names_the_adapters_and_the_machine_once():
    lines = dict(header("lora=default", "lora.rank=8", "lora.alpha=16"))
    adapters = "LoRA of rank 8, alpha 16, on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
    assert lines["adapters"].startswith(adapters) and "parameters are trained" in lines["adapters"]
    assert "adapters" not in dict(header()) and "machine" in dict(header())
    reason = "hardware.reason='this machine has no NVIDIA GPU, 4 cores, 64 GiB RAM'"
    assert "machine" not in dict(header(reason))


def test_header_sums_up_many_evaluations():
    lines = dict(header("trainer.total_steps=100"))
    assert "evaluated 11 times" in lines["steps"]


@pytest.mark.parametrize(
    ("total", "every", "steps"),
    [(40, 10, [0, 10, 20, 30, 40]), (5, 2, [0, 2, 4, 5]), (5, 0, [0, 5]), (3, 9, [0, 3])],
)
def test_evaluation_steps(total, every, steps):
    assert evaluation_steps(total, every) == steps
    assert evaluation_steps(total, every, first=False) == steps[1:]


def test_header_leaves_out_an_evaluation_that_does_not_happen():
    lines = dict(header("eval.before_training=false", "eval.every_steps=20"))
    assert "evaluated at 20, " in lines["steps"]


def test_header_fits_the_terminal_and_keeps_paths_whole_in_logs():
    path = "/a/long/path" * 9
    for width in (80, 140):
        console, file = screen(terminal=True, width=width)
        console.header("hybridrl 0.1.0", header(run_dir=path))
        lines = shown(file).splitlines()
        assert max(map(len, lines)) <= width
        assert "hybridrl 0.1.0" in lines[0]
        assert lines[-1].startswith("\u2570")
    console, file = screen(terminal=False)
    console.header("hybridrl 0.1.0", header(run_dir=path))
    assert path in file.getvalue()
    assert file.getvalue().isascii()


def test_log_gets_one_whole_line_per_step():
    console, file = screen(terminal=False)
    console.phase("rollout")
    console.step(STEP)
    console.step(EVALUATED | {"step": 13})
    first, second = file.getvalue().splitlines()
    assert first == (
        "step 12/40  reward 0.312  KL 0.0012  max ratio 1.10  length 31.2  tok/s 5.12 k  "
        "4.0 s (rollout 50%, actor 30%)  ETA ?"
    )
    assert "held-out 0.297  greedy 0.440" in second
    assert "\x1b" not in file.getvalue()


def test_terminal_gets_aligned_rows_below_titles():
    console, file = screen(terminal=True)
    with console:
        console.phase("update_actor")
        console.step(STEP)
        console.step(EVALUATED | {"step": 13})
    text = shown(file)
    rows = [line for line in text.splitlines() if re.match(r" +(step|12|13) ", line)]
    assert len(rows) == 3
    title, plain, evaluated = rows
    for name, value in [("reward", "0.312"), ("KL", "0.0012"), ("seconds", "4.0")]:
        assert title.index(name) + len(name) == plain.index(value) + len(value)
    assert evaluated[: title.index("held-out") + len("held-out")].endswith("0.297")
    assert "12/40" in text
    assert "last step: rollout 50%, actor 30%, other 20%" in text


def test_progress_line_goes_away_and_the_cursor_comes_back():
    console, file = screen(terminal=True)
    with pytest.raises(KeyboardInterrupt), console:
        console.phase("rollout")
        raise KeyboardInterrupt
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_wide_terminals_get_more_columns():
    assert "greedy" not in title_row(80)
    for log_ratio in (0.1, 20.0, 1e3):
        row = EVALUATED | {"actor/log_ratio_max": log_ratio}
        assert len(step_row(row, 80)) == len(title_row(80)) < 80
    assert "greedy" in title_row(140)
    assert step_row(EVALUATED, 140).endswith("rollout 50%, actor 30%, other 20%")


def test_line_of_a_step_that_only_evaluated():
    row = {"step": 0, "eval/accuracy": 0.25, "time/evaluate_s": 2.0, "time/step_s": 2.0}
    assert step_line(row, 5, "?") == "step 0/5  held-out 0.250  2.0 s (eval 100%)  ETA ?"


def test_supervised_fine_tuning_shows_its_loss_in_place_of_rewards():
    row = {"step": 2, "actor/loss": 0.51234, "eval/nll": 0.6, "time/step_s": 2.0}
    titles = title_row(80, SUPERVISED_COLUMNS)
    assert "held-out loss" in titles and "reward" not in titles
    assert len(step_row(row, 80, SUPERVISED_COLUMNS)) == len(titles) <= 80
    line = step_line(row, 5, "?", SUPERVISED_COLUMNS)
    assert line.startswith("step 2/5  loss 0.5123  held-out loss 0.6000  2.0 s")


def test_samples_are_clipped_and_shown_as_they_are():
    record = RolloutRecord(1, "p", "Tom has [bold]3[/bold].", "\x1b[31mred " * 300, "#### 4", 1, 9)
    for terminal in (True, False):
        console, file = screen(terminal)
        console.samples(10, [record])
        text = shown(file) if terminal else file.getvalue()
        assert "sample of step 10: score 1, 9 tokens" in text
        assert "Tom has [bold]3[/bold]." in text
        assert "#### 4" in text
        assert "\x1b[31m" not in file.getvalue()
        assert len(text.splitlines()) < 20


def test_a_conversation_has_a_line_for_each_turn():
    turns = [{"role": "assistant", "text": "5"}, {"role": "user", "text": "Wrong."}]
    console, file = screen(terminal=False)
    console.samples(10, [RolloutRecord(1, "2 + 2?", "2 + 2?", "5Wrong.", "4", 0, 3, turns=turns)])
    assert [line.split() for line in file.getvalue().splitlines()[2:4]] == [
        ["assistant", "5"],
        ["user", "Wrong."],
    ]


def test_a_failed_episode_of_an_agent_shows_why_and_what_the_model_read():
    console, file = screen(terminal=False)
    reason = "error: KeyError: 'solution'"
    failed = RolloutRecord(1, "<user>2 + 2?", "2 + 2?", "", "4", 0, 1, reason, turns=[])
    turns = [{"role": "assistant", "text": "4"}]
    console.samples(10, [failed, replace(failed, prompt="<user>Add!", failure=None, turns=turns)])
    lines = [line.split(maxsplit=1) for line in file.getvalue().splitlines()]
    assert lines[1:4] == [["problem", "2 + 2?"], ["failed", reason], ["expected", "4"]]
    assert lines[5:8] == [
        ["problem", "2 + 2?"],
        ["model", "read  <user>Add!"],
        ["assistant", "4"],
    ]


@pytest.mark.parametrize(
    ("scores", "picked"),
    [
        # (prompt, score) of each response
        ([(0, 0), (1, 1), (2, 0), (3, 1)], [1, 0]),
        ([(0, 1), (0, 0), (1, 0)], [0, 2]),
        ([(0, 1), (0, 0), (1, 1)], [2, 1]),
        ([(0, 1), (0, 0)], [0]),
        ([(0, 1), (1, 1)], [0]),
        ([], []),
    ],
)
def test_the_best_and_the_worst_response_to_different_prompts_are_picked(scores, picked):
    records = [RolloutRecord(p, "", "", str(i), "", s, 1) for i, (p, s) in enumerate(scores)]
    assert [record.response for record in pick_samples(records)] == [*map(str, picked)]


def test_warnings_and_log_lines_are_whole():
    long = "3 of 512 rewards failed: TimeoutError, " * 5
    for terminal in (True, False):
        console, file = screen(terminal)
        console.warn(long)
        logger = logging.Logger("test")
        logger.addHandler(console.logging_handler())
        logger.warning("from [a] module")
        text = " ".join(shown(file).split())
        assert long.strip() in text
        assert "from [a] module" in text


def test_summary_shows_before_and_after_times_and_files(tmp_path):
    rows = [
        {"step": 0, "eval/accuracy": 0.3, "eval/accuracy_greedy": 0.5, "time/step_s": 2.0}
        | {"time/evaluate_s": 2.0, "eval/accuracy_best_of_4": 0.9, "eval/ci95_best_of_4": 0.02}
        | {"eval/accuracy_[/unseen]": 0.2, "eval/accuracy_flexible": 0.35},
        {"step": 1, "eval/accuracy": None, "time/step_s": 3.0, "time/rollout_s": 3.0}
        | {"reward/failed": 2.0},
        {"step": 2, "eval/accuracy": 0.75, "eval/accuracy_greedy": 0.45, "time/step_s": 5.0}
        | {"time/rollout_s": 3.0, "time/evaluate_s": 1.0, "reward/failed": 0.0}
        | {"eval/accuracy_best_of_4": 0.95, "eval/ci95_best_of_4": 0.01}
        | {"eval/accuracy_[/unseen]": 0.6, "eval/accuracy_flexible": 0.8},
    ]
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    for terminal in (True, False):
        console, file = screen(terminal)
        console.summary(rows, 0, tmp_path)
        text = shown(file)
        assert re.search(r"sampled +0\.300 +0\.750 +\+0\.450", text)
        assert re.search(r"greedy +0\.500 +0\.450 +-0\.050", text)
        assert re.search(r"best of 4 +0\.900 \+- 0\.020 +0\.950 \+- 0\.010 +\+0\.050", text)
        assert re.search(r"\[/unseen\] +0\.200 +0\.600 +\+0\.400", text)
        assert "flexible" not in text and "1 more accuracies" in text
        assert "metrics.jsonl" in text
        assert "2 in 0:10 (3.5 s each without evaluations)" in text
        assert "rollout 60%, eval 30%, other 10%" in text
        assert "2 failed" in text
        assert "final/  metrics.jsonl  report.html" in text


@pytest.mark.parametrize(
    ("steps", "schedule", "epochs", "more", "trust"),
    [
        (40, "constant", None, [" trainer.total_steps=80"], ""),
        (40, "constant", 1.5, [" trainer.epochs=3"], ""),
        (40, "cosine", None, [], ""),
        (2, "cosine", None, [""], " --run-code"),
    ],
)
def test_summary_explains_its_numbers_and_names_the_next_commands(
    tmp_path, monkeypatch, steps, schedule, epochs, more, trust
):
    """The run has 40 steps; a callback may stop it before. Its reward may be the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    run = tmp_path / "outputs" / "my run"
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    suffixes = ("", "_flexible", "_greedy", "_seen", "_unseen", "_steps")
    accuracies = {f"eval/accuracy{suffix}": 0.5 for suffix in suffixes}
    cut = {"response/truncated_fraction": 0.1}
    rows = [STEP | cut | {"step": step} | accuracies for step in (0, steps)]
    console, file = screen(terminal=False)
    grows = may_grow(plain(run_config(f"actor.optim.schedule={schedule}")))
    has_report = schedule == "cosine"
    options = {"epochs": epochs, "has_report": has_report}
    console.summary(rows, 0, run, needs_trust=bool(trust), may_grow=grows, **options)
    text = file.getvalue()
    assert f"2 more accuracies (eval/...): {run}/metrics.jsonl" in text
    for column in ("reward: mean", "max ratio: largest factor", "KL: from the reference"):
        assert column in text
    assert "MFU: " not in text  # not among these numbers
    explained = [part.partition(":")[0] for part in legend(rows).split("; ")]
    assert [title for title in explained if title not in step_line(rows[1], 40, "?")] == []
    _, commands = text.split("\nnext")
    next_lines = [line.strip() for line in commands.splitlines()]
    assert ("report.html" in text) == has_report
    assert next_lines == [
        *(["hybridrl report 'outputs/my run'"] if not has_report else []),
        f"hybridrl eval 'outputs/my run'{trust}",
        "hybridrl export 'outputs/my run' my_model",
        *(f"hybridrl resume 'outputs/my run'{overrides}" for overrides in more),
    ]


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_next_commands_work_where_the_user_is(tmp_path, monkeypatch, is_gone):
    """`hybridrl resume` enters the directory of the first start, which may be removed later."""
    run, first = tmp_path / "runs" / "mine", tmp_path / "runs"
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    if is_gone:
        first = tmp_path / "gone"
        first.mkdir()
    monkeypatch.chdir(first)
    monkeypatch.setenv("PWD", str(first if is_gone else tmp_path))
    if is_gone:
        first.rmdir()
    console, file = screen(terminal=False)
    console.summary([STEP | {"step": 1}], 0, run)
    assert f"hybridrl eval {run}\n" in file.getvalue()


def test_summary_says_how_well_the_devices_were_used(tmp_path):
    rows = [
        {"step": 0, "time/step_s": 2.0, "idle/mean_s": 1.0, "time/outside_s": 2.0},
        {"step": 1, "time/step_s": 3.0, "idle/mean_s": 0.5, "time/outside_s": 0.5}
        | {"mfu/old_log_probs": 0.5, "mfu/update_actor": 0.4},
        {"step": 2, "time/step_s": 5.0, "idle/mean_s": 0.5, "time/outside_s": 0.5}
        | {"mfu/old_log_probs": 0.52, "mfu/update_actor": None, "environment/seconds": 1.5},
    ]
    console, file = screen(terminal=False)
    console.summary(rows, 0, tmp_path)
    idle = "ranks 20%; outside sampling, scoring and updates 30%; engines waited for the "
    assert f"{idle}environment 15%" in " ".join(file.getvalue().split())
    assert "old logp 51%, actor 40%" in file.getvalue()
    assert "other 100%" in file.getvalue()  # neither of them is a phase


def test_step_shows_idle_time_and_mfu_where_known():
    row = STEP | {"idle/fraction": 0.07, "mfu/update_actor": 0.46}
    assert "tok/s 5.12 k  idle 7%  MFU 46%  4.0 s" in step_line(row, 40, "?")
    assert len(step_row(row, 130)) - len(step_row(row, 129)) == 2 * 5
    assert "  7%  46%      4.0" in step_row(row, 130)


def test_summary_of_a_run_without_evaluation_is_no_crash(tmp_path):
    console, file = screen(terminal=False)
    console.summary([], 0, tmp_path)
    assert "accuracy" not in file.getvalue()


def test_time_left_is_extrapolated_from_the_steps_so_far():
    clock = iter([100.0, 110.0, 130.0])
    eta = Eta(total_steps=10, clock=lambda: next(clock))
    assert eta.after(0) == "?"
    assert eta.after(1) == "1:30"  # 10 s a step, 9 steps
    assert eta.after(2) == "2:00"  # 15 s a step, 8 steps


@pytest.mark.parametrize(
    ("number", "text"),
    [(950, "950"), (5123, "5.12 k"), (674_304, "674 k"), (999_900, "1 M"), (7.62e9, "7.62 B")],
)
def test_counts_are_short(number, text):
    assert count_text(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.4, "0:09"), (93, "1:33"), (7500, "2:05:00")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text
