"""Problem files: columns by name, verl's schema as it is, every fault named with its line."""

import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.sections import DataConfig
from hybridrl.data.sources.files import Columns, Split, files_by_split, read_problems
from hybridrl.data.sources.problem_sets import DataSet, load_problem_sets
from tests.support.data_configs import data_config, jsonl, sums

COLUMNS = Columns("question", "answer")
CONFIG = data_config()


def rows(count: int) -> list[dict]:
    return sums(range(count))


def sets_of(config: DataConfig) -> DataSet:
    """The one data set of a config without a mixture."""
    return load_problem_sets(config)[""]


def faults_of(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_problem_sets(config)
    return str(caught.value)


def test_jsonl_rows_become_problems_with_the_whole_row(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": 2, "level": "easy"}, ""])
    problems, faults = read_problems("data.train_files", [path], COLUMNS)
    assert faults == []
    assert len(problems) == 1
    assert (problems[0].question, problems[0].answer) == ("1+1?", "2")
    assert problems[0].example == {"question": "1+1?", "answer": "2", "level": "easy"}
    assert problems[0].where == f"{path}:1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"9" * 5000, "more than 4,300 digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"question": "\xe9"}', "not UTF-8 text"),
    ],
)
def test_a_line_that_json_cannot_read_is_named(tmp_path, line, words):
    path = jsonl(tmp_path / "a.jsonl", rows(1))
    path.write_bytes(path.read_bytes() + line + b"\n")
    _, (fault,) = read_problems("data.train_files", [path], COLUMNS)
    assert f"{path}:2" in fault and words in fault


def test_verl_parquet_is_read_as_it_is(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    table = pa.Table.from_pylist(
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": messages,
                "reward_model": {"style": "rule", "ground_truth": "2"},
                "extra_info": {"index": 0, "split": "train"},
            }
        ]
    )
    pq.write_table(table, tmp_path / "train.parquet")
    columns = Columns("prompt", "reward_model.ground_truth")
    problems, faults = read_problems("data.train_files", [tmp_path / "train.parquet"], columns)
    assert faults == []
    assert problems[0].prompt == messages
    assert problems[0].question == "1+1?"
    assert problems[0].answer == "2"
    assert problems[0].example["extra_info"] == {"index": 0, "split": "train"}


def test_a_column_name_with_a_dot_in_it_counts_before_a_struct(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "q", "a.b": "flat", "a": {"b": "deep"}}])
    problems, _ = read_problems("data.train_files", [path], Columns("question", "a.b"))
    assert problems[0].answer == "flat"


def test_bad_lines_are_named_first_few_and_count(tmp_path):
    path = jsonl(
        tmp_path / "bad.jsonl",
        [
            {"question": "q", "answer": "1"},
            '{"question": "q" "answer": "2"}',
            "[1, 2]",
            {"question": "", "answer": "3"},
            {"question": "q", "answer": None},
            {"answer": "5"},
        ],
    )
    problems, faults = read_problems("data.train_files", [path], COLUMNS)
    assert len(faults) == 1
    assert "5 rows cannot be used" in faults[0]
    assert f"{path}:2: not JSON: Expecting ',' delimiter (column 18)" in faults[0]
    assert f"{path}:3: expected a JSON object, found a list" in faults[0]
    assert "... and 2 more" in faults[0]
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "", "answer": "3"}, "`question` is empty"),
        ({"question": 7, "answer": "3"}, "`question` is a number"),
        ({"question": [{"role": "user"}], "answer": "3"}, "not of messages"),
        ({"question": "q", "answer": None}, "`answer` is null"),
        ({"question": "q", "answer": True}, "`answer` is true or false"),
        ({"question": "q", "answer": math.nan}, "`answer` is nan"),
        ({"question": "q", "answer": -math.inf}, "`answer` is -inf"),
        ({"question": "q"}, "there is no `answer`"),
    ],
)
def test_unusable_row_says_what_is_wrong(tmp_path, row, says):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "1"}, row])
    _, faults = read_problems("data.train_files", [path], COLUMNS)
    assert f"{path}:2: " in faults[0]
    assert says in faults[0]


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}\n')
    _, faults = read_problems("data.train_files", [path], COLUMNS)
    assert f"{path}:2: not UTF-8 text" in faults[0]


@pytest.mark.parametrize(
    "line",
    [
        r'{"question": "q\ud800", "answer": "1"}',
        r'{"question": "q", "answer": "1\uDFFF"}',
        r'{"question": [{"role": "user", "content": "\udc00\ud800"}], "answer": "1"}',
        r'{"question": "q", "answer": "1", "meta": {"by": ["\ud83dx"]}}',
        r'{"question": "q", "answer": "1", "\udead": 0}',
    ],
)
def test_lone_surrogates_are_named_with_their_line(tmp_path, line):
    """Anywhere in the row, as rewards get the whole of it."""
    pair = r'{"question": "\ud83d\ude00", "answer": "\\ud800"}'
    path = jsonl(tmp_path / "a.jsonl", [pair, line])
    problems, faults = read_problems("data.train_files", [path], COLUMNS)
    assert [(p.question, p.answer) for p in problems] == [("\U0001f600", r"\ud800")]
    assert f"{path}:2: not Unicode text: a lone surrogate" in faults[0]


