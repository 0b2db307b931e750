"""Evaluations and exports of real runs: the runs' own accuracies, a model that vLLM loads."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.runs import SMALL, launched, started

pytestmark = pytest.mark.slow

CHECKPOINTS = ["checkpoint.every_steps=1"]
ON_TWO = ["cluster.gpus_per_node=2"]
CASES = {
    "plain": (SMALL, []),
    "adapters_tp2": (
        [*SMALL, "lora=default", "rollout.tensor_parallel_size=2", "actor.optim.lr=1e-2", *ON_TWO],
        ON_TWO,
    ),
    "calculator": (["+recipe=calculator_tool", *SMALL[1:]], []),
}
# Prints what vLLM decodes greedily, as JSON.
DECODE = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, enforce_eager=True, max_model_len=160, dtype="float32")
params = SamplingParams(temperature=0.0, max_tokens=40)
outputs = llm.generate(prompts, params)
print("DECODED", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def evaluated(folder: Path, *arguments: str) -> dict:
    """results.json of an evaluation on CPU."""
    with launched(folder, "hybridrl.cli", "eval", *arguments, "hardware=cpu") as run:
        run.ended()
    (results,) = folder.rglob("results.json")
    return json.loads(results.read_text())


def completions(folder: Path) -> list[dict]:
    (file,) = folder.rglob("completions.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_to_the_end(run_dir: Path, overrides: list[str]) -> list[dict]:
    with started(run_dir, *overrides, *CHECKPOINTS) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        return run.metrics()


def assert_same_scores(results: dict, row: dict, decoding: str = "") -> None:
    """The scores of all problems and groups are the run's, to the last bit."""
    compared = 0
    for found in results["results"]:
        rule = "" if found["rule"] == "reward" else f"_{found['rule']}"
        group = "" if found["group"] == "all" else f"_{found['group']}"
        if decoding and group:
            continue  # a run has no greedy accuracy of groups
        assert row[f"eval/accuracy{decoding}{group}{rule}"] == found["score"], found
        compared += 1
    assert compared >= 2
    assert row[f"eval/ci95{decoding}"] == results["results"][0]["score_ci95"]


@pytest.mark.parametrize("name", CASES)
def test_final_checkpoint_scores_as_the_runs_last_evaluation(tmp_path, name):
    overrides, places = CASES[name]
    last = run_to_the_end(tmp_path / "run", overrides)[-1]
    results = evaluated(tmp_path / "eval", str(tmp_path / "run"), *places)
    assert_same_scores(results, last)
    assert results["step"] == 2
    assert results["length_mean"] == pytest.approx(last["eval/length_mean"])
    assert results["truncated_fraction"] == pytest.approx(last["eval/truncated_fraction"])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run with a checkpoint of each step, and its metrics."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    return folder, run_to_the_end(folder, [*SMALL, "actor.optim.lr=1e-3"])


def test_greedy_and_earlier_checkpoints_are_the_runs_too(run, tmp_path):
    folder, rows = run
    greedy = evaluated(tmp_path / "greedy", str(folder), "--greedy")
    assert_same_scores(greedy, rows[-1], "_greedy")
    first = evaluated(tmp_path / "first", str(folder / "checkpoints" / "step_00000001"))
    assert first["step"] == 1


def test_the_model_that_a_run_began_with_scores_as_before_its_first_step(run, tmp_path):
    limits = ["+recipe=gsm8k_ppo", "data.num_eval_problems=20"]
    assert_same_scores(evaluated(tmp_path, "embedded", *limits), run[1][0])


def test_more_samples_begin_with_the_same_ones_and_repeat(run, tmp_path):
    folder = str(run[0])
    one = evaluated(tmp_path / "one", folder)
    results = evaluated(tmp_path / "four", folder, "--samples", "4")
    evaluated(tmp_path / "again", folder, "--samples", "4")
    four = completions(tmp_path / "four")
    assert four == completions(tmp_path / "again")
    assert [row for row in four if row["sample"] == 0] == completions(tmp_path / "one")
    of_problem: dict[int, list[bool]] = {}
    for row in four:
        of_problem.setdefault(row["problem"], []).append(row["correct"]["reward"])
    counts = [sum(correct) for correct in of_problem.values()]
    assert len(set(counts)) > 2
    # 1 - C(4 - c, 2) / C(4, 2) by c
    at_two = sum([0, 3 / 6, 5 / 6, 1, 1][count] for count in counts) / len(counts)
    assert results["results"][0]["pass_at"]["2"] == pytest.approx(at_two)
    assert one["results"][0]["problems"] == results["results"][0]["problems"] == 20


def test_vllm_loads_an_export_and_decodes_as_transformers_does(run, tmp_path):
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "hybridrl.cli", "export", str(run[0]), str(folder)]
    subprocess.run(command, check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts, expected = [], []
    for count in (3, 8, 21):
        message = {"role": "user", "content": f"Tom has {count} pens and buys 4. How many now?"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        prompts.append(text)
        answer = model.generate(ids, do_sample=False, max_new_tokens=40)
        expected.append(answer[0, ids.shape[1] :].tolist())
    line = [sys.executable, "-c", DECODE, str(folder), json.dumps(prompts)]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=240)
    (decoded,) = [x for x in done.stdout.splitlines() if x.startswith("DECODED ")] or [done.stderr]
    assert json.loads(decoded.removeprefix("DECODED ")) == expected


def test_interrupted_evaluation_leaves_nothing(run, tmp_path):
    argv = ["eval", str(run[0]), "hardware=cpu", "--samples", "4000"]
    with launched(tmp_path, "hybridrl.cli", *argv, "rollout.max_num_seqs=20") as program:
        while not any(path.stat().st_size for path in tmp_path.rglob("completions.jsonl")):
            assert program.process.poll() is None, program.output()
        os.kill(program.process.pid, signal.SIGINT)
        output = program.ended(130, timeout=30)
        assert "Traceback" not in output
    assert len(completions(tmp_path)) >= 20
