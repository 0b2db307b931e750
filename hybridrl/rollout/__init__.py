"""Generation with vLLM inside the training process; the only folder that imports vllm.

- engine.py: the seam, an engine's methods; sampler.py, live.py: the loop over its decoding steps
- vllm_engine.py, vllm_steps.py: vLLM as an engine; start.py: its start and arguments
- trace.py, adapters.py: trace of the weight loader, LoRA inside vLLM's layers
- vllm_text.py: parsers of tool calls and checks of requests, for agents
- vllm_compat.py, vllm_experts.py, vllm_recorded.py, vllm_recurrent.py: further private
  names of vLLM

Weights are moved in reshard/, called by workers/rollout.py.
"""
