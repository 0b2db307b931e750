"""rollout.top_p with real vLLM: its log-probs are those that the trainer has of the same tokens."""

from dataclasses import replace

import pytest
import torch

from hybridrl.config.choices import DType
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.rollout import RolloutWorker
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import (
    MAX_PROMPT,
    Case,
    prompts,
    rollout_config,
    set_rank_environment,
    write_folders,
)
from tests.support.role_configs import actor_config, fsdp_config
from tests.support.training_batches import scheduled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KEPT: list[RolloutWorker] = []
TOP_P, RESPONSE = 0.9, 100
# 17 fill no graph, and more than decode together.
LENGTHS = [3 + 8 * (i % 17) for i in range(34)]


def sampled(folder, temperature):
    """Per token: vLLM's log-probs, the trainer's with and without sets, sizes of the sets.

    Also metrics of an update, and the number of sets of greedy responses.
    """
    set_rank_environment()
    spec = fsdp_config(1, param_dtype=DType.bfloat16)
    mesh = build_mesh(spec, "cuda")
    case = Case("qwen2", DType.bfloat16, tp=1, enforce_eager=False)
    options = {"max_response_tokens": RESPONSE, "kv_cache_mb": 256, "max_num_seqs": 24}
    options |= {"temperature": temperature, "top_p": TOP_P}
    rollout = RolloutWorker(rollout_config(case, folder, **options), mesh)
    KEPT.append(rollout)
    actor = ActorWorker(
        actor_config(folder, spec, temperature=temperature, lora=None, max_tokens_per_gpu=4000),
        mesh,
    )
    rollout.connect({"actor": actor})
    rollout.reshard(1)
    rows = [[(7 * i + 3 * j) % 490 + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]
    assert max(LENGTHS) <= MAX_PROMPT
    how = {"rows": rows, "max_tokens": RESPONSE}
    greedy = rollout.generate(prompts(0.0, each=1, **how))
    batch = rollout.generate(prompts(temperature, top_p=TOP_P, each=2, **how))
    # Greedily, and from all tokens, nothing is recorded; then again.
    again = rollout.generate(prompts(temperature, top_p=TOP_P, each=2, **how))
    with torch.no_grad():
        cut = actor.log_probs(batch).cpu()
        whole = actor.log_probs(replace(batch, kept_ids=None, kept_counts=None)).cpu()
    sizes = {"num_ranks": 1, "mini_batch_size": len(batch), "max_tokens": 4000}
    dealt = scheduled(batch, **sizes)
    old = dealt.join([actor.compute_log_probs(dealt.shard(1)[0])])
    made_up = batch.adding(old_log_probs=old, advantages=old, ref_log_probs=old)
    metrics = actor.update(scheduled(made_up, **sizes).shard(1)[0], 1, 0.0)
    for one in (batch, again):
        assert torch.equal(one.kept_counts.lengths, one.responses.lengths)
        assert int(one.kept_counts.values.sum()) == len(one.kept_ids.values)
    return {
        "vllm": batch.rollout_log_probs.values,
        "cut": cut,
        "whole": whole,
        "sizes": batch.kept_counts.values,
        "metrics": metrics,
        "greedy": len(greedy.kept_counts.values),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_both_sides_are_of_the_same_tokens(temperature, tmp_path):
    write_folders(tmp_path, ["qwen2"])
    folder = tmp_path / "qwen2" / "A"
    (seen,) = run_on_ranks(sampled, 1, folder, temperature, device_type="cuda", time_limit_s=380)
    vllm, cut, whole = seen["vllm"], seen["cut"], seen["whole"]
    differences = {"cut": vllm - cut, "whole": vllm - whole}
    print(
        {name: (float(d.mean()), float(d.abs().mean())) for name, d in differences.items()},
        "sets of",
        float(seen["sizes"].float().mean()),
        "of 501",
    )
    assert len(vllm) > 3000 and seen["greedy"] == 0
    assert len(seen["sizes"].unique()) > 10
    # Of bfloat16 kernels; without the sets, the mass of the nucleus is missing.
    assert differences["cut"].abs().mean() < 0.05
    assert abs(differences["cut"].mean()) < 0.01
    mass = (whole - cut).exp()
    assert differences["whole"].mean() > 0.02
    assert mass.min() > TOP_P - 0.1 and mass.max() < 1.001
    assert seen["metrics"]["actor/first_log_ratio_max"] == 0.0
