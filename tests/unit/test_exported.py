"""What belongs to an export, and what becomes of the one that is replaced."""

import json
import shutil

import pytest

from hybridrl.distributed.storage.export import _copy_around, _put_in_place
from hybridrl.models.export_record import added_to, files_in
from hybridrl.models.resolve import EMBEDDED_FOLDER


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "model"
    (folder / "adapter").mkdir(parents=True)
    for name in ("config.json", "adapter/adapter_config.json"):
        (folder / name).touch()
    record = json.dumps({"step": 20, "files": files_in(folder)})
    (folder / "hybridrl_export.json").write_text(record)
    return folder


def test_an_export_as_it_was_written_has_nothing_else_in_it(export):
    assert added_to(export) == []


@pytest.mark.parametrize("name", ["notes.txt", "adapter/notes.txt", "mine/notes.txt"])
def test_files_of_the_users_are_found(export, name):
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).touch()
    assert added_to(export) == [name]


def test_links_and_empty_folders_of_the_users_are_found(export):
    (export / "a").mkdir()
    (export / "b").symlink_to("/nowhere")
    (export / "c").symlink_to(export / "adapter")
    assert added_to(export) == ["a", "b", "c"]


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"files": 1}', '{"files": [[]]}'])
def test_a_record_without_a_list_of_files_makes_all_of_them_the_users(export, record):
    (export / "hybridrl_export.json").write_text(record)
    assert added_to(export) == files_in(export)


def test_an_export_that_could_not_be_replaced_is_back_in_its_place(export, tmp_path):
    before = files_in(export)
    with pytest.raises(FileNotFoundError):
        _put_in_place(tmp_path / "there_is_none", export)
    assert files_in(export) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_a_crash_set_aside_stays_until_there_is_a_new_one(export, tmp_path):
    aside, new = tmp_path / ".model.replaced", tmp_path / "new"
    export.rename(aside)
    with pytest.raises(FileNotFoundError):
        _put_in_place(new, export)
    assert aside.is_dir()
    new.mkdir()
    _put_in_place(new, export)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_source_models_adapter_is_left_out(tmp_path):
    """Merged beside its adapter, a model is whole: transformers would miss its weights."""
    source, export = tmp_path / "source", tmp_path / "export"
    shutil.copytree(EMBEDDED_FOLDER, source)
    (source / "adapter_config.json").write_text("{}")
    export.mkdir()
    _copy_around(source, export, {"dtype": "float32"})
    assert "adapter_config.json" not in files_in(export) and "tokenizer.json" in files_in(export)
