"""Training by primitives from Python: forward and backward, optimizer steps, samples."""

from contextlib import ExitStack
from pathlib import Path

from hybridrl.api.run import Config, checked_run
from hybridrl.app.primitives import service_parts
from hybridrl.config.errors import ConfigError
from hybridrl.service.service import Primitives


class Service(Primitives):
    """A loop of your own over the trainer's parts: each method is a call, and returns a future::

        with hybridrl.Service(["model=embedded", "lora=default"]) as service:
            service.forward_backward(data, "cross_entropy")
            service.optim_step(hybridrl.AdamParams(learning_rate=1e-4)).result()
            samples = service.sample(prompt, 4, Sampling(), weights=...).result()

    It has one model, "model-1", unless `create_model` makes more. Open it in the main thread; its
    methods may be called in any.

    Args:
        config: as of `Trainer`; data, rewards and algorithm have no effect.
        folder: as hydra.run.dir; saved states stay there, and a later service on the same folder
            finds them.

    Raises:
        ConfigError: every problem of the config.
    """

    def __init__(self, config: Config, *, folder: str | Path | None = None) -> None:
        run = checked_run(config, (), folder)
        if run.prepared is None:
            raise ConfigError("run.dry = true: a dry run has no service.\nRemove run.dry.")
        with ExitStack() as stack:
            super().__init__(*stack.enter_context(service_parts(run.prepared, run.folder)))
            stack.callback(super().close)
            self.create_model().result()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the service, its workers and Ray."""
        self._stack.close()
