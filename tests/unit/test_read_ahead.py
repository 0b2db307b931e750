"""Reading a checkpoint ahead touches all of its weights and nothing else."""

import logging

from hybridrl.models.weight_files import BLOCK_BYTES, read_ahead


def test_all_weights_are_read(tmp_path, caplog):
    (tmp_path / "model-1.safetensors").write_bytes(bytes(BLOCK_BYTES + 3_000_000))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(4_000_000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(9_000_000))
    with caplog.at_level(logging.INFO):
        read_ahead(tmp_path).join(10)
    # 16 MiB are 16.8 MB
    assert "read 24 MB of weights" in caplog.text


def test_a_folder_without_weights_is_no_error(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        read_ahead(tmp_path).join(10)
    assert "read 0 MB of weights" in caplog.text
