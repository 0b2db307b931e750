"""model.path of a run's directory: the model that it trained."""

import shutil

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.models.resolve import absolute_path, plain_folder, read_model_config, resolve_model


def test_the_path_of_a_run_is_the_model_that_it_trained(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"`hybridrl export {run} <folder>`"):
        resolve_model(str(run))
    with pytest.raises(ConfigError) as caught:
        read_model_config(str(run))
    assert str(caught.value).count("model.path = ") == 1
    shutil.copytree(resolve_model("embedded"), run / "final")
    assert resolve_model(str(run)) == plain_folder(str(run)) == run / "final"
    assert read_model_config(str(run)) == read_model_config("embedded")
    assert absolute_path(str(run)) == str(run)
