"""A run after its checks, before anything is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.controller.calls import SetupTimes

if TYPE_CHECKING:
    from hybridrl.app.observers import OpenedObserver, Start
    from hybridrl.data.sources.prompts import PromptSets
    from hybridrl.trainer.callbacks import Callback


class Checked(NamedTuple):
    """A config after its checks, and the machine that it was checked for.

    Attributes:
        overrides: as typed, without those of Hydra.
        command: what `hybridrl resume` needs to compose the config again; may be empty.
        prompts: None if they were not read.
    """

    result: Examined
    machine: Machine
    overrides: Sequence[str]
    command: Mapping[str, Any]
    prompts: "PromptSets | None" = None


@dataclass
class Prepared:
    """A run before anything is started.

    Attributes:
        preflight: checks the machines; raises ConfigError if the run would fail there.
        owns_checkpoints: true if all checkpoints in its directory belong to this run.
        callbacks: the user's, those of trainer.callbacks included.
        observers: open those from outside of the core, such as the health checks.
    """

    checked: Checked
    setup: SetupTimes
    preflight: Callable[[], None]
    owns_checkpoints: bool = False
    callbacks: "Sequence[Callback]" = ()
    observers: "Sequence[Callable[[Start], OpenedObserver]]" = ()
