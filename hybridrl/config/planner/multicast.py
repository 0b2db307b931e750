"""Environment variables that disable NVLink multicast in NCCL, torch, NVSHMEM and vLLM.

NCCL reads them when it creates a communicator, vLLM when it is imported.
"""

import os

SWITCHES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}


def turn_off_multicast() -> None:
    """Set the variables in this process, except those that are already set."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def uses_flashinfer_all_reduce() -> bool:
    """Return whether vLLM may use FlashInfer's all-reduce, which may use multicast."""
    name = "VLLM_ALLREDUCE_USE_FLASHINFER"
    return os.environ.get(name) != SWITCHES[name]
