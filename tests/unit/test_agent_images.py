"""Images in messages of programs: forms, token sequences, faults, and their way to the engines."""

import asyncio
import base64
import json
from types import SimpleNamespace

import pytest
import torch

from hybridrl.agents.chat import Chat
from hybridrl.agents.episode import Episode, RequestError, Settings
from hybridrl.agents.format import Format
from hybridrl.agents.images import images_of
from hybridrl.agents.messages import Messages
from hybridrl.agents.policy import Policy
from hybridrl.agents.record import EpisodeRecord, decode_sequences, encode_sequences
from hybridrl.agents.responses import Responses
from hybridrl.agents.text import ModelText
from hybridrl.agents.text_completions import TextCompletions
from hybridrl.agents.training.batch import EpisodeResult, batch_of
from hybridrl.agents.training.programs import task_of
from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.choices import OtherSampling
from hybridrl.data.images import HELD, HeldImages, PromptImages
from hybridrl.data.requests import Progress, Request, SamplingParams, decode_message, encode
from hybridrl.data.sources.images import ImageText, read_image
from hybridrl.data.sources.tokenizer import load_tokenizer
from tests.support.tiny_vision import PAD, QWEN_TOKENS, VIDEO, tiny_vision_folder
from tests.unit.test_image_data import model_config, png

# As chat templates of models: an answer ends with the end token, w1.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }} w1 {% else %}w2 "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|>"
    "{% else %}{{ part.text }}{% endif %} {% endfor %}{% endif %} w3 {% endif %}{% endfor %}"
)
SHOWN = [502, PAD, PAD, 503]
RED, BLUE, LARGE = png(), png(color="blue"), png((128, 64))


def url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def asked(*files: bytes, text: str = "w5") -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url(file)}} for file in files]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


class Answering:
    """Engines that answer w9 at once."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> "asyncio.Queue[Progress]":
        self.requests.append(request)
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        queue.put_nowait(Progress(request.request_id, [9, 1], [-0.5, -0.25], "STOP", 3))
        return queue

    def cancel(self, request: Request) -> None:
        pass


class Talk:
    """An episode at the endpoint of a model, whose engines answer w9."""

    def __init__(self, folder: str, others=(), context: int = 100) -> None:
        model = model_config(folder)
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = TEMPLATE
        self.text = ModelText(tokenizer, [1], images=images_of(model, others))
        self.engines = Answering()
        self.policy = Policy(self.text, self.engines)
        settings = Settings(1.0, 1.0, 1.0, 1.0, context, OtherSampling.refuse)
        record = EpisodeRecord(self.text.encode)
        self.episode = Episode("key", (1,), 0, settings, record)
        self.policy.open(self.episode)

    def say(self, body: dict, form: Format | None = None) -> Request:
        """Ask, and return the engine's request."""
        form = form or Chat()
        request = form.parse(json.dumps(body).encode())
        begun = self.policy.begin(
            self.episode, form.ask(self.policy, self.episode, request), request.count
        )
        sampled = asyncio.run(self.policy.complete(self.episode, begun))
        form.answer(self.policy, self.episode, request, sampled)
        return self.engines.requests[-1]

    @property
    def sequences(self):
        return self.episode.record.sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_vision_folder("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl")))


@pytest.fixture
def talk(folder):
    return Talk(folder)


TEXT = {"type": "text", "text": "w5"}
DATA = {"type": "base64", "media_type": "image/png", "data": url(RED).partition(",")[2]}


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (Chat(), {"type": "image_url", "image_url": {"url": url(RED), "detail": "low"}}),
        (Responses(), {"type": "input_image", "image_url": url(RED), "detail": "auto"}),
        (Messages(), {"type": "image", "source": DATA}),
        (Messages(), {"type": "image", "source": {"type": "url", "url": url(RED)}}),
    ],
)
def test_every_form_gives_the_same_prompt(talk, form, part):
    message = {"role": "user", "content": [TEXT, part]}
    name = "input" if isinstance(form, Responses) else "messages"
    request = talk.say({name: [message], "max_tokens": 9}, form)
    assert request.prompt == [2, 5, *SHOWN, 3]
    image = read_image(url(RED), None)
    assert [key.rpartition("-")[2] for key in request.images.keys] == [image.key]
    # The conversation as it was sent, for judges.
    (question, answer) = talk.episode.transcript()[0]
    assert question["content"][1] == {"type": "image_url", "image_url": {"url": url(RED)}}
    assert answer["content"] == "w9"


