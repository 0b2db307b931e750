"""The recipe as composed from conf/, typed and resolved, without looking at this machine."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from hybridrl.config.command.provenance import provenance_of
from hybridrl.config.load import examine
from hybridrl.config.planner.machine import Machine, Node
from hybridrl.config.schema import RunConfig
from tests.support.model_shapes import TINY

CONF = Path(__file__).resolve().parents[2] / "conf"
MACHINE = Machine((Node("here", cores=4, memory_bytes=64 * 2**30),))


def run_config(*overrides: str) -> RunConfig:
    """The gsm8k_ppo recipe on CPU with `overrides`."""
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose("config", overrides=["+recipe=gsm8k_ppo", "hardware=cpu", *overrides])
    examined = examine(
        cfg, machine=MACHINE, read_model=lambda _: TINY, provenance=provenance_of([], [])
    )
    return examined.config
