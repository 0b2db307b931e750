"""rollout.top_p below 1: sets of kept tokens from the engine's steps to the head."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import RolloutBatch
from hybridrl.distributed.forward.log_probs import Entropy, token_log_probs
from hybridrl.distributed.forward.packing import Kept, States, pack
from hybridrl.distributed.forward.sequence_parallel import SequenceGroup
from hybridrl.rollout.vllm import recorded as vllm_recorded
from hybridrl.rollout.vllm.recorded import KeptTokens
from tests.support.training_batches import RESPONSES, training_batch, with_sets

TOKENS, HIDDEN, VOCAB, TEMPERATURE, TOP_P = 23, 8, 101, 0.7, 0.8
CPU = torch.device("cpu")


class Scheduler:
    """Stands where vLLM's would: requests, and their tokens after a step."""

    def __init__(self):
        self.requests = {}
        self.seen_masks = []

    def add_request(self, request):
        self.requests[request.request_id] = request

    def update_from_output(self, scheduled, output):
        self.seen_masks.append(output.sampling_masks)
        for name, count in scheduled.items():
            self.requests[name].num_output_tokens += count
        return {}


class Core:
    """An engine core, and the recorder of its steps."""

    def __init__(self):
        self.scheduler = Scheduler()
        self.sampler = SimpleNamespace(return_sampling_mask=None)
        self.recorder = KeptTokens(SimpleNamespace(sampler=self.sampler), 0.9)
        self.recorder.record(SimpleNamespace(engine_core=self))

    def add(self, name, top_p=0.9):
        params = SimpleNamespace(top_p=top_p)
        request = SimpleNamespace(request_id=name, num_output_tokens=0, sampling_params=params)
        self.scheduler.add_request(request)

    def step(self, sets, sampled):
        """`sets` of each row's request; the tokens that the scheduler adds to requests."""
        ids = np.array([token for one in sets.values() for token in one], np.int32)
        offsets = np.cumsum([0, *map(len, sets.values())])
        masks = SimpleNamespace(token_ids=ids, offsets=offsets)
        rows = {name: row for row, name in enumerate(sets)}
        output = SimpleNamespace(req_id_to_index=rows, sampling_masks=masks)
        self.scheduler.update_from_output(sampled, output)


def test_each_token_has_its_set_in_the_order_that_is_asked_for():
    """b's prompt takes two steps; a has ended when its queued token arrives."""
    core = Core()
    core.add("a")
    core.add("b")
    core.step({"b": [], "a": [3, 5]}, {"a": 1})
    core.step({"a": [1], "b": [4, 6, 7]}, {"a": 1, "b": 1})
    del core.scheduler.requests["a"]
    core.step({"a": [8, 9], "b": [2]}, {"b": 1})
    taken = core.recorder.take(["b", "a"])
    assert taken["kept_counts"].values.tolist() == [3, 1, 2, 1]
    assert taken["kept_counts"].lengths.tolist() == [2, 2]
    assert taken["kept_ids"].values.tolist() == [4, 6, 7, 2, 3, 5, 1]
    assert taken["kept_ids"].values.dtype == torch.int32
    assert taken["kept_ids"].lengths.tolist() == [4, 3]
    assert core.scheduler.seen_masks == [None] * 3  # the scheduler splits none
    assert core.recorder.take(["a", "b"])["kept_ids"].lengths.tolist() == [0, 0]


def test_requests_that_draw_from_all_tokens_are_sampled_without_sets():
    core = Core()
    core.add("sampled", 0.9)
    assert core.sampler.return_sampling_mask
    core.add("greedy", 1.0)
    assert not core.sampler.return_sampling_mask
    output = SimpleNamespace(req_id_to_index={"greedy": 0}, sampling_masks=None)
    core.scheduler.update_from_output({"greedy": 1}, output)
    assert len(core.recorder.take(["greedy"])["kept_ids"].values) == 0


def test_huge_sets_end_the_call(monkeypatch):
    monkeypatch.setattr(vllm_recorded, "MOST_TOKENS", 100)
    core = Core()
    core.add("a")
    core.step({"a": range(60)}, {"a": 1})
    with pytest.raises(ConfigError, match="60 tokens in the mean") as caught:
        core.step({"a": range(60)}, {"a": 1})
    (problem,) = caught.value.problems
    assert (problem.id, problem.key, problem.value) == ("kept_tokens", "rollout.top_p", 0.9)


def test_sets_stay_with_their_responses():
    batch = with_sets(training_batch())
    ids, counts = batch.kept_ids.rows(), batch.kept_counts.rows()
    joined = RolloutBatch.concat([batch.select([2, 5])], torch.tensor([1, 0]))
    for one in (batch.select([5, 2]), joined):
        for rows, wanted in ((one.kept_ids.rows(), ids), (one.kept_counts.rows(), counts)):
            assert rows[0].equal(wanted[5]) and rows[1].equal(wanted[2]) and len(rows) == 2


def sets_of(kept):
    return [kept.ids[a:b].tolist() for a, b in zip(kept.bounds, kept.bounds[1:], strict=False)]


