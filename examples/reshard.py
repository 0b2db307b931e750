"""Move the weights of an FSDP2 model into a vLLM of the same processes, verify them, and sample.

python examples/reshard.py                               one rank
torchrun --nproc-per-node=2 examples/reshard.py          FSDP2 shards -> tensor-parallel slices
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import hybridrl
from hybridrl.models.resolve import EMBEDDED_FOLDER

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ONE_RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
PROMPT = list(range(20, 40))  # token ids


def main() -> None:
    """Compare what vLLM generates, which starts with random weights, with transformers."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ONE_RANK.items()})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    sizes = {"max_model_len": 256, "kv_cache_memory_bytes": 2**26, "enable_chunked_prefill": False}
    with hybridrl.vllm_in_process(device):  # before other models: vLLM measures free memory
        from vllm import LLM, SamplingParams, TokensPrompt

        llm = LLM(
            str(EMBEDDED_FOLDER),
            load_format="dummy",
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=dist.get_world_size(),
            **sizes,
        )
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32).to(device)
    start = torch.tensor([PROMPT], device=device)
    expected = model.generate(start, max_new_tokens=16, do_sample=False)[0, len(PROMPT) :].tolist()
    for part in (*model.base_model.layers, model):
        fully_shard(part)

    metrics = hybridrl.Resharder(model, llm).sync(version=1, verify=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    (found,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], greedy, use_tqdm=False)
    assert list(found.outputs[0].token_ids) == expected, (found.outputs[0].token_ids, expected)
    if dist.get_rank() == 0:
        print(f"moved and verified: {metrics}\nvLLM as transformers: {expected}")


if __name__ == "__main__":
    main()
