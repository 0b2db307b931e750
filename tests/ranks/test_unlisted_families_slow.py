"""Every family of transformers is either refused or computed as transformers computes it.

Nobody wrote down most of these families. A tiny random model of each is saved by transformers and
loaded by hybridrl, and their log-probs are compared: names in checkpoints, packing, logits.
"""

import json
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.forward.packing import pack
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.mesh import build_mesh, device_of
from tests.support.launch import run_on_ranks
from tests.support.role_configs import fsdp_config, model_config
from tests.support.tiny_hf import SIZES
from tests.support.training_batches import training_batch

pytestmark = pytest.mark.slow

SMALL = SIZES | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 4}
SMALL |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Elements; some families keep other sizes of their own.
LARGEST = 20_000_000
# Of these no test has a tiny model of its own.
UNLISTED = {"arcee", "cohere", "cwm", "ernie4_5", "flex_olmo", "gemma", "glm", "helium"}
UNLISTED |= {"hyperclovax", "jais2", "mellum", "olmo", "persimmon", "starcoder2", "bitnet"}
UNLISTED |= {"deepseek_v2", "exaone_moe", "glm4_moe", "granite_swa", "hunyuan_v1_dense"}
UNLISTED |= {"minicpm3", "minimax_m3_vl_text", "ministral", "nanochat", "solar_open"}


def largest_difference(config, folder):
    """Of log-probs to transformers', of each sequence alone; relative where below -1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    batch, expected = training_batch(), []
    with torch.no_grad():  # before the policy wants bounds of recurrent layers
        for prompt, response in zip(batch.prompts.rows(), batch.responses.rows(), strict=True):
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
            log_p = (logits[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            expected.append(log_p.gather(-1, response[:, None])[:, 0])
        spec = fsdp_config(dp_shard=1)
        mesh = build_mesh(spec, "cpu")
        policy = load_sharded_policy(model_config(folder), spec, mesh, chunk_tokens=7)
        own = policy(pack(batch, device_of(mesh)), 0.8, Entropy.omit).log_probs
    whole = torch.cat(expected)
    return float(((own - whole) / whole.abs().clamp(min=1)).abs().max())


def small_config(kind):
    """A config with which transformers' own model runs; None if these sizes do not suit it."""
    for key_heads in (2, 4):
        with suppress(Exception):
            config = CONFIG_MAPPING[kind](**SMALL | {"num_key_value_heads": key_heads})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            if sum(param.numel() for param in model.parameters()) <= LARGEST:
                AutoModelForCausalLM.from_config(config)(input_ids=torch.ones(1, 4).long())
                return config
    return None


def compare_all(folder):
    """The largest difference of each family, or why it is refused."""
    differences, refusals = {}, {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (config := small_config(kind)) is None:
            continue
        try:
            model_shape(json.loads(config.to_json_string()) | {"model_type": kind})
        except ConfigError as error:
            refusals[kind] = error.texts[0]
            continue
        try:
            differences[kind] = largest_difference(config, folder / kind)
        except Exception as error:
            differences[kind] = repr(error)
    return differences, refusals


def test_no_family_is_computed_otherwise_than_by_transformers(tmp_path):
    ((differences, refusals),) = run_on_ranks(compare_all, 1, tmp_path, time_limit_s=900)
    failed = {kind: size for kind, size in differences.items() if isinstance(size, str)}
    assert failed == {}
    assert {kind: size for kind, size in differences.items() if size > 1e-5} == {}
    assert differences.keys() >= UNLISTED
    assert len(refusals) > 40
