"""A run whose trainer and vLLM see windows of different lengths ends before its first update."""

import json
import re
import shutil

from hybridrl.models.resolve import resolve_model
from tests.support.runs import SMALL, started

WINDOW = 150
SHIFTED = """
from hybridrl.workers.actor import ActorWorker


class Shifted(ActorWorker):
    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.model.lm.config.sliding_window += 1
"""


def test_a_window_that_is_one_longer_is_seen_at_the_start(tmp_path):
    """Weights are equal, and no sequence of the run itself is as long as the window."""
    run_dir, model = tmp_path / "run", tmp_path / "mistral"
    run_dir.mkdir()
    (run_dir / "mine.py").write_text(SHIFTED)
    shutil.copytree(resolve_model("embedded"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))
    longest = ["rollout.max_prompt_tokens=120", "rollout.max_response_tokens=60"]
    paths = [f"model.path={model}", "actor.worker=mine.Shifted", "data.num_eval_problems=4"]
    with started(run_dir, *SMALL, *paths, *longest) as run:
        output = " ".join(run.ended(1).split())
    assert "at the start, rollout_log_probs and old_log_probs differ" in output
    assert "The model has 3 layers of sliding attention (window 150)" in output
    # A token of prompts with 164 tokens, and perhaps of those with 142, but of none with 8.
    assert re.search(r"\(164 tokens, differs from token 1[67]\d of a sequence on\)", output)
    assert "(8 tokens" not in output
    assert not (run_dir / "metrics.jsonl").exists() or len(run.metrics()) < 2