def test_parquet_texts_that_are_no_unicode_are_named_with_their_row(tmp_path):
    """What encodes a lone surrogate is no UTF-8."""
    texts = [b"1+1?", "\ud800".encode("utf-8", "surrogatepass"), b"caf\xe9"]
    column = pa.array(texts, pa.binary()).view(pa.string())
    table = pa.table({"question": column, "answer": ["2", "2", "2"]})
    pq.write_table(table, tmp_path / "a.parquet")
    problems, faults = read_problems("data.train_files", [tmp_path / "a.parquet"], COLUMNS)
    assert [p.question for p in problems] == ["1+1?"]
    assert "2 rows cannot be used" in faults[0]
    for row in (1, 2):
        assert f"{tmp_path / 'a.parquet'} row {row}: not UTF-8 text" in faults[0]


def test_parquet_times_are_texts_whatever_their_unit(tmp_path):
    times = {"ns": pa.array([1, 2], pa.timestamp("ns")), "day": pa.array([0, 10**9], pa.date32())}
    table = pa.table({"question": ["a", "b"], "answer": ["1", "2"], **times})
    pq.write_table(table, tmp_path / "a.parquet")
    problems, faults = read_problems("data.train_files", [tmp_path / "a.parquet"], COLUMNS)
    assert faults == []
    assert problems[0].example["ns"] == "1970-01-01 00:00:00.000000001"
    assert problems[0].example["day"] == "1970-01-01"


def test_a_path_from_the_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "a.jsonl", rows(20))
    assert len(sets_of(replace(CONFIG, train_files=["~/a.jsonl"])).train) > 0


def test_missing_column_names_the_columns_there_are(tmp_path):
    table = pa.Table.from_pylist([{"problem": "q", "meta": {"solution": "1", "id": 3}}])
    pq.write_table(table, tmp_path / "a.parquet")
    _, faults = read_problems("data.train_files", [tmp_path / "a.parquet"], COLUMNS)
    assert len(faults) == 2
    assert "data.prompt_key = question" in faults[0]
    assert "data.answer_key = answer" in faults[1]
    assert all("problem, meta.solution, meta.id" in fault for fault in faults)


def test_missing_files_folders_and_unknown_kinds_come_in_one_report(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    files = [tmp_path / "none.jsonl", tmp_path, tmp_path / "a.csv", tmp_path / "torn.parquet"]
    report = faults_of(replace(CONFIG, train_files=list(map(str, files))))
    assert report.startswith("4 problems") and "cannot be used" not in report
    for says in ["no such file", "is a folder", "ends in .jsonl or .parquet", "not a readable"]:
        assert says in report


def test_empty_data_set_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    report = faults_of(replace(CONFIG, train_files=str(tmp_path / "empty.jsonl")))
    assert "data.train_files = " in report and "empty.jsonl has no problems" in report


def test_faults_of_training_and_held_out_files_come_together(tmp_path):
    report = faults_of(
        replace(CONFIG, train_files=str(tmp_path / "a.jsonl"), eval_files=str(tmp_path / "b.jsonl"))
    )
    assert "data.train_files" in report
    assert "data.eval_files" in report


def test_last_training_problems_are_held_out_where_there_are_no_others(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(40))
    sets = sets_of(replace(CONFIG, train_files=str(path), num_eval_problems=10))
    assert [p.answer for p in sets.held_out] == [f"#### {i + 1}" for i in range(30, 40)]
    assert len(sets.train) == 30
    assert "last 10 problems" in sets.notes[0]


def test_a_tenth_is_held_out_where_no_number_is_given(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(40))
    sets = sets_of(replace(CONFIG, train_files=[str(path)]))
    assert (len(sets.train), len(sets.held_out)) == (36, 4)


def test_holding_out_too_many_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(40))
    report = faults_of(replace(CONFIG, train_files=str(path), num_eval_problems=37))
    assert "there are 3 training problems" in report
    assert "data.prompts_per_step = 4" in report
    report = faults_of(replace(CONFIG, train_files=str(path), num_eval_problems=40))
    assert "leaves none to train on" in report


def test_eval_files_are_used_whole_or_sampled(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", rows(28)[20:])
    held_out = jsonl(tmp_path / "b.jsonl", rows(20))
    config = replace(CONFIG, train_files=str(train), eval_files=str(held_out))
    assert len(sets_of(config).held_out) == 20
    some = sets_of(replace(config, num_eval_problems=5)).held_out
    assert len({problem.where for problem in some}) == 5
    assert some == sets_of(replace(config, num_eval_problems=5)).held_out


def test_fewer_problems_than_a_step_needs_are_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(3))
    path2 = jsonl(tmp_path / "b.jsonl", [{"question": "other", "answer": "1"}])
    report = faults_of(replace(CONFIG, train_files=str(path), eval_files=str(path2)))
    assert "data.prompts_per_step = 4" in report
    assert "3 training problems" in report


