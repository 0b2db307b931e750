"""Configs of benchmarks: conf/ with what a benchmark sets itself."""

from collections.abc import Mapping

from hydra import compose, initialize_config_dir

from hybridrl.app.compose import conf_dir
from hybridrl.config.derive import choose_for_memory, derive
from hybridrl.config.errors import ConfigError, Report
from hybridrl.config.load import typed_run
from hybridrl.config.planner.machine import Machine, Node
from hybridrl.config.schema import RunConfig


def composed(values: Mapping[str, object]) -> RunConfig:
    """conf/config.yaml with these values of its keys, typed and resolved, the fastest where null.

    Sizes need not fit together as those of a run, of which a benchmark does a part: no check looks
    at them. `model.path` is to be a folder, `cluster.gpus_per_node` a number.

    Raises:
        ConfigError: a key or value is none.
    """
    with initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = compose("config", overrides=[f"{key}={value}" for key, value in values.items()])
    report = Report()
    config = typed_run(cfg, report)
    machine = Machine((Node("here", cores=1, memory_bytes=0),))
    derive(config, machine, report)
    choose_for_memory(config, None, None, machine)
    if report.problems:
        raise ConfigError(*report.problems)
    return config
