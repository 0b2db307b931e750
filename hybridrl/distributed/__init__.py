"""Sharded models on a rank: meshes, FSDP2, LoRA and offload.

- mesh.py, fsdp.py, weights.py, lora.py: load and shard policy, critic and reward model
- forward/: the packed forward; storage/: checkpoints and exports of sharded state
- regions.py, columns.py: plain data shared with rollout/ and reshard/
- offload.py, process_memory.py: memory; position.py, part_timer.py: progress and timing
- background.py: functions in threads
- torch_compat.py: all private names of torch

Start with fsdp.py. Roles and their losses are in workers/, the weight sync in reshard/.
"""
