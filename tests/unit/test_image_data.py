"""Images of problems: forms in which rows have them, faults by row, tokens and tensors."""

import base64
import gc
import json
import pickle
import weakref
from io import BytesIO

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from hybridrl.app.data import examine_data
from hybridrl.config.choices import Init, Repeated
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.requests import SamplingParams
from hybridrl.data.sources.image_tokens import processed
from hybridrl.data.sources.images import ImageText, images_in, read_image
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import load_prompts
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.models.processors import load_processor
from hybridrl.trainer.episodes.base import Until
from hybridrl.trainer.episodes.responses import Group, Response
from hybridrl.trainer.episodes.turns import TurnEpisodes, Turns
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.tracking.rollout_log import rollout_records, write_rollouts, write_thumbnails
from tests.support.batches import batch_of
from tests.support.composing import examined
from tests.support.data_configs import data_config, jsonl
from tests.support.fake_engine import FakeEngines
from tests.support.sampling_fakes import in_flight_config
from tests.support.tiny_vision import PAD, VISION, tiny_vision_folder

WORDS = "w5 w6"


def model_config(path):
    return ModelConfig(path=path, init=Init.pretrained, seed=0, trust_remote_code=False)


def png(size=(64, 32), color="red", form="PNG"):
    file = BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tiny_vision_folder(name, tmp_path_factory.mktemp(name)) for name in VISION}


@pytest.fixture
def load(tmp_path, folders):
    (tmp_path / "red.png").write_bytes(png())
    (tmp_path / "cut.png").write_bytes(png()[:60])
    Image.new("I;16", (32, 32)).save(tmp_path / "deep.png")
    Image.new("1", (8000, 5000)).save(tmp_path / "wide.png")
    (tmp_path / "blue.jpg").write_bytes(png((32, 64), "blue", "JPEG"))

    def of(rows, family="qwen3_vl", **changes):
        filler = [{"question": f"w{10 + n}", "answer": "1"} for n in range(8)]
        files = {
            "train_files": str(jsonl(tmp_path / "train.jsonl", [*rows, *filler])),
            "eval_files": str(jsonl(tmp_path / "eval.jsonl", [{"question": "w9", "answer": "1"}])),
        }
        config = data_config(**files | changes)
        model = model_config(str(folders[family]))
        return load_prompts(config, model, 200).train

    return of


def row(question=f"{WORDS} <image> w7", **more):
    return {"question": question, "answer": "2"} | more


DATA_URL = "data:image/png;base64," + base64.b64encode(png()).decode()
PARTS = [
    {"type": "text", "text": "w5 w6"},
    {"type": "image"},
    {"type": "text", "text": "w7"},
]


