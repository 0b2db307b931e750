"""Images in answers of environments: their tokens and tensors, faults, checkpoints."""

import base64
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Requests, SamplingParams
from hybridrl.data.sources.image_tokens import ImageProcessor, PromptFiles
from hybridrl.data.sources.images import read_image
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.data.sources.turns import TurnTokens
from hybridrl.environments.base import StepResult, Text, read_reply
from hybridrl.trainer.episodes.answers import AnswerImages
from hybridrl.trainer.episodes.base import Until
from hybridrl.trainer.episodes.conversations import Conversations, FailureReasons, Limits
from hybridrl.trainer.episodes.responses import Group, decode, encode
from hybridrl.trainer.episodes.turns import TurnEpisodes
from tests.support.fake_engine import FakeEngines
from tests.support.talking import Here
from tests.support.tiny_vision import PAD, QWEN_TOKENS, VIDEO, tiny_vision_folder
from tests.unit.test_agent_images import BLUE, LARGE, RED, SHOWN, TEMPLATE, url
from tests.unit.test_image_data import model_config

END = 1


class Shows:
    """Environment that answers with what the row has for each turn, and then ends."""

    def __init__(self, example: dict[str, Any]) -> None:
        self.opening, self.answers = example.get("opening", ""), [*example["answers"]]

    def reset(self) -> Text:
        return self.opening

    def step(self, text: str) -> StepResult:
        if not self.answers:
            return StepResult("", 1.0, True)
        return StepResult(self.answers.pop(0), 0.5, False)


def parts(*files: bytes, text: str = "w5") -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url(file)}} for file in files]
    return [{"type": "text", "text": text}, *images]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_vision_folder("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl")))


class Talk:
    """Conversations of a model whose engines say w9 and the end token, if not a stop text."""

    def __init__(self, folder: str, said: Sequence[int] = (9, 1)):
        self.model, self.stop = model_config(folder), ["w8"]
        self.tokenizer = load_tokenizer(self.model)
        if folder == "embedded":
            self.stop = []
        else:
            self.tokenizer.chat_template = TEMPLATE.replace(" w1 ", "w1 ")
        self.engines, self.failures = FakeEngines(lambda request: said), FailureReasons()

    def episodes(self, others: Sequence[Any] = ()) -> TurnEpisodes:
        conversations = Conversations(
            Here("tests.unit.test_answer_images.Shows"),
            TurnTokens(self.tokenizer, [END], self.stop, "user"),
            decoder(self.tokenizer),
            Limits(max_turns=5, max_tokens=60),
            self.failures,
            AnswerImages(self.model, others),
        )
        rollout = SimpleNamespace(seed=1, max_response_tokens=60, keep_kv=False)
        return TurnEpisodes(rollout, conversations, self.engines.generate)

    def prompt(self, number: int, *files: bytes, **example: Any) -> Prompt:
        ids, images = [2, 5], None
        if files:
            processor, read = ImageProcessor(self.model), tuple(read_image(f, None) for f in files)
            ids, tokens = processor.expanded([2, *[502, PAD, 503] * len(files)], read)
            images = PromptFiles(read, tokens, processor)
        return Prompt(number, ids, "w5", "q", example, {}, images=images)

    def talk(self, *prompts: Prompt, others: Sequence[Any] = ()) -> RolloutBatch:
        episodes = self.episodes(others)
        opened = zip(prompts, episodes.open(prompts), strict=True)
        groups = [Group(prompt, 1, 0, 0, (response,)) for prompt, response in opened]
        grown = episodes.grow(groups, Until(len(groups), len(groups)), SamplingParams(1.0))
        self.groups = grown.groups
        return episodes.batch(grown.groups)

    def reasons(self, batch: RolloutBatch) -> list[str]:
        numbers = batch.conversation.environment_failures.tolist()
        return [self.failures.look_up(number)[1] if number else "" for number in numbers]


def sources(requests: Requests) -> list[list[str]]:
    return [[key.rpartition("-")[2] for key in one.images.keys] for one in requests.requests]


KEYS = {file: read_image(file, None).key for file in (RED, BLUE, LARGE)}


