"""The run's configuration: schema, loading and the checks made before anything starts.

Nothing here imports torch, ray, vllm or transformers, so that a wrong key is answered at once.
"""
