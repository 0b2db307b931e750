"""Configuration of a run: schema, loading, and all checks before a run starts.

Nothing here imports torch, ray, vllm or transformers, so that config errors appear at once. Models
and data are not read here. Start with load.py.
"""
