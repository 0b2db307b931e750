"""Batches of a training step, and the prompts that a run is trained on.

batch.py lists the five batch types of a step with their shapes; ragged.py holds their storage.
schedule.py draws mini-batches and partitions them over ranks (partition.py).
lengths.py predicts response lengths. sources/ reads problems from files and the hub, and renders
them and the turns of conversations.

Model inputs (packing) are in distributed/forward; advantages and losses are in algorithms.
Start with batch.py.
"""
