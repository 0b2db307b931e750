"""Sharded state on disk: checkpoints and exports.

Save: staging.py (host copy) -> saving.py (thread, torch.distributed.checkpoint)
Load: checkpoint.py, in place under any sharding or whole
Export: export.py, of a checkpoint or of distributed/gathering.py -> safetensors_file.py

Start with saving.py. When a checkpoint is valid, named and kept is decided in checkpoint/.
"""
