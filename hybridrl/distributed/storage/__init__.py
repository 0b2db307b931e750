"""Sharded state on disk: checkpoints, exports, safetensors, staging buffers."""
