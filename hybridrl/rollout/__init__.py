"""Generation with vLLM inside the training process; the only folder that imports vllm.

- vllm_engine.py: the engine that workers use; start.py: start of vLLM and its arguments
- requests.py, sampling.py: requests to the engine core, seeds and stop tokens
- trace.py, adapters.py: trace of the weight loader, LoRA inside vLLM's layers
- vllm_compat.py: all private names of vLLM

Weights are moved in reshard/, called by workers/rollout.py.
"""
