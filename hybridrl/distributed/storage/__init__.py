"""Sharded state on disk: checkpoints, exports and the files of a model's weights.

Save: staging.py (host copy) -> saving.py (thread, torch.distributed.checkpoint) -> shard_files.py
Load: checkpoint.py, in place under any sharding or whole
Export: stored_policy.py or distributed/gathering.py -> export.py -> safetensors_file.py
Initial weights: mapped_weights.py

Start with saving.py. When a checkpoint is valid, named and kept is decided in checkpoint/.
"""
