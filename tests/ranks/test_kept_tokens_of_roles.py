"""Actor and reference with sets of kept tokens, alone and where ranks share sequences.

Reference: the model of transformers, its logits masked and renormalised over each set.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.launch import run_on_ranks
from tests.support.role_configs import fsdp_config
from tests.support.sequence_cases import Run
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import training_batch, with_sets

TEMPERATURE = 0.8  # of the tests' roles


def scored(folder, changes):
    """Log-probs and entropies of the actor, log-probs of the reference, metrics of an update."""
    run = Run(folder, fsdp_config(**changes), "cpu")
    batch = with_sets(training_batch())
    dealt = run.dealt(batch, 4, 30)
    stats = run.per_token(dealt, run.actor.compute_token_stats).values
    old = run.per_token(dealt, run.actor.compute_log_probs)
    ref = run.per_token(dealt, run.reference.compute_log_probs).values
    assert torch.equal(stats.real, old.values)
    mine = run.dealt(batch.adding(old_log_probs=old), 4, 30).shard(run.shards)[run.shard]
    return old.values, stats.imag, ref, run.actor.update(mine, 1, kl_coef=0.1)


def renormalised(folder):
    """Log-probs and entropies of the batch's response tokens by transformers, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch = with_sets(training_batch())
    log_probs, entropies = [], []
    rows = zip(
        *(field.rows() for field in (batch.prompts, batch.responses, batch.kept_ids)),
        batch.kept_counts.rows(),
        strict=True,
    )
    for prompt, response, ids, counts in rows:
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None].long()).logits[0]
        sets = ids.long().split(counts.tolist())
        for token, kept, row in zip(response, sets, logits[len(prompt) - 1 :], strict=False):
            log_p = (row[kept] / TEMPERATURE).log_softmax(-1)
            log_probs.append(log_p[kept == token])
            entropies.append(-(log_p.exp() * log_p).sum(-1, keepdim=True))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize(
    ("ranks", "changes"), [(1, {"dp_shard": 1}), (2, {"dp_shard": 2, "ulysses_size": 2})]
)
def test_roles_normalise_over_the_kept_tokens(ranks, changes, tmp_path):
    folder = tiny_folder("qwen2", tmp_path)
    wanted, wanted_entropies = renormalised(folder)
    assert len(wanted) == len(training_batch().responses.values)
    assert wanted.max() == 0  # of a set of one token
    for old, entropies, ref, metrics in run_on_ranks(scored, ranks, folder, changes):
        torch.testing.assert_close(old.double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropies.double(), wanted_entropies, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ref, old, rtol=1e-4, atol=1e-4)
        assert metrics["actor/first_log_ratio_max"] == 0.0
        assert metrics["actor/log_ratio_max"] > 1e-4
