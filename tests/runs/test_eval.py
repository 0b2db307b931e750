"""hybridrl eval as a program, on a checkpoint that answers otherwise than the model it began as."""

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.distributed.mesh import build_mesh
from hybridrl.models.resolve import EMBEDDED_FOLDER
from hybridrl.rewards.gsm8k import score
from hybridrl.trainer.tracking.provenance import plain
from hybridrl.workers.actor import ActorWorker
from tests.support.export_cases import STEP, saved
from tests.support.role_configs import actor_config, fsdp_config
from tests.support.run_configs import run_config
from tests.support.runs import Run, launched
from tests.support.whole_weights import full_state_dict

PROBLEMS, SAMPLES = 8, 3


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Iterator[tuple[Run, str, dict[str, Tensor]]]:
    """An evaluation that has ended, what it printed, and the weights it was to take.

    Noise makes it err at times. Its final norm is 50 times the model's: so are the logits, and
    every sample is the greedy one.
    """
    folder = tmp_path_factory.mktemp("eval")
    spec, store = fsdp_config(dp_shard=1), f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = build_mesh(spec, "cpu")
        actor = ActorWorker(actor_config(EMBEDDED_FOLDER, spec), mesh)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in actor.model.parameters():
                param.to_local().add_(0.02 * torch.randn(param.shape, generator=noise))
            actor.model.lm.model.norm.weight.to_local().mul_(50.0)
        config = plain(run_config("seed=3", "eval.rules.flexible.args.mode=strict"))
        saved(folder / "run", actor, mesh, config)
        weights = full_state_dict(actor.model)
    finally:
        dist.destroy_process_group()
    line = ["eval", str(folder / "run"), "hardware=cpu", "--output", "out"]
    line += ["--samples", str(SAMPLES), "--problems", str(PROBLEMS), "--k", "1,3"]
    with launched(folder / "here", "hybridrl.cli", *line) as run:
        output = run.ended()
        yield run, output, weights


def completions(run: Run) -> list[dict]:
    lines = (run.run_dir / "out" / "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_responses_are_those_of_the_checkpoints_weights(evaluated):
    run, _, weights = evaluated
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER)
    model.load_state_dict(weights, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    rows = completions(run)
    for row in rows[::SAMPLES]:
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        greedy = model.generate(ids, do_sample=False, max_new_tokens=48)[0, ids.shape[1] :]
        samples = [other for other in rows if other["problem"] == row["problem"]]
        text = tokenizer.decode(greedy, skip_special_tokens=True)
        assert [sample["response"] for sample in samples] == [text] * SAMPLES
        assert [sample["length"] for sample in samples] == [len(greedy)] * SAMPLES


def test_every_problem_has_every_sample(evaluated):
    pairs = [(row["problem"], row["sample"]) for row in completions(evaluated[0])]
    problems = sorted({problem for problem, _ in pairs})
    assert len(problems) == PROBLEMS
    assert sorted(pairs) == [(p, s) for p in problems for s in range(SAMPLES)]


def test_scores_are_the_rewards_of_the_run(evaluated):
    rows = completions(evaluated[0])
    for row in rows:
        expected = score(row["prompt"], row["response"], {"answer": row["answer"]}, mode="strict")
        assert row["scores"] == {"reward": expected, "flexible": expected}
        assert row["correct"] == {"reward": expected == 1, "flexible": expected == 1}
    assert {row["correct"]["reward"] for row in rows} == {True, False}


def test_results_are_the_means_of_the_completions(evaluated):
    run, output, _ = evaluated
    rows = completions(run)
    results = json.loads((run.run_dir / "out" / "results.json").read_text())
    share = sum(row["correct"]["reward"] for row in rows) / len(rows)
    everyone = [found for found in results["results"] if found["group"] == "all"]
    assert [found["rule"] for found in everyone] == ["reward", "flexible"]
    for found in everyone:  # a problem's samples are all alike
        assert found["problems"] == PROBLEMS
        assert found["score"] == pytest.approx(share)
        assert found["pass_at"] == {"1": pytest.approx(share), "3": pytest.approx(share)}
    assert (results["step"], results["seed"], results["samples"]) == (STEP, 3, SAMPLES)
    assert results["length_mean"] == sum(row["length"] for row in rows) / len(rows)
    assert results["tokens_per_second"] > 0
    assert len(results["config_hash"]) == 64
    assert "pass@3" in output and f"{share:.3f}" in output and "results.json" in output
    assert "Traceback" not in output
