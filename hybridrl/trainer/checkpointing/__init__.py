"""Checkpoints of a run: when they are saved, and resuming from one.

checkpointer.py: `Checkpointer`, called by the training loop; start reading there.
resume.py: the checkpoint to resume from, and differences of config, model, data and versions.
own_code.py: fingerprints of code that checkpoints do not hold; models/fingerprints.py: of models.
verification.py: progress of a verification, and its distribution over nodes.
Elsewhere: checkpoint/ (files on disk), workers/saver.py and distributed/storage/ (tensors).
"""
