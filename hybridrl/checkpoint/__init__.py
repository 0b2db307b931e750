"""Checkpoints as plain files: names (files.py), manifest, verification and search, commit.

    begin -> .step_00000020.partial -> the ranks write state/, the driver driver.json
    commit -> manifest.json, fsync, one rename -> step_00000020

Nothing here imports torch, ray, vllm or transformers. Elsewhere: distributed/storage/ (tensors in
state/), trainer/checkpointing/ (when a run saves, and resuming it). Start with files.py and
commit.py.
"""
