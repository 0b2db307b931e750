"""What is typed after hybridrl eval, and what is asked of the engines because of it."""

from pathlib import Path

import pytest

from hybridrl.commands.evaluate import _output_folder, parse_options
from hybridrl.commands.evaluation.session import Split, passes
from hybridrl.commands.evaluation.subject import Subject
from hybridrl.config.errors import ConfigError


def test_a_path_alone_is_one_sampled_response_to_each_held_out_problem():
    options = parse_options(["outputs/x"])
    assert (options.subject, options.overrides) == ("outputs/x", [])
    assert (options.samples, options.ks, options.greedy) == (1, [1], False)
    assert (options.split, options.problems, options.output) == (Split.held_out, None, None)


def test_flags_and_overrides_may_stand_in_any_order():
    line = "--samples 6 outputs/x data=gsm8k --split train rollout.temperature=0.6 --output out"
    options = parse_options(line.split())
    assert options.subject == "outputs/x"
    assert options.overrides == ["data=gsm8k", "rollout.temperature=0.6"]
    assert (options.samples, options.ks) == (6, [1, 2, 4])
    assert (options.split, options.output) == (Split.train, Path("out"))


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])]
)
def test_k_is_by_default_every_power_of_two_up_to_the_samples(samples, ks):
    assert parse_options(["x", "--samples", str(samples)]).ks == ks


def test_k_is_sorted_and_each_counted_once():
    assert parse_options(["x", "--samples", "8", "--k", "8,1,8"]).ks == [1, 8]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["x", "--samples", "2", "--greedy"], "same response each time"),
        (["x", "--samples", "2", "--k", "1,4"], "Add --samples 4"),
    ],
)
def test_contradictions_say_what_to_type(argv, says):
    with pytest.raises(ConfigError, match=f"on the command line(.|\n)*{says}"):
        parse_options(argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "PATH"),
        (["x", "--smaples", "2"], "--smaples"),
        (["x", "--samples", "0"], "--samples: 0, expected an integer of at least 1"),
        (["x", "--k", "1,two"], "--k: two, expected an integer of at least 1"),
        (["x", "--split", "test"], "held_out"),
    ],
)
def test_wrong_flags_end_with_code_2(argv, says, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(argv)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "problems", "per_call", "expected"),
    [
        (1, 500, 100, [(0, 1)]),
        (4, 500, 100, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (5, 20, 50, [(0, 2), (2, 2), (4, 1)]),
        (8, 20, 1000, [(0, 8)]),
    ],
)
def test_calls_ask_all_problems_and_each_sample_once(samples, problems, per_call, expected):
    assert list(passes(samples, problems, per_call)) == expected


def test_evaluations_begun_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [_output_folder(None, Subject("mine")) for _ in range(3)]
    assert sorted(Path("evals/mine").iterdir()) == sorted(set(folders)) and len(set(folders)) == 3
    (folders[0] / "results.json").touch()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        _output_folder(folders[0], Subject("mine"))
