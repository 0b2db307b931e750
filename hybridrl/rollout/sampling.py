"""Seeds of sampled responses, and the agreement of ranks on them."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from torch import Tensor

from hybridrl.data.batch import PromptBatch
from hybridrl.data.seeds import sample_seed
from hybridrl.rollout import vllm_compat


def sample_seeds(run_seed: int, prompts: PromptBatch) -> list[int]:
    """Return one seed per response, those of one prompt together.

    A pure function of (run seed, step, prompt id, sample index, turn), unless the prompts have
    seeds. Seeds do not depend on the engine or on other prompts, and ranks of one engine agree
    without communication.
    """
    if prompts.seeds is not None:
        return prompts.seeds.tolist()
    first = [0] * len(prompts) if prompts.first_sample is None else prompts.first_sample.tolist()
    turn = ("turn", prompts.turn) if prompts.turn else ()
    return [
        sample_seed(run_seed, prompts.step, prompt_id, start + index, *turn)
        for prompt_id, start in zip(prompts.prompt_id.tolist(), first, strict=True)
        for index in range(prompts.responses_per_prompt)
    ]


def check_ranks_agree(tensor_parallel_size: int, *tokens: Sequence[int] | Tensor) -> None:
    """Raise RuntimeError if a rank of the tensor-parallel group sampled other tokens."""
    if tensor_parallel_size == 1:
        return
    own = hashlib.blake2b()
    for row in tokens:
        own.update(len(row).to_bytes(8, "little"))
        own.update(np.asarray(row, np.int64).tobytes())
    digests: list[bytes] = [b""] * tensor_parallel_size
    group = vllm_compat.tensor_parallel_group()
    dist.all_gather_object(digests, own.digest(), group=group)
    if len(set(digests)) > 1:
        raise RuntimeError("the ranks of one rollout engine sampled different tokens")
