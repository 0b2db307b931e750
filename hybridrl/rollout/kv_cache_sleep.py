"""Sleep backend of vLLM for rollout.sleep=kv_cache: discards only the KV cache.

vLLM's own backend unmaps all allocations; level 1 copies the weights to host memory and back. Here
weights stay mapped, so that a reshard may write them while the engine sleeps. vLLM finds the class
through its registry of backends (`install`). Imports vllm: load it after
`vllm_compat.set_environment`.
"""

from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.cumem import unmap_and_release
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

NAME = "hybridrl_kv_cache"
KV_CACHE = "kv_cache"


class KVCacheBackend(CuMemBackend):
    """Backend that discards allocations tagged as KV cache; the others never move."""

    def suspend(self, level: int = 1) -> None:
        """Unmap the KV cache."""
        assert level == 1, "level 2 discards weights"
        self._state = "SUSPENDED"
        asleep = [
            data
            for data in get_mem_allocator_instance().pointer_to_data.values()
            if data.tag == KV_CACHE
        ]
        assert asleep, "vLLM has tagged no allocation as KV cache"
        torch.cuda.synchronize()
        for data in asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the KV cache again if it is among the tags; weights never moved."""
        if tags is None or KV_CACHE in tags:
            get_mem_allocator_instance().wake_up([KV_CACHE])
        self._state = "RUNNING"


def install(llm: Any) -> None:
    """Make an engine in this process use `KVCacheBackend`; call before its first sleep."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, KVCacheBackend.__name__)
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = NAME
    worker = llm.llm_engine.model_executor.driver_worker.worker
    assert worker._get_sleep_mode_backend().__class__ is KVCacheBackend, "vLLM sleeps already"