def test_results_of_tools_may_be_images(talk):
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "image", "source": DATA}],
    }
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": [{"type": "text", "text": "w8"}, use]},
        {"role": "user", "content": [result]},
    ]
    request = talk.say({"messages": messages, "max_tokens": 9}, Messages())
    assert request.prompt == [2, 5, 3, 8, 1, 2, *SHOWN, 3]


def test_a_later_turn_expands_its_own_images_alone(talk):
    said = {"role": "assistant", "content": "w9"}
    first = talk.say({"messages": [asked(RED)]})
    second = talk.say({"messages": [asked(RED), said, asked(BLUE, RED, text="w6")]})
    assert second.prompt == [*first.prompt, 9, 1, 2, 6, *SHOWN, *SHOWN, 3]
    assert len(second.images) == 3 and second.images.keys[0] == first.images.keys[0]
    assert second.images.keys[2] == first.images.keys[0] != second.images.keys[1]
    (sequence,) = talk.sequences
    assert [turn.images for turn in sequence.turns] == [1, 3]
    alone = first.images.tensors["pixel_values"]
    assert torch.equal(second.images.tensors["pixel_values"][: len(alone)], alone)


def test_the_same_text_about_another_image_is_another_conversation(talk):
    said = {"role": "assistant", "content": "w9"}
    more = {"role": "user", "content": "w6"}
    first = talk.say({"messages": [asked(RED)]})
    other = talk.say({"messages": [asked(BLUE)]})
    assert first.prompt == other.prompt and first.seed != other.seed
    talk.say({"messages": [asked(BLUE), said, more]})
    talk.say({"messages": [asked(RED), said, more]})
    red, blue = talk.sequences
    assert [len(red.turns), len(blue.turns)] == [2, 2]
    assert [red.images[0].source, blue.images[0].source] == [RED, BLUE]
    assert talk.episode.record.branch == "the request has other images than were recorded"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "https://x.org/1.png"}}],
            "'https://x.org/1.png'",
        ),
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "the endpoint loads none"),
        (
            [{"type": "image_url", "image_url": {"url": url(b"x" * 99)}}],
            "no format that Pillow reads",
        ),
        ([{"type": "image_url", "image_url": {"url": url(RED[:60])}}], "cannot be decoded"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "not in Base64"),
        ([{"type": "input_file", "file_id": "1"}], "reads texts and images, not input_file"),
        ([{"type": "text", "text": QWEN_TOKENS[PAD]}], "0 images, but 1 times <|image_pad|>"),
        (
            [{"type": "text", "text": QWEN_TOKENS[VIDEO]}, *asked(RED)["content"]],
            "token 501 1 times",
        ),
        ([{"type": "text", "text": "<|vision_end|>"}, *asked(RED)["content"]], "token 503 2 times"),
        (asked(LARGE, LARGE)["content"], "maximum context length is 12 tokens"),
    ],
)
def test_faults_are_refused_by_name_and_the_episode_goes_on(folder, parts, reason):
    talk = Talk(folder, context=12)
    with pytest.raises(RequestError) as refused:
        talk.say({"messages": [{"role": "user", "content": parts}]})
    assert reason in refused.value.message and refused.value.status == 400
    assert not talk.engines.requests
    assert talk.say({"messages": [asked(RED)]}).prompt == [2, 5, *SHOWN, 3]


