"""The embedded questions about pictures: what they show is asked; who does not look guesses."""

from collections import Counter
from io import BytesIO

import numpy as np
from PIL import Image

from hybridrl.config.choices import Init
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.prompts import load_prompts
from hybridrl.data.sources.shapes import CELL, CELLS, COLORS, shape_problem, shape_problems
from tests.support.data_configs import data_config


def colors_of(problem):
    """The color of each cell with a shape."""
    image = Image.open(BytesIO(problem["images"][0]["bytes"]))
    pixels = np.asarray(image).astype(int).reshape(CELLS, CELL, CELLS, CELL, 3)
    cells = pixels.swapaxes(1, 2).reshape(CELLS**2, CELL**2, 3)
    most = np.ptp(cells, axis=2).argmax(1)  # a pixel that is not gray
    middles = cells[np.arange(CELLS**2), most]
    shapes = middles[np.ptp(middles, axis=1) > 0]
    names = [*COLORS]
    distances = [[np.abs(shape - COLORS[name]).sum() for name in names] for shape in shapes]
    return [names[int(np.argmin(row))] for row in distances]


def test_a_picture_shows_what_its_answer_counts():
    for problem in shape_problems("train", 60):
        seen = colors_of(problem)
        first, last = problem["answer"].split("\n")
        assert first == f"{problem['tags']['count']} of {len(seen)}"
        assert last == f"#### {problem['tags']['count']}"
        if problem["tags"]["asks"] == "color":
            asked = problem["question"].split()[2]
            assert seen.count(asked) == int(problem["tags"]["count"])


def test_a_question_says_nothing_of_its_answer():
    problems = shape_problems("train", 2000)
    answers = Counter(problem["tags"]["count"] for problem in problems)
    assert max(answers.values()) / len(problems) < 0.25
    by_question = {}
    for problem in problems:
        by_question.setdefault(problem["question"], Counter())[problem["tags"]["count"]] += 1
    assert len(by_question) == 7
    guessed = sum(max(counts.values()) for counts in by_question.values())
    assert guessed / len(problems) < 0.27


def test_pictures_are_the_same_in_each_run_and_in_no_two_series():
    assert shape_problem("train", 7) == shape_problem("train", 7)
    files = [
        problem["images"][0]["bytes"]
        for series in ("train", "held_out")
        for problem in shape_problems(series, 300)
    ]
    assert len(set(files)) == len(files)


def test_the_model_of_the_package_reads_them():
    model = ModelConfig(
        path="embedded_vision", init=Init.pretrained, seed=0, trust_remote_code=False
    )
    sets = load_prompts(data_config(name="embedded/shapes"), model, 64)
    assert (len(sets.train), len(sets.held_out)) == (2048, 320)
    prompt = sets.held_out[0]
    assert prompt.images.tokens == [CELLS**2]
    assert prompt.text.startswith("<|user|><|vision_start|><|image_pad|><|vision_end|>How many")
    processed = prompt.images.processed()
    assert processed.tensors["image_grid_thw"].tolist() == [[1, 8, 8]]
    assert prompt.example["answer"] == prompt.answer