@pytest.mark.parametrize("ranks", [1, 3, 100])
def test_packing_gives_ranks_the_sets_of_their_tokens(ranks):
    batch = with_sets(training_batch())
    ends = batch.kept_counts.values.cumsum(0).tolist()
    wanted = [batch.kept_ids.values[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]
    groups = [SequenceGroup("group", ranks, rank) for rank in range(ranks)]
    pieces = [pack(batch, CPU, None if ranks == 1 else group) for group in groups]
    assert [one for piece in pieces for one in sets_of(piece.kept)] == wanted
    for piece in pieces:
        sizes = torch.tensor([len(one) for one in sets_of(piece.kept)], dtype=torch.int64)
        assert len(sizes) == len(piece.response_ids)
        assert torch.equal(piece.kept.rows, torch.arange(len(sizes)).repeat_interleave(sizes))
    assert len(wanted) == sum(RESPONSES)
    assert pack(batch, CPU, states=States.last).kept is None
    assert pack(training_batch(), CPU).kept is None


def nuclei(logits):
    """The smallest set of each row whose probability exceeds TOP_P, as a mask and as Kept."""
    probs, order = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
    inside = torch.zeros_like(logits, dtype=torch.bool)
    inside.scatter_(-1, order, probs.cumsum(-1) - probs < TOP_P)
    rows, ids = inside.nonzero(as_tuple=True)
    return inside, Kept(rows, ids, [0, *inside.sum(-1).cumsum(0).tolist()])


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    states = 2 * torch.randn(TOKENS, HIDDEN, generator=generator)
    return states, torch.randn(VOCAB, HIDDEN, generator=generator)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_log_probs_entropy_and_gradients_are_of_the_renormalised_softmax(
    chunk_tokens, dtype, keep_logits
):
    """Against autograd of an explicit masked softmax in float64."""
    states, head = (x.to(dtype) for x in model(0))
    inside, kept = nuclei((states @ head.T).float())
    assert 1 < inside.sum(-1).float().mean() < VOCAB / 2
    targets = torch.multinomial(inside.float(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(2))
    options = {"chunk_tokens": chunk_tokens, "keep_logits": keep_logits}
    outcomes = []
    for one in (dtype, torch.float64):
        x, w = (tensor.detach().to(one).requires_grad_() for tensor in (states, head))
        if one is dtype:
            log_probs, entropy, *_ = token_log_probs(
                x,
                targets,
                w,
                temperature=TEMPERATURE,
                entropy=Entropy.differentiate,
                kept=kept,
                **options,
            )
        else:
            cut = (x @ w.T / TEMPERATURE).masked_fill(~inside, -torch.inf).log_softmax(-1)
            log_probs = cut.gather(-1, targets[:, None])[:, 0]
            entropy = -(cut.exp() * cut.masked_fill(~inside, 0.0)).sum(-1)
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        outcomes.append([log_probs, entropy, x.grad, w.grad])
    for own, exact in zip(*outcomes, strict=True):
        difference = (own.detach().double() - exact.detach()).norm() / exact.detach().norm()
        assert difference < (1e-5 if dtype is torch.float32 else 0.1)  # its logits are rounded


def test_the_expected_ratio_under_what_was_sampled_is_1():
    """E[pi / mu] over mu's tokens, for a policy pi that has moved; without the sets it is less."""
    states, head = model(0)
    inside, kept = nuclei(states @ head.T)
    moved = head + 0.3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
    sizes = inside.sum(-1)
    # Every token that mu can sample, each with the set of its state.
    rows = torch.arange(TOKENS).repeat_interleave(sizes)
    sets = [kept.ids[kept.bounds[row] : kept.bounds[row + 1]] for row in rows.tolist()]
    bounds = torch.tensor([0, *map(len, sets)]).cumsum(0).tolist()
    of_all = Kept(torch.arange(len(rows)).repeat_interleave(sizes[rows]), torch.cat(sets), bounds)

    def log_probs(weight, kept):
        return token_log_probs(
            states[rows],
            kept_ids,
            weight,
            temperature=TEMPERATURE,
            chunk_tokens=64,
            entropy=Entropy.omit,
            keep_logits=False,
            kept=kept,
        ).log_probs

    kept_ids = kept.ids
    mu = log_probs(head, of_all)
    expected = {}
    for name, used in (("cut", of_all), ("whole", None)):
        ratio = (log_probs(moved, used) - mu).exp()
        expected[name] = torch.zeros(TOKENS).index_add(0, rows, mu.exp() * ratio)
    torch.testing.assert_close(expected["cut"], torch.ones(TOKENS), rtol=1e-5, atol=1e-5)
    assert expected["whole"].mean() < 0.8
    assert torch.equal(log_probs(head, of_all), mu)


def test_no_response_tokens():
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    nothing = torch.empty(0, dtype=torch.int64)
    result = token_log_probs(
        torch.empty(0, HIDDEN),
        nothing,
        head.weight,
        temperature=1.0,
        chunk_tokens=5,
        entropy=Entropy.report,
        keep_logits=False,
        kept=Kept(nothing, nothing, [0]),
    )
    assert result.log_probs.shape == (0,)
