"""Sharded state on disk: checkpoints and exports.

Save: saving.py (host copy, then files in a thread)
Load: checkpoint.py, in place under any sharding or whole
Export: export.py, of a checkpoint or of a loaded policy -> safetensors_file.py

Start with saving.py. When a checkpoint is valid, named and kept is decided in checkpoint/.
"""