def test_a_text_as_it_is_has_no_images(talk):
    with pytest.raises(RequestError, match="0 images, but 1 times"):
        talk.say({"prompt": "w5 <|image_pad|>"}, TextCompletions())


def test_models_without_a_tower_say_so(folder):
    with pytest.raises(RequestError, match="has no vision_config"):
        Talk("embedded").say({"messages": [asked(RED)]})
    reward = SimpleNamespace(model=SimpleNamespace(path="embedded"), weight=1.0)
    others = named_models(SimpleNamespace(reward_model=reward, teacher=None))
    with pytest.raises(RequestError, match="path = embedded takes no images"):
        Talk(folder, others).say({"messages": [asked(RED)]})
    assert Talk(folder, others).say({"messages": [asked()]}).images is None


def test_rows_have_all_images_of_their_tokens_and_survive_a_checkpoint(talk):
    said = {"role": "assistant", "content": "w9"}
    talk.say({"messages": [asked(RED)]})
    talk.say({"messages": [asked(RED), said, asked(LARGE)]})
    talk.say({"messages": [{"role": "user", "content": "w5"}]})
    kept = decode_sequences(json.loads(json.dumps(encode_sequences(talk.sequences))))
    assert [one.images for one in kept] == [one.images for one in talk.sequences]
    task = (read_image(url(RED), None),)
    results = [
        EpisodeResult(0, 0, [], kept, 1.0, 0),
        EpisodeResult(0, 0, [2, *SHOWN, 3], [], 0.0, 0, images=task),
        EpisodeResult(0, 0, [], talk.sequences, 1.0, 0),
    ]
    batch = batch_of(results, 0, 1, talk.text.images)
    seen, none, nothing, again, _ = batch.images.rows
    assert none is None and again is seen and len(seen) == 2 and len(nothing) == 1
    for images, row in ((seen, 0), (nothing, 2)):
        ids = [*batch.prompts.rows()[row].tolist(), *batch.responses.rows()[row].tolist()]
        assert ids.count(PAD) == images.tensors["image_grid_thw"].prod(-1).sum() // 4


def test_programs_get_images_in_the_form_that_the_endpoint_reads(talk):
    files = [read_image(RED, None), read_image(png(form="JPEG"), None)]
    text = ImageText("w5 <image> w6 <image>", files)
    prompt = SimpleNamespace(
        example={},
        messages=[{"role": "user", "content": text}, {"role": "user", "content": "w7"}],
        text="",
    )
    task = task_of(prompt)
    assert [part["type"] for part in task.messages[0]["content"]] == ["text", "image_url"] * 2
    assert "data:image/jpeg" in json.dumps(task.messages)
    request = talk.say({"messages": task.messages})
    assert request.prompt == [2, 5, *SHOWN, 6, *SHOWN, 3, 2, 7, 3]
    assert [key.rpartition("-")[2] for key in request.images.keys] == [one.key for one in files]


def made(key: str) -> PromptImages:
    return PromptImages(
        (key, "other"),
        {"pixel_values": torch.rand(64, 96), "image_grid_thw": torch.ones(2, 3).long()},
    )


def test_images_of_live_requests_travel_once_for_as_long_as_both_ends_hold_them():
    ours, theirs = HeldImages(), HeldImages()

    def sent(images: PromptImages) -> tuple[int, PromptImages]:
        request = Request("1", [1], 5, 9, SamplingParams(1.0), 0, images=images)
        line = encode(request, ours)
        received = decode_message(line, theirs)
        assert received._replace(images=images) == request
        assert received.images.keys == images.keys
        for name, tensor in images.tensors.items():
            assert torch.equal(received.images.tensors[name], tensor)
        return len(line), received.images

    first = made("first")
    (long, one), (short, same) = sent(first), sent(first)
    assert long > 64 * 96 * 4 > 1000 > short and same is one
    for number in range(HELD):
        sent(made(str(number)))
    assert sent(first)[0] == long
