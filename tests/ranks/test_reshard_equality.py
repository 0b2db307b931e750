"""After a reshard vLLM holds, bit for bit, what it loads from a checkpoint of the same weights.

Real processes, real FSDP2 shards, a real vLLM; tests/support/reshard_cases.py has what each rank
does.
"""

import pytest
import torch

from hybridrl.config.choices import DType, Layout, RolloutWeights
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import (
    BY_COLUMNS,
    OF_LAYERS,
    ROW_PARALLEL,
    Case,
    run_cases,
    write_folders,
)
from tests.support.tiny_hf import AFTER_DENSE, MORE

FLOAT, BFLOAT, FP8 = DType.float32, DType.bfloat16, RolloutWeights.fp8

CASES = {
    2: [
        Case("qwen2", FLOAT, tp=1),
        Case("llama", BFLOAT, tp=2, layout=Layout.plain),
        Case("qwen3_tied", FLOAT, tp=2),  # 1 KV head on 2 ranks
        Case("qwen3", BFLOAT, tp=1, dp_replicate=2),
        Case("gemma3", FLOAT, tp=2),
        Case("qwen3_tied", BFLOAT, tp=2, weights=FP8),
        Case("qwen3_moe", FLOAT, tp=2),
        Case("qwen3_moe", FLOAT, tp=2, expert_parallel=True),
    ],
}
SLOW_CASES = {
    1: [Case("qwen2", FLOAT, tp=1)],
    2: [
        Case(model, BFLOAT, tp=tp, weights=FP8)
        for model in ("qwen2", "phi3", "qwen3_5", "lfm2", "nemotron_h")
        for tp in (1, 2)
    ],
    3: [Case("llama_tied", FLOAT, tp=1), Case("qwen2_untied", BFLOAT, tp=1)],
    4: [
        Case("qwen3", FLOAT, tp=2, dp_replicate=2, layout=Layout.plain),
        Case("qwen2_untied", BFLOAT, tp=4, dp_replicate=4),
        Case("qwen3_moe", FLOAT, tp=2),
        Case("qwen3_moe", BFLOAT, tp=2, layout=Layout.plain),
        Case("qwen2_moe", FLOAT, tp=1, dp_replicate=2),
        Case("qwen2_moe", FLOAT, tp=2, expert_parallel=True),
    ]
    + [
        Case(model, dtype, tp=tp, dp_replicate=replicas, layout=layout)
        for model in ("llama", "llama_tied", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied")
        for dtype in (FLOAT, BFLOAT)
        for tp, replicas in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
        for layout in (Layout if tp == 2 and dtype is BFLOAT else [Layout.aligned])
    ],
}
# The families that came later, whose rollouts must be closer.
FAMILY_CASES = {
    1: [Case(model, FLOAT, tp=1) for model in sorted(MORE)]
    + [Case(model, BFLOAT, tp=1) for model in sorted(MORE) if model.startswith("gemma4")],
    2: [Case(model, dtype, tp=2) for model in sorted(MORE) for dtype in (FLOAT, BFLOAT)],
}


def each(cases):
    return [(ranks, case) for ranks, listed in cases.items() for case in listed]


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What every rank saw in a case. One start serves all cases of a size that are asked for."""
    items = request.session.items
    asked = [item.callspec.params["case"] for item in items if "case" in item.fixturenames]
    results = {}

    def of(cases, ranks, case):
        key = (id(cases), ranks)
        if key not in results or str(case) not in results[key][0]:
            root = tmp_path_factory.mktemp("models")
            chosen = [c for c in cases[ranks] if c in asked or c == case]
            write_folders(root, sorted({c.model for c in chosen}))
            results[key] = run_on_ranks(run_cases, ranks, chosen, root, "cpu", time_limit_s=900)
        return [by_case[str(case)] for by_case in results[key]]

    return of


@pytest.mark.parametrize(("ranks", "case"), each(CASES), ids=str)
def test_reshard(ranks, case, seen):
    check_case(case, seen(CASES, ranks, case))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("ranks", "case"), each(SLOW_CASES), ids=str)
def test_reshard_slow(ranks, case, seen):
    check_case(case, seen(SLOW_CASES, ranks, case))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("ranks", "case"), each(FAMILY_CASES), ids=str)
def test_reshard_of_every_family(ranks, case, seen):
    by_rank = seen(FAMILY_CASES, ranks, case)
    check_case(case, by_rank)
    if case.dtype is FLOAT:
        assert max(one[f"errors_{which}"].max() for one in by_rank for which in "AB") < 1e-4


def check_case(case, by_rank):
    for rank, one in enumerate(by_rank):
        check_weights(case, one, len(by_rank))
        check_rollouts(case, one)
        if case.model in BY_COLUMNS:
            check_experts(case, one)
        check_sleep(case, one)
        check_guards(case, one, rank, len(by_rank))
    if case.tp > 1:
        for which in "AB":
            responses = [one[f"rollout_{which}"].responses.values for one in by_rank[: case.tp]]
            assert all(torch.equal(responses[0], other) for other in responses)


def check_weights(case, one, ranks):
    nested = case.layout is Layout.aligned and 1 < case.tp <= ranks // case.dp_replicate
    names = BY_COLUMNS.get(case.model, ROW_PARALLEL)
    if case.expert_parallel:  # each rank holds experts whole, cut by rows as they are
        names = [name for name in names if ".experts." not in name]
    listed = OF_LAYERS.get(case.model, [f"{layer}.{n}" for layer in range(2) for n in names])
    expected = [f"model.layers.{name}" for name in listed]
    assert sorted(one["columns"]) == (sorted(expected) if nested else [])
    assert one["differs_A"] == one["differs_B"] == []


def check_rollouts(case, one):
    """What is sampled comes from the weights that were moved last, and stale caches are gone."""
    for which, version in (("A", 1), ("B", 2)):
        rollout, again = one[f"rollout_{which}"], one[f"again_{which}"]
        assert rollout.group_id.tolist() == [40, 40, 41, 41, 42, 42]
        assert rollout.prompts.lengths.tolist() == [4, 4, 5, 5, 140, 140]
        assert (rollout.weight_version == version).all()
        assert rollout.response_mask.values.all()
        ended = torch.stack([row[-1] == 1 for row in rollout.responses.rows()])
        assert torch.equal(rollout.truncated, ~ended)
        assert (rollout.responses.lengths[rollout.truncated] == 12).all()
        if case.dtype is FLOAT:
            assert one[f"errors_{which}"].max() < 2e-4
            assert torch.equal(rollout.responses.values, again.responses.values)
        assert one[f"errors_{which}"].mean() < case.rounding
    first, second, *_ = one["rollout_A"].responses.rows()
    assert first.tolist() != second.tolist(), "two samples of a prompt have seeds of their own"
    assert one["greedy"][0] == one["greedy"][1]
    assert one["nobody"] == 0


def check_experts(case, one):
    """vLLM records the experts of all tokens, also of those that it finds in its prefix cache.

    transformers computes in float32, from which bfloat16 differs in 3 to 6 % of the choices. The
    experts of other tokens would differ in 14 of 15.
    """
    layers = 1 if case.model in AFTER_DENSE else 2
    for differing, total in one["experts_A"] + one["experts_B"]:
        assert total > layers * 2 * (4 + 5 + 140)  # two responses to each prompt
        assert differing == 0 if case.dtype is FLOAT else differing < 0.1 * total


def check_sleep(case, one):
    """Weights that stay need no reshard, and say so by their version."""
    assert [one["kept"][mode][0] for mode in ("none", "kv_cache", "all")] == [3, 3, None]
    if case.dtype is FLOAT:
        for mode in ("none", "kv_cache"):
            before, after = one["kept"][mode][1]
            assert before == after


def check_guards(case, one, rank, ranks):
    last = ranks - 1
    for name, message in one["corrupted"].items():
        assert message.startswith("ReshardError: after reshard 4")
        assert f"\n  {name} on ranks [{last}]" in message
        assert message.count("\n") == 1, "other parameters are right"
    assert "before reshard" in one["early"]
    assert "before reshard" in one["asleep"]
    assert "response 1-40-0 has 145" in one["long"]
    assert "this rank's shard has shape" in one["shape"]
    assert one["shared_memory"] == []
    if ranks > 1:
        assert f"ranks {list(range(1, ranks))} would plan" in one["buckets"]
    if case.tp > 1:
        assert "sampled different tokens" in one["tokens"]


def test_only_what_is_replicated_moves_where_layouts_agree(seen):
    """One replica per rank and no tensor parallelism: every byte is already where it belongs."""
    case = CASES[2][3]
    assert [one["metrics_B"]["received_bytes"] for one in seen(CASES, 2, case)] == [0, 0]


@pytest.mark.parametrize("case", [case for case in CASES[2] if case.model == "qwen3_moe"])
def test_experts_stay_where_they_are_if_shards_lie_in_slices(case, seen):
    """Two ranks, tp 2, float32, untied: of experts, cut or whole, none moves.

    Half of what vLLM replicates comes from the other rank: routers of 16 rows, norms of 256 and of
    heads of 64. Vocabulary: shards of 251 rows, slices of 256.
    """
    received = [one["metrics_B"]["received_bytes"] for one in seen(CASES, 2, case)]
    routers, norms = 2 * 8 * 256, 5 * 128 + 2 * 2 * 32
    assert received == [4 * (routers + norms + 2 * rows * 256) for rows in (5, 0)]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_only_what_vllm_replicates_or_pads_moves_where_shards_lie_in_slices(seen):
    """Four ranks, tp 4, float32, untied; the rest is local, columns of o_proj and down_proj too.

    Norms: 3/4 of 256 come from others. KV heads: 2 of 64 rows on 4 ranks, so that a rank needs 64
    rows of each k and v and holds 32. Vocabulary: shards of 126 rows, slices of 128.
    """
    by_rank = seen(SLOW_CASES, 4, Case("llama", FLOAT, tp=4))
    received = [one["metrics_B"]["received_bytes"] for one in by_rank]
    hidden, norms, key_values = 256, 5, 2 * 2
    same = norms * hidden * 3 // 4 + key_values * 32 * hidden
    assert received == [4 * (same + 2 * rows * hidden) for rows in (2, 4, 6, 0)]


def test_no_more_is_received_than_lives_elsewhere(seen):
    """Two ranks, tp 1, float32: a rank receives the rows of the other's shards, 4 bytes each.

    Untied it would count the head, too; here embedding and head are one tensor of 501 rows.
    """
    received = [one["metrics_B"]["received_bytes"] for one in seen(CASES, 2, CASES[2][0])]
    hidden, ffn, vocab, kv = 256, 352, 501, 128
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn
    layer += hidden + 2 * kv + 2 * hidden  # biases of q, k and v; two norms
    even = 4 * (2 * layer + hidden) // 2
    embedding = [4 * hidden * (vocab // 2), 4 * hidden * -(-vocab // 2)]
    assert received == [even + part for part in embedding]
