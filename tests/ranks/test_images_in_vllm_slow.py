"""vLLM with images, of four families: log-probs, reshards, and faults that other trainers had.

tests/support/vision_engine.py has what each rank does.
"""

import pytest

from hybridrl.config.choices import DType
from tests.support.launch import run_on_ranks
from tests.support.tiny_vision import VISION
from tests.support.vision_engine import RESPONSE, look, reshard, write_folders


@pytest.fixture(scope="module", params=VISION)
def folders(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    write_folders(request.param, root)
    return request.param, root


@pytest.fixture(scope="module")
def seen(folders):
    (seen,) = run_on_ranks(look, 1, *folders)
    return seen


@pytest.mark.slow
def test_log_probs_are_transformers_with_no_image_one_and_two(seen):
    for which in ("A", "again", "B"):
        assert len(seen[which]) == 3 and max(seen[which]) < 1e-5, (which, seen[which])


@pytest.mark.slow
def test_states_of_images_do_not_outlive_new_weights(seen):
    """Without the reset they do, which the comparison shows."""
    no_image, *images = seen["stale"]
    assert no_image < 1e-5 and min(images) > 1e-3
    assert seen["encoded"]


@pytest.mark.slow
def test_placeholders_are_never_sampled(seen):
    """Not even where a request raises the logit of the one that stands for images."""
    assert 500 in seen["banned"]
    assert len(seen["biased"]) == 6 * RESPONSE and not {*seen["banned"]} & {*seen["biased"]}


@pytest.mark.slow
def test_placeholders_must_be_those_of_the_images(seen):
    errors = seen["errors"]
    assert errors["equal"] == ""
    own = seen["own"]
    # Tokens of images, images that vLLM finds, and those that the prompt has.
    expected = {"twice": (own + 3, 1, 1), "none": (0, 0, 1), "less": (own - 1, 0, 1)}
    for key, numbers in (expected | {"no_images": (own, 0, 0)}).items():
        count, found, images = numbers
        assert errors[key].startswith(f"RuntimeError: a prompt has {count} tokens 500 of images")
        assert f"finds {found} of its {images} images" in errors[key]


@pytest.mark.slow
def test_a_pixel_that_differs_at_the_start_ends_the_run(seen):
    assert "make different tensors" in seen["errors"]["other_pixels"]


@pytest.mark.slow
def test_responses_to_a_prompt_share_its_images(seen):
    assert seen["shared"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grown", "held"])
def test_responses_go_on_with_their_images(seen, kind):
    assert seen[kind] == seen["whole"]
    assert all(0 < len(row) < RESPONSE for row in seen[f"parts_{kind}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tp"), [(DType.float32, 1), (DType.float32, 2), (DType.bfloat16, 2)]
)
def test_reshards_leave_what_vllm_would_load(folders, dtype, tp):
    for one in run_on_ranks(reshard, 2, folders[0], dtype, tp, folders[1]):
        assert one["differs_A"] == one["differs_B"] == []
        if "errors_A" in one:
            assert max(one["errors_A"] + one["errors_B"]) < 1e-5
