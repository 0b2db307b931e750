"""Move the weights of an FSDP2 model into a vLLM of the same processes, verify them, and sample.

python examples/reshard.py                               one rank
torchrun --nproc-per-node=2 examples/reshard.py          two ranks: FSDP2 shards -> vLLM TP slices
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybridrl
from hybridrl.models.resolve import EMBEDDED_FOLDER

PROMPT = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have?\n"


def main() -> None:
    """Generate with transformers, then the same with vLLM, which starts with random weights."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    device, folder = "cuda" if torch.cuda.is_available() else "cpu", str(EMBEDDED_FOLDER)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    alone = dist.HashStore() if os.environ["WORLD_SIZE"] == "1" else None
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                            store=alone, rank=rank, world_size=size)

    with hybridrl.vllm_in_process(device):  # before the model: vLLM measures free memory
        from vllm import LLM, SamplingParams, TokensPrompt

        llm = LLM(folder, load_format="dummy", dtype="float32", enforce_eager=True,
                  tensor_parallel_size=size, distributed_executor_backend="external_launcher",
                  max_model_len=256, kv_cache_memory_bytes=2**26, enable_chunked_prefill=False)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    inputs = torch.tensor([ids], device=device)
    expected = model.generate(inputs, max_new_tokens=24, do_sample=False)[0, len(ids):].tolist()
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)

    resharder = hybridrl.Resharder(model, llm)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    for version in range(2):
        if version == 1:
            print(f"rank {rank}:", resharder.sync(version, verify=True))
        found = llm.generate([TokensPrompt(prompt_token_ids=ids)], greedy, use_tqdm=False)
        print(f"rank {rank}, version {version}:", repr(found[0].outputs[0].text))
    assert list(found[0].outputs[0].token_ids) == expected, expected


if __name__ == "__main__":
    main()