def test_embedded_problems_keep_their_tags_and_are_disjoint():
    sets = sets_of(CONFIG)
    assert {problem.tags["range"] for problem in sets.held_out} == {"seen", "unseen"}
    assert len(sets.held_out) >= 300
    assert not {p.question for p in sets.train} & {p.question for p in sets.held_out}


def test_unreachable_hub_names_three_ways_out_once(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    report = faults_of(replace(CONFIG, name="openai/gsm8k"))
    assert report.startswith("1 problem")
    for way in ["data.train_files=", "HF_HOME=", "data=embedded"]:
        assert way in report


def test_cached_hub_data_set_is_read_without_a_connection(tmp_path, monkeypatch):
    """The folders are as huggingface_hub lays out its cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--openai--gsm8k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    for folder in ("main", "socratic"):
        files = repository / "snapshots" / "c0ffee" / folder
        files.mkdir(parents=True)
        for split, some in (("train", rows(15)[6:]), ("test", rows(6))):
            table = pa.Table.from_pylist([row | {"answer": f"{folder} #### 1"} for row in some])
            pq.write_table(table, files / f"{split}-00000-of-00001.parquet")
    sets = sets_of(replace(CONFIG, name="openai/gsm8k"))
    assert (len(sets.train), len(sets.held_out)) == (9, 6)
    assert sets.train[0].answer == "main #### 1"
    socratic = replace(CONFIG, name="openai/gsm8k/socratic")
    assert sets_of(socratic).train[0].answer == "socratic #### 1"
    (files / "test-00000-of-00001.parquet").unlink()
    assert "its test split" in (report := faults_of(socratic))
    assert "data.eval_files=..." in report and "data.train_files" not in report
    held_out = jsonl(tmp_path / "own.jsonl", rows(17)[15:])
    sets = sets_of(replace(socratic, eval_files=str(held_out)))
    assert (len(sets.train), len(sets.held_out)) == (9, 2)


def test_hub_files_in_several_folders_must_be_named(tmp_path):
    for folder in ("easy", "hard"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train-0.parquet").touch()
        (tmp_path / folder / "validation-0.parquet").touch()
    _, faults = files_by_split("me/sums", tmp_path, "")
    assert "easy, hard" in faults[0]
    splits, faults = files_by_split("me/sums/hard", tmp_path, "hard")
    assert faults == []
    assert splits[Split.held_out] == [tmp_path / "hard" / "validation-0.parquet"]


def test_difficulty_is_read_as_a_number_for_training_problems_alone(tmp_path):
    graded = [row | {"meta": {"level": str(i % 3)}} for i, row in enumerate(rows(9))]
    train = jsonl(tmp_path / "a.jsonl", graded)
    held_out = jsonl(tmp_path / "b.jsonl", rows(12)[9:])
    config = replace(
        CONFIG, train_files=str(train), eval_files=str(held_out), curriculum="meta.level"
    )
    assert [p.difficulty for p in sets_of(config).train] == [0.0, 1.0, 2.0] * 3
    assert sets_of(replace(CONFIG, curriculum="steps")).train[0].difficulty in (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("hard", "`level` is text, expected a number"),
        (None, "`level` is null, expected a number"),
        (True, "`level` is true or false, expected a number"),
        ("nan", "`level` is text, expected a number"),
    ],
)
def test_difficulty_that_is_no_number_is_named_with_its_line(tmp_path, level, says):
    path = jsonl(tmp_path / "a.jsonl", [rows(1)[0] | {"level": level}] * 9)
    report = faults_of(replace(CONFIG, train_files=str(path), curriculum="level"))
    assert f"{path}:1: {says}" in report
    assert "a number in `level`" in report


def test_missing_difficulty_names_its_key(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows(9))
    report = faults_of(replace(CONFIG, train_files=str(path), curriculum="level"))
    assert "data.curriculum = level" in report
    assert "Set data.curriculum to one of them" in report


def test_splits_whose_names_begin_alike_are_not_mixed(tmp_path):
    for split in ("train_gen", "train_sft", "test"):
        (tmp_path / f"{split}-00000-of-00001.parquet").touch()
    _, (fault,) = files_by_split("me/chats", tmp_path, "")
    assert "no Parquet file of its train split" in fault and "train_sft-00000" in fault
    for number in range(2):
        (tmp_path / f"train-0000{number}-of-00002.parquet").touch()
    assert len(files_by_split("me/chats", tmp_path, "")[0][Split.train]) == 2


def test_rows_may_have_no_answer(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [{"question": f"Say {i}."} for i in range(10)])
    assert "If the rows have no answers, set data.answer_key=null" in faults_of(
        replace(CONFIG, train_files=str(file))
    )
    sets = sets_of(replace(CONFIG, train_files=str(file), answer_key=None))
    assert [problem.answer for problem in sets.train] == [""] * 9
    assert "answer" not in sets.train[0].example
