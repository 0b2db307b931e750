"""Sampling seeds depend on nothing but their arguments; stop tokens come from all files."""

import json
from dataclasses import replace

import pytest
import torch

from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.rollout.sampling import sample_seeds


def batch(ids=(4, 9, 2), step=7, responses=3):
    rows = [[1] * (k + 1) for k in range(len(ids))]
    return PromptBatch(
        Ragged.from_rows(rows, torch.int64), torch.tensor(ids), step, responses, 1.0, 1.0
    )


def test_seeds_are_distinct_and_fit_an_int64():
    seeds = sample_seeds(0, batch(ids=tuple(range(100)), responses=8))
    assert len(seeds) == len(set(seeds)) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_do_not_depend_on_what_else_is_in_the_batch():
    whole = sample_seeds(0, batch())
    parts = [sample_seeds(0, batch(ids=(i,))) for i in (4, 9, 2)]
    assert whole == parts[0] + parts[1] + parts[2]


def test_seeds_depend_on_run_step_and_sample():
    assert not set(sample_seeds(0, batch())) & set(sample_seeds(1, batch()))
    assert not set(sample_seeds(0, batch())) & set(sample_seeds(0, batch(step=8)))
    more = replace(batch(ids=(4,)), responses_per_prompt=5)
    assert sample_seeds(0, more)[:3] == sample_seeds(0, batch(ids=(4,)))


def test_the_seed_is_the_documented_one():
    """BLAKE2b of "0/sample/7/4/0", first 8 bytes, big-endian, shifted right by one."""
    from hashlib import blake2b

    digest = blake2b(b"0/sample/7/4/0", digest_size=8).digest()
    assert sample_seeds(0, batch())[0] == int.from_bytes(digest, "big") >> 1


def test_seeds_go_by_each_prompts_own_sample():
    apart = replace(batch(responses=1), first_sample=torch.tensor([2, 0, 1]))
    whole = sample_seeds(0, batch())
    assert sample_seeds(0, apart) == [whole[2], whole[3], whole[7]]


def test_every_turn_of_a_conversation_has_seeds_of_its_own():
    """The first turn's are those of a response without turns."""
    turns = [sample_seeds(0, replace(batch(), turn=turn)) for turn in range(4)]
    assert turns[0] == sample_seeds(0, batch())
    assert len({seed for turn in turns for seed in turn}) == 4 * 9


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