def with_part(**part):
    content = [PARTS[0], {"type": "image", **part}, PARTS[2]]
    return row([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "given",
    [
        row(images=["red.png"]),
        row(images="red.png"),
        row(images=[{"bytes": None, "path": "red.png"}]),
        row(images=[{"image": "red.png"}]),
        row(images=[DATA_URL]),
        row([{"role": "user", "content": f"{WORDS} <image> w7"}], images=["red.png"]),
        row([{"role": "user", "content": PARTS}], images=["red.png"]),
        with_part(image="red.png"),
        with_part(type="image_url", image_url={"url": DATA_URL}),
    ],
)
def test_every_form_of_a_row_gives_the_same_prompt(load, given):
    prompt, text = load([given])[:2]
    assert prompt.images.tokens == [2]
    assert prompt.token_ids == [2, 5, 6, 502, PAD, PAD, 503, 7, 3]
    assert text.images is None
    (image,) = prompt.images.files
    assert image.size == (64, 32)
    assert image.open().getpixel((0, 0)) == (255, 0, 0)
    json.dumps(prompt.example)


def test_bytes_of_parquet_are_read_and_do_not_reach_rewards(load, tmp_path):
    rows = [row(images=[{"bytes": png(), "path": None}]), row("w8", images=[])]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = load([], train_files=str(path), prompts_per_step=1)
    assert first.images.tokens == [2]
    assert second.images is None
    assert first.example["images"] == [{"bytes": f"{len(png())} bytes", "path": None}]


def test_images_without_a_place_stand_before_the_question(load):
    prompt = load([row("w7", images=["red.png", "blue.jpg"])])[0]
    assert prompt.images.tokens == [2, 2]
    assert prompt.token_ids == [2, *[502, PAD, PAD, 503] * 2, 7, 3]


def test_a_mark_without_a_column_is_text(load):
    assert load([row()])[0].images is None
    assert load([row(images=["red.png"])], images_key=None)[0].images is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (row(images=["absent.png"]), "absent.png: No such file"),
        (row(images=["train.jsonl"]), "train.jsonl is of no format that Pillow reads"),
        (row(images=["cut.png"]), "cut.png cannot be decoded"),
        (row(images=["wide.png"]), "wide.png has 8000 x 5000 pixels, more than 33,554,432"),
        (row(images=["deep.png"]), r"deep.png has more than 8 bits a colour \(mode I;16\)"),
        (row(images=[base64.b64encode(png()).decode()]), "File name too long|No such file"),
        (row(images=["data:image/png;base64,@"]), "not in Base64"),
        (row(images=["https://example.com/a.png"]), "is an address"),
        (row(images=[7]), "an image is int, expected a path"),
        (row(images=["red.png"] * 2), "2 images, but 1 times <image>"),
        (row(images=[]), "0 images, but 1 times <image>"),
        (row([{"role": "user", "content": PARTS}]), "0 images, but 1 times <image>"),
        (row([{"role": "user", "content": [{"type": "video"}]}]), "part of type video"),
        (row("w5 <|image_pad|>"), "its prompt"),
        (row("w5 <|image_pad|>", images="red.png"), "1 images, but 2 times <.image_pad.>"),
    ],
)
def test_a_fault_is_named_with_its_row(load, given, reason):
    with pytest.raises(ConfigError, match=rf"train.jsonl:1: .*({reason})"):
        load([given])


def test_a_truncated_image_is_found_before_the_run(load, tmp_path):
    (tmp_path / "cut.jpg").write_bytes(png((640, 640), form="JPEG")[:-200])
    with pytest.raises(ConfigError, match=r"cut.jpg cannot be decoded: .*truncated"):
        load([row(images=["cut.jpg"])])


def test_the_models_limits_count_expanded_tokens(load, tmp_path):
    (tmp_path / "thin.png").write_bytes(png((3000, 10)))
    with pytest.raises(ConfigError, match=r"train.jsonl:1: .*aspect ratio"):
        load([row(images=["thin.png"])])
    (tmp_path / "large.png").write_bytes(png((600, 600)))
    with pytest.raises(ConfigError, match="max_prompt_tokens = 200, but 1 of"):
        load([row("<image>" * 14, images=["large.png"] * 14)])


def test_models_without_eyes_say_so(load, tmp_path):
    model = model_config("embedded")
    path = str(jsonl(tmp_path / "rows.jsonl", [row(f"w{n}", images="red.png") for n in range(9)]))
    with pytest.raises(ConfigError, match=r"model.path = embedded takes none"):
        load_prompts(data_config(train_files=path), model, 200)


@pytest.mark.parametrize("family", VISION)
def test_tokens_and_tensors_are_those_of_the_models_processor(load, folders, family, tmp_path):
    (tmp_path / "wide.png").write_bytes(png((100, 60)))
    names = ["red.png", "wide.png"]
    prompt = load([row("w5 <image> w6 <image> w7", images=names)], family)[0]
    images = [Image.open(tmp_path / name) for name in names]
    processor = load_processor(folders[family])
    processor.tokenizer = load_tokenizer(model_config(str(folders[family])))
    expected = processor(images=images, text=[prompt.text], return_tensors="pt")
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    tensors = prompt.images.processed().tensors
    assert tensors.keys() == expected.keys() - {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
    }
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_a_prompt_is_processed_once_for_as_long_as_someone_holds_it(load):
    first, other, text = load([row(images=["red.png"]), row(images=["blue.jpg"])])[:3]
    made = processed([first.images, text.images, first.images, other.images])
    assert made[0] is made[2]
    assert made[1] is None
    assert first.images.processed() is made[0]
    assert made[0].keys != made[3].keys
    key, held = made[0].keys, weakref.ref(made[0])
    del made
    gc.collect()
    assert held() is None
    assert first.images.processed().keys == key


