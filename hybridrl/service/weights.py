"""Which weights the actor and vLLM hold: models in turn, and earlier weights for sampling.

One model is on the device, with its moments and gradients; the others are held in host memory. Each
change of a model's weights gives them a new number. A name for sampling stands for one number. With
adapters, which are small, a copy is held under the name. Without, its weights are gone once they
have changed.
"""

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.service.data import ServiceError
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine

# Name of the weights before any training.
BASE = "base"
# Names for sampling whose weights are held, the last ones.
KEPT = 8


class ServedWeights:
    """Weights of actor and engines, for the one thread that calls the workers.

    Args:
        has_adapters: several models, and weights of earlier steps, are held.
    """

    def __init__(self, actor: WorkerGroup, engine: HybridEngine, *, has_adapters: bool) -> None:
        self._actor, self._engine, self._holds = actor, engine, has_adapters
        self._models: dict[str, int] = {}  # numbers of their weights
        self._with_gradients: set[str] = set()
        self._names = {BASE: 0}  # numbers of weights for sampling, from the oldest on
        self._resident: str | None = None  # the model on the device
        self._on_device = self._last = 0  # number of the weights there; last that was given
        self._is_awake = False
        if has_adapters:
            actor.call("hold", BASE, whole=True)

    def create(self, name: str) -> None:
        """Begin a model with the first weights, which is then on the device."""
        if not self._holds and (self._models or self._on_device):
            raise ServiceError(
                "without adapters there is one model, and only the first begins with the base "
                "model's weights.\nStart the service with lora=default"
            )
        self._leave()
        if self._holds:
            self._actor.call("take", BASE, whole=True)
        self._models[name], self._resident, self._on_device = 0, name, 0

    def delete(self, name: str) -> None:
        """End a model. Names for sampling stay."""
        self.begin(name)
        self._actor.call("forget_optimizer")
        del self._models[name]
        self._with_gradients.discard(name)
        self._resident = None

    def begin(self, name: str) -> None:
        """Put a model's weights, moments and gradients on the device, while vLLM sleeps."""
        if name not in self._models:
            raise ServiceError(f"model {name}: there is no such model, or it was deleted")
        if self._resident == name:
            self._sleep()
            return
        self._leave()
        self._actor.call("take", name, whole=True)
        self._actor.call("drop", [name])
        self._resident, self._on_device = name, self._models[name]

    def add_gradients(self) -> None:
        """Note that the model on the device has gradients."""
        assert self._resident is not None
        self._with_gradients.add(self._resident)

    def has_gradients(self, name: str) -> bool:
        """Return whether a model has gradients that no step has used."""
        return name in self._with_gradients

    def change(self) -> None:
        """Note that the weights of the model on the device have changed, and its gradients used."""
        assert self._resident is not None
        self._on_device = self._models[self._resident] = self._new()
        self._with_gradients.discard(self._resident)

    def name_present(self) -> str:
        """Return a name for sampling from the weights of the model on the device."""
        number = self._on_device
        return self._named(f"weights-{number}", number) if number else BASE

    def name_other(self, name: str) -> str:
        """Return a name for weights on the device that are no model's; it begins with `name`."""
        self._on_device = self._new()
        return self._named(f"{name}-{self._on_device}", self._on_device)

    def leave(self) -> None:
        """Hold the model on the device, so that other weights can be loaded there."""
        if not self._holds:
            raise ServiceError(
                "without adapters a saved state is sampled by a model that loads it.\n"
                "Call load_state, then weights_for_sampling"
            )
        self._leave()
        self._on_device = -1

    def wake(self, name: str) -> None:
        """Move the weights of a name to vLLM, unless it holds them."""
        number = self._number(name)
        self._engine.weight_version = number
        if not self._engine.is_current:
            self.load(name)
            self._engine.reshard()
        self._is_awake = True

    def load(self, name: str) -> None:
        """Put the weights of a name on the device, while vLLM sleeps; a model `begin`s again."""
        number = self._number(name)
        self._sleep()
        if number != self._on_device:
            self._leave()
            self._actor.call("take", name, whole=False)
            self._on_device = number

    def _number(self, name: str) -> int:
        number = self._names.get(name)
        if number is None or not (self._holds or number == self._on_device):
            why = "they have changed since.\nCall weights_for_sampling again"
            if self._holds:
                why = f"only the last {KEPT} are kept.\nSave a state, and sample from its weights"
            raise ServiceError(f"the weights {name} are gone: {why}")
        return number

    def _named(self, name: str, number: int) -> str:
        """Hold the weights on the device under a name, which is then the last one."""
        if not self._holds:
            self._names = {BASE: 0}
        elif self._names.pop(name, None) is None:
            self._actor.call("hold", name, whole=False)
            if gone := [one for one in self._names if one != BASE][: -KEPT + 1]:
                self._actor.call("drop", gone)
                for one in gone:
                    del self._names[one]
        self._names[name] = number
        return name

    def _leave(self) -> None:
        self._sleep()
        if self._resident is not None:
            self._actor.call("hold", self._resident, whole=True)
            self._resident = None

    def _sleep(self) -> None:
        if self._is_awake:
            self._engine.sleep()
            self._is_awake = False

    def _new(self) -> int:
        self._last += 1
        return self._last
