"""Configs of benchmarks: conf/ with what a benchmark sets itself."""

import json
from collections.abc import Mapping
from pathlib import Path

from hydra import compose, initialize_config_dir

from hybridrl.app.compose import conf_dir
from hybridrl.config.command.provenance import Provenance
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import examine
from hybridrl.config.planner.machine import Machine, Node
from hybridrl.config.schema import RunConfig


def composed(values: Mapping[str, object]) -> RunConfig:
    """conf/config.yaml with these values of its keys, typed and resolved.

    Sizes need not fit together as those of a run, of which a benchmark does a part: no check looks
    at them. `model.path` is to be a folder, `cluster.gpus_per_node` a number.

    Raises:
        ConfigError: a key or value is none.
    """
    with initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = compose("config", overrides=[f"{key}={value}" for key, value in values.items()])
    found = examine(
        cfg,
        machine=Machine((Node("here", cores=1, memory_bytes=0),)),
        read_model=lambda path: json.loads((Path(path) / "config.json").read_text()),
        provenance=Provenance(),
        checks=lambda *_: None,
    )
    if found.report.problems:
        raise ConfigError(*found.report.problems)
    return found.config