def test_answers_are_messages_with_their_images_which_engines_and_trainer_get(folder):
    """In the second and third turn; the prompt has one, too, and another conversation none."""
    talk = Talk(folder)
    seeing = talk.prompt(0, LARGE, answers=[parts(RED), parts(BLUE, RED, text="w6")])
    batch = talk.talk(seeing, talk.prompt(1, answers=["w7", "w7"]))
    first, second, third = talk.engines.calls
    assert second.requests[0].prompt == [*seeing.token_ids, 9, 1, 2, 5, *SHOWN, 3]
    more = [9, 1, 2, 6, *SHOWN, *SHOWN, 3]
    assert third.requests[0].prompt == [*second.requests[0].prompt, *more]
    keys = [[KEYS[file] for file in files] for files in ((LARGE,), (LARGE, RED))]
    assert [sources(replaced(call))[0] for call in (first, second)] == keys
    assert sources(replaced(third))[0] == [KEYS[file] for file in (LARGE, RED, BLUE, RED)]
    assert second.requests[1].images is None
    seen, none = batch.images.rows
    assert none is None and len(seen) == 4
    ids = [*batch.prompts.rows()[0].tolist(), *batch.responses.rows()[0].tolist()]
    assert ids.count(PAD) == seen.tensors["image_grid_thw"].prod(-1).sum() // 4
    trained = batch.responses.values[batch.response_mask.values]
    assert set(trained.tolist()) == {9, 1} and not any(talk.reasons(batch))


def replaced(requests: Requests) -> Requests:
    """The requests of conversations with images."""
    return Requests([one for one in requests.requests if one.images], requests.group_id)


def test_after_a_stop_text_and_before_the_first_turn_an_image_stands_by_itself(folder):
    talk = Talk(folder, said=(9, 8))
    batch = talk.talk(talk.prompt(0, opening=parts(RED), answers=[parts(BLUE, text="w6")]))
    assert batch.responses.values.tolist() == [5, *SHOWN, 9, 8, 6, *SHOWN, 9, 8]
    assert len(batch.images.rows[0]) == 2


MARKED = [{"type": "text", "text": "w5 <image>"}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (f"w5 {QWEN_TOKENS[PAD]}", f"token {PAD}, which stands for images"),
        (f"w5 {QWEN_TOKENS[VIDEO]}", f"token {VIDEO}, which stands for images"),
        (parts(RED, text=QWEN_TOKENS[PAD]), "1 images, but 2 times <|image_pad|>"),
        (parts(RED, text=QWEN_TOKENS[VIDEO]), f"token {VIDEO} 1 times"),
        (parts(b"no image"), "of no format that Pillow reads"),
        ([{"type": "input_file"}], "a part of type input_file"),
        (MARKED, "0 images, but 1 times <image>"),
    ],
)
@pytest.mark.parametrize("place", ["opening", "answers"])
def test_a_wrong_answer_costs_its_own_response_alone(folder, answer, reason, place):
    talk = Talk(folder)
    wrong = {"answers": [answer]} if place == "answers" else {"opening": answer, "answers": []}
    batch = talk.talk(talk.prompt(0, **wrong), talk.prompt(1, answers=[parts(RED), "w7"]))
    failed, good = talk.reasons(batch)
    assert reason in failed and good == ""
    assert batch.conversation.environment_rewards[1] == 2.0
    assert batch.images.rows[0] is None and len(batch.images.rows[1]) == 1
    assert PAD not in batch.responses.rows()[0].tolist()


def test_models_that_take_no_images_are_named(folder):
    for talk, others in ((Talk("embedded", said=[5, 1]), ()), (Talk(folder), [NAMED])):
        (reason,) = talk.reasons(talk.talk(talk.prompt(0, answers=[parts(RED)]), others=others))
        assert "path = embedded takes none" in reason


NAMED = SimpleNamespace(key="reward_model.model.path", path="embedded")


def test_images_of_answers_survive_a_checkpoint(folder):
    talk = Talk(folder)
    batch = talk.talk(talk.prompt(0, answers=[parts(RED)]))
    text = json.dumps(encode(talk.groups))
    groups = decode(json.loads(text), lambda number: talk.groups[number].prompt)
    (response,) = groups[0].responses
    assert response.images == talk.groups[0].responses[0].images and len(response.images) == 1
    again = talk.episodes().batch(groups)
    assert again.images.rows[0].keys == batch.images.rows[0].keys
    assert torch.equal(again.responses.values, batch.responses.values)


def test_processes_send_parts_and_nothing_else():
    reply = ["state", [parts(RED), 1.0, False], None, ""]
    assert read_reply(json.loads(json.dumps(reply)), "f").result.text == parts(RED)
    with pytest.raises(TypeError, match="expected a StepResult"):
        read_reply(["state", [{"type": "text"}, 1.0, False], None, ""], "f")
    assert base64.b64encode(RED).decode() in json.dumps(reply)
