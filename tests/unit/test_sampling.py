"""Sampling seeds depend on nothing but their arguments; stop tokens come from all files."""

import json
from hashlib import blake2b

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.data.seeds import sample_seed
from hybridrl.models.vocabulary import stop_token_ids

# Parts of a response's seed by turn.
TURNS = ((), ("turn", 1), ("turn", 2), ("turn", 3))


def test_seeds_are_distinct_and_fit_an_int64():
    seeds = [sample_seed(0, 7, p, k, *t) for p in range(100) for k in range(8) for t in TURNS]
    assert len(seeds) == len(set(seeds)) == 3200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not {*seeds} & {sample_seed(1, 7, p, k) for p in range(100) for k in range(8)}
    assert not {*seeds} & {sample_seed(0, 8, p, k) for p in range(100) for k in range(8)}


def test_the_seed_is_the_documented_one():
    """BLAKE2b of "0/sample/7/4/0", first 8 bytes, big-endian, shifted right by one."""
    digest = blake2b(b"0/sample/7/4/0", digest_size=8).digest()
    assert sample_seed(0, 7, 4, 0) == int.from_bytes(digest, "big") >> 1


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_stop_tokens_of_all_files(tmp_path):
    write(
        tmp_path,
        generation_config={"eos_token_id": [151645, 151643]},
        config={"eos_token_id": 151645},
        tokenizer_config={"eos_token": {"content": "<|eot|>"}},
        tokenizer={"added_tokens": [{"id": 9, "content": "<|eot|>"}, {"id": 8, "content": "x"}]},
    )
    assert stop_token_ids(tmp_path) == [9, 151643, 151645]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": {"model": {"vocab": {"a": 0, "<|end|>": 5}}}},
        {"tokenizer": {"model": {"vocab": [["a", 0.0], ["b", -1.5], ["<|end|>", -2.0]]}}},
        {"vocab": {"<|end|>": 7}},
        {"tokenizer_config": {"added_tokens_decoder": {"4": {"content": "<|end|>"}}}},
    ],
)
def test_an_end_token_that_only_the_tokenizer_names(tmp_path, files):
    write(tmp_path, special_tokens_map={"eos_token": "<|end|>"}, **files)
    assert len(stop_token_ids(tmp_path)) == 1


def test_files_that_name_no_stop_token(tmp_path):
    write(tmp_path, config={"eos_token_id": [None, -1]}, tokenizer_config={"eos_token": None})
    assert stop_token_ids(tmp_path) == []


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{bad")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        stop_token_ids(tmp_path)
