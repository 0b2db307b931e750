"""Checkpoints as plain files: what is in one, whether it is whole, how it appears and goes.

    begin -> .step_00000020.partial -> the ranks write state/, the driver driver.json
    commit -> manifest.json, fsync, one rename -> step_00000020, then `latest`

Nothing here imports torch, ray, vllm or transformers: any process may look at checkpoints.
"""
