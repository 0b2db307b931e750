"""A reward model in the rewards, by hand; vocabularies compared; its line in the header."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import FrozenModel
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.models.resolve import EMBEDDED_FOLDER
from hybridrl.models.vocabulary import read_vocabulary, vocabulary_problems
from hybridrl.rewards.none import score
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.rewarding import Rewarded, add_model_scores
from hybridrl.trainer.tracking.header import count_text, header_lines
from tests.support.batches import batch_of
from tests.support.model_shapes import TINY
from tests.support.role_configs import fsdp_config, reward_model_config
from tests.support.run_configs import run_config
from tests.support.tokenizer_folders import model_folder


def model_scores(*last):
    """Two responses of 3 and 1 tokens, scored on their last ones."""
    return Ragged(torch.tensor([0.0, 0.0, last[0], last[1]]), torch.tensor([3, 1]))


def test_scores_are_added_with_their_weight():
    """1 - 0.5 * 4 = -1; 0 - 0.5 * -0.2 = 0.1; the model's mean (4 - 0.2) / 2 has no weight."""
    by_function = Rewarded(["a", "b"], [1.0, 0.0], [])
    scores = model_scores(4.0, -0.2)
    rewarded, metrics = add_model_scores(by_function, batch_of([3, 1]), scores, -0.5)
    assert rewarded.scores == pytest.approx([-1.0, 0.1])
    assert rewarded.texts == ["a", "b"]
    assert metrics == {"reward/model_mean": pytest.approx(1.9)}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_ends_the_run(wrong):
    with pytest.raises(RunStopped, match="scored 1 of 2 responses NaN or infinite"):
        by_function, scores = Rewarded(["a", "b"], [1.0, 0.0], []), model_scores(wrong, 1.0)
        add_model_scores(by_function, batch_of([3, 1]), scores, 1.0)


def test_an_episode_has_one_score_the_mean_of_its_sequences_by_sampled_tokens():
    """Of 1 and 3 sampled tokens: (4 + 3 * 0) / 4 = 1; the second episode sampled none in two."""
    batch = batch_of([2, 3, 1, 1])
    sampled = torch.tensor([True, False, True, True, True, False, False])
    mask, episode = batch.responses.like(sampled), torch.tensor([0, 0, 1, 1])
    batch = replace(batch, response_mask=mask, episode=episode)
    scores = batch.responses.like(torch.tensor([9.0, 4.0, 9.0, 9.0, 0.0, 2.0, 4.0]))
    by_function = Rewarded(list("abcd"), [0.5, 0.5, 0.0, 0.0], [])
    rewarded, metrics = add_model_scores(by_function, batch, scores, 2.0)
    assert rewarded.scores == [2.5, 2.5, 6.0, 6.0]
    assert metrics == {"reward/model_mean": 2.0}


def test_no_reward_is_0():
    assert score("prompt", "#### 4", {"answer": "4"}) == 0.0


def test_the_header_names_it():
    folder = Path("/rm")
    config = replace(
        run_config(), reward_model=reward_model_config(folder, fsdp_config(dp_shard=1))
    )
    facts = folder, "", PromptSets([], [], []), 10
    shape = model_shape(TINY)
    models = [
        FrozenModel(name="reward_model", key="", path="/rm", has_head=False, weight=1, shape=shape)
    ]
    lines = header_lines(config, *facts, models)
    size = count_text(shape.backbone_parameters + shape.hidden)
    assert ("reward model", f"/rm, {size} parameters, weight 1") in lines
    assert "reward model" not in dict(header_lines(run_config(), *facts))


def words(folder, text):
    return str(model_folder(folder, [text]))


def edited(source, folder, change):
    """A copy of a folder whose tokenizer.json was changed."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def test_a_model_has_its_own_vocabulary(tmp_path):
    tokens = read_vocabulary("embedded")
    assert sorted(tokens) == list(range(640))
    copied = shutil.copytree(EMBEDDED_FOLDER, tmp_path / "copied")
    assert list(vocabulary_problems("embedded", str(copied))) == []


def test_the_first_differing_token_is_named(tmp_path):
    """Five special tokens, then the words by alphabet: b is 6 for the one and c for the other."""
    policy, reward = words(tmp_path / "p", "a b c d"), words(tmp_path / "r", "a c d")
    (problem,) = vocabulary_problems(policy, reward)
    assert (problem.id, problem.value) == ("other_vocabulary", reward)
    assert "token" in problem.why and "of 9 tokens differ" in problem.why
    assert "reward=http" in problem.remedy


def test_further_tokens_of_the_reward_model_are_no_problem_and_missing_ones_are(tmp_path):
    policy = words(tmp_path / "p", "a b")

    def pad(content):
        content["added_tokens"].append(content["added_tokens"][0] | {"id": 7, "content": "<pad>"})

    more = edited(policy, tmp_path / "more", pad)
    assert list(vocabulary_problems(policy, more)) == []
    (problem,) = map(str, vocabulary_problems(more, policy))
    assert "token 7, '<pad>', means nothing there (1 of 8 tokens" in problem


def test_a_list_of_pieces_is_a_vocabulary_too(tmp_path):
    """Unigram models: the id is the place."""

    def pieces(content):
        content["model"] = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}
        content["added_tokens"] = [{"id": 2, "content": "</s>"}]

    folder = edited(words(tmp_path / "w", "a"), tmp_path / "unigram", pieces)
    assert read_vocabulary(folder) == {0: "<unk>", 1: "a", 2: "</s>"}


def test_what_cannot_be_compared_is_refused(tmp_path):
    policy = words(tmp_path / "p", "a b")
    bare = Path(shutil.copytree(policy, tmp_path / "bare"))
    (bare / "tokenizer.json").write_text('{"model": 3}')
    (problem,) = map(str, vocabulary_problems(policy, str(bare)))
    assert f"reward_model.model.path = {bare}" in problem and "is no tokenizer's" in problem
    (bare / "tokenizer.json").unlink()
    (problem,) = map(str, vocabulary_problems(policy, str(bare)))
    assert f"reward_model.model.path = {bare} has no tokenizer.json" in problem
    (problem,) = map(str, vocabulary_problems(policy, str(tmp_path / "nowhere")))
    assert problem.startswith(f"reward_model.model.path = {tmp_path / 'nowhere'}: ")
