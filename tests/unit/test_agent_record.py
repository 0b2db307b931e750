"""Tokens of an episode: prefixes are used as sampled, others branch, nothing else is trained."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.episode import ANSWERS, Episode, Settings
from hybridrl.agents.record import EpisodeRecord, Images
from hybridrl.agents.training.batch import EpisodeResult, batch_of, check_turns
from hybridrl.config.choices import OtherSampling

PROMPT = "<u>2 + 3?<a>"


def encode(text: str, last: int | None, images: Images = ()) -> list[int]:
    """A token per two characters: not what a model would sample."""
    return [100 * len(text[k : k + 2]) + ord(text[k]) for k in range(0, len(text), 2)]


def sampled(record: EpisodeRecord, text: str, answer: str, **more: Any) -> list[int]:
    """Record an answer of one token per character; return its tokens."""
    tokens = [ord(character) for character in answer]
    log_probs = [-0.5 - k for k in range(len(tokens))]
    options = {"trained": True, "truncated": False} | more
    record.add(record.start(text), tokens, log_probs, [3] * len(tokens), answer, **options)
    return tokens


def result(record: EpisodeRecord, reward: float = 1.0) -> EpisodeResult:
    return EpisodeResult(0, 0, [7, 8], record.sequences, reward, 0)


def test_sampled_tokens_are_never_tokenised_again():
    """The tokenizer would make other tokens of the same text."""
    record = EpisodeRecord(encode)
    first = sampled(record, PROMPT, "five<e>")
    again = record.start(PROMPT + "five<e><u>more?<a>")
    assert encode("five<e>", None) != first
    assert again.prompt == [*encode(PROMPT, None), *first, *encode("<u>more?<a>", first[-1])]
    assert record.start(PROMPT + "five<e>").prompt == [*encode(PROMPT, None), *first]


def test_stripped_thinking_begins_another_sequence_with_an_example():
    record = EpisodeRecord(encode)
    sampled(record, PROMPT, "<think>hm</think>five<e>")
    second = sampled(record, PROMPT + "five<e><u>more?<a>", "six<e>")
    batch = batch_of([result(record)], 0, 1)
    assert len(record.sequences) == 2
    assert "'five<e><u>more?<a>'" in record.branch and "'<think>hm</think>five<e>'" in record.branch
    assert batch.responses.rows()[1].tolist() == second
    assert record.sequences[1].ids[:-6] == encode(PROMPT + "five<e><u>more?<a>", None)


def test_two_continuations_of_a_turn_train_it_once():
    record = EpisodeRecord(encode)
    sampled(record, PROMPT, "five<e>")
    starts = [record.start(f"{PROMPT}five<e><u>{k}<a>") for k in range(3)]
    for start in reversed(starts):  # in any order
        record.add(start, [9, 9], [-1.0, -2.0], [3, 3], "ok", trained=True, truncated=False)
    assert [len(sequence.turns) for sequence in record.sequences] == [2, 1, 1]
    batch = batch_of([result(record)], 0, 1)
    assert int(batch.response_mask.values.sum()) == len("five<e>") + 3 * 2


def test_a_request_may_go_back_to_an_earlier_turn():
    record = EpisodeRecord(encode)
    text = PROMPT
    for answer in ("one", "two", "three"):
        sampled(record, text, answer)
        text += answer + "<u>go<a>"
    back = record.start(PROMPT + "one<u>other<a>")
    assert back.prompt[: len(record.sequences[0].ids)] != record.sequences[0].ids
    assert back.prompt[len(encode(PROMPT, None)) :][:3] == [ord(c) for c in "one"]
    assert not record.branch


class Counted(str):
    """A request that counts the characters with which it is compared."""

    compared = 0

    def startswith(self, prefix: str, *_: Any) -> bool:
        Counted.compared += len(prefix)
        return super().startswith(prefix)


def test_a_long_transcript_is_compared_once_though_it_has_many_turns():
    """And where a request goes back to an earlier turn, as often as a search by halves does."""
    record, text, places = EpisodeRecord(encode), PROMPT, []
    for number in range(500):
        sampled(record, text, f"answer {number}<e>")
        text += f"answer {number}<e><u>go<a>"
        places.append(len(text))
    Counted.compared = 0
    assert record.start(Counted(text)).turn == 499 and Counted.compared <= len(text)
    Counted.compared = 0
    back = record.start(Counted(text[: places[123]] + "other"))
    assert back.turn == 123 and Counted.compared < 10 * len(text)


turns = st.lists(st.tuples(st.sampled_from(["a", "bc", "d<e>"]), st.booleans()), max_size=6)


@given(st.lists(turns, min_size=1, max_size=3))
def test_trained_tokens_are_the_sampled_ones(conversations):
    """Of any conversations, which may share beginnings: each token once, at its place."""
    record = EpisodeRecord(encode)
    expected = 0
    for conversation in conversations:
        text = PROMPT
        for answer, trained in conversation:
            sampled(record, text, answer, trained=trained)
            text += answer + "<u><a>"
            expected += trained * len(answer)
    batch = batch_of([result(record)], 3, 1)
    assert int(batch.response_mask.values.sum()) == expected
    assert (batch.rollout_log_probs.values[batch.response_mask.values] <= -0.5).all()
    assert batch.episode.tolist() == [0] * len(batch)


@pytest.mark.parametrize("damage", ["token", "log_prob", "mask"])
def test_the_fingerprint_of_a_turn_finds_what_was_not_sampled(damage):
    record = EpisodeRecord(encode)
    sampled(record, PROMPT, "five")
    sampled(record, PROMPT + "five<u><a>", "six")
    batch = batch_of([result(record)], 0, 1)
    fields = {"token": "responses", "log_prob": "rollout_log_probs", "mask": "response_mask"}
    values = vars(batch)[fields[damage]].values
    values[5 if damage == "mask" else -1] = 1
    with pytest.raises(RuntimeError, match="not"):
        check_turns(batch, record.sequences)


def test_an_episode_without_a_token_has_an_untrained_one_and_its_reward():
    batch = batch_of([result(EpisodeRecord(encode), -1.0)], 0, 4)
    assert batch.prompts.values.tolist() == [7, 8] and batch.responses.values.tolist() == [4]
    assert not batch.response_mask.values.any()
    reward = batch.conversation.environment_rewards
    assert torch.equal(reward, torch.tensor([-1.0], dtype=torch.float64))


@pytest.mark.parametrize(("most", "kept"), [(2, 2 * ANSWERS), (None, 100)])
def test_where_few_sequences_are_remembered_so_are_the_last_answers_alone(most, kept):
    settings = Settings(1.0, 1.0, 1.0, 1.0, 64, OtherSampling.refuse)
    episode = Episode("key", (1,), 0, settings, EpisodeRecord(encode, most))
    for number in range(100):
        episode.raw[str(number)], episode.answers[str(number)] = "five<e>", {}
        episode.asked[bytes([number])] += 1
        episode.forget_old()
    assert [*episode.raw] == [*episode.answers] == [str(k) for k in range(100)][-kept:]
    assert len(episode.asked) == kept
