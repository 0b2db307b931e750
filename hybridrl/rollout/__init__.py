"""Generation with vLLM inside the training process; the only folder that imports vllm.

- engine.py: the seam, an engine's methods; sampler.py, live.py: the loop over its decoding steps
- vllm/engine.py, vllm/steps.py: vLLM as an engine; start.py: its start and arguments
- trace.py, adapters.py: trace of the weight loader, LoRA inside vLLM's layers
- vllm/text.py: parsers of tool calls and checks of requests, for agents
- vllm/compat.py and others there: further private names of vLLM

Weights are moved in reshard/, called by workers/rollout.py.
"""