def test_the_same_question_about_another_image_is_another_problem(load):
    rows = [row(images=["red.png"]), row(images=["blue.jpg"]), row(images=["red.png"])]
    prompts = load(rows, duplicates=Repeated.drop)
    assert [prompt.where.rpartition(":")[2] for prompt in prompts[:3]] == ["1", "2", "4"]
    before = PromptSource(prompts, 4, 0).fingerprint["tokens"]
    assert before == PromptSource(load(rows, duplicates=Repeated.drop), 4, 0).fingerprint["tokens"]
    others = load([rows[1], rows[0]], duplicates=Repeated.drop)
    assert before != PromptSource(others, 4, 0).fingerprint["tokens"]


def test_images_are_upright_and_their_transparent_parts_white(tmp_path):
    turned, clear = tmp_path / "turned.jpg", tmp_path / "clear.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), "red").save(turned, exif=exif)
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(clear)
    image = read_image("turned.jpg", tmp_path)
    assert image.size == image.open().size == (20, 40)
    assert read_image("clear.png", tmp_path).open().getpixel((0, 0)) == (255, 255, 255)


def test_texts_with_images_survive_a_process(tmp_path):
    (tmp_path / "red.png").write_bytes(png())
    text = ImageText("a <image> b", [read_image("red.png", tmp_path)])
    again = pickle.loads(pickle.dumps({"content": text}))
    assert images_in([again]) == text.images
    assert again["content"].parts == [
        {"type": "text", "text": "a "},
        {"type": "image"},
        {"type": "text", "text": " b"},
    ]


def test_records_name_images_that_are_stored_once_and_scaled_down(load, tmp_path):
    (tmp_path / "wide.png").write_bytes(png((600, 60)))
    prompts = load([row(images=["red.png"]), row("w5 <image>", images=["wide.png"])])[:3]
    rewarded = Rewarded(["", "", ""], [0.0] * 3, [])
    records = rollout_records(prompts, batch_of([1, 2, 1]), rewarded, set(), [None] * 3, [""] * 3)
    write_thumbnails(tmp_path, [*prompts, *prompts])
    write_rollouts(tmp_path, 1, records)
    lines = (tmp_path / "rollouts" / "step_1.jsonl").read_text().splitlines()
    names = [json.loads(line).get("images") for line in lines]
    assert names[2] is None
    files = {path.name: Image.open(path).size for path in (tmp_path / "images").iterdir()}
    assert files == {names[0][0]: (64, 32), names[1][0]: (192, 19)}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["teacher=default", "teacher.models=embedded"], "teacher.models = embedded takes no"),
        (
            ["reward_model=default", "reward_model.model.path=embedded"],
            "reward_model.model.path = embedded takes no images",
        ),
    ],
)
def test_what_would_read_prompts_without_their_images_is_refused(overrides, reason):
    recipe = ["+recipe=shapes_vision", "hardware=cpu", "run.name=x"]
    result = examined([*recipe, *overrides])
    examine_data(result)
    assert [text for text in map(str, result.report.problems) if reason in text]


def test_turns_that_go_on_see_the_images_of_their_prompt(load):
    seeing, text = load([row(images=["red.png"])])[:2]
    engines = FakeEngines(lambda request: [7] * 6)
    rollout = in_flight_config(2, 8, keep_kv=False).rollout
    episodes = TurnEpisodes(rollout, Turns(), engines.generate)
    groups = [Group(one, 1, 0, 0, (Response.empty(),) * 2) for one in (seeing, text)]
    params = SamplingParams(1.0)
    begun = episodes.grow(groups, Until(0, 0, tokens=8), params).groups
    ended = episodes.grow(begun, Until(2, 2), params).groups
    assert len(engines.calls) == 2
    for call in engines.calls:
        images = [one.images for one in call.requests]
        assert images[0] is images[1] is not None and images[2:] == [None] * 2
        assert call.requests[0].prompt[: len(seeing.token_ids)] == seeing.token_ids
    first, second, *others = episodes.batch(ended).images.rows
    assert first is second is seeing.images.processed() and others == [None] * 2
