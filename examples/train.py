"""Train from Python, with a callback that ends the run as soon as it is good enough.

python examples/train.py                                 a minute or two on two cores
python examples/train.py trainer.total_steps=2           any overrides, as on the command line
"""

import sys
from typing import Any

import hybridrl


class GoodEnough(hybridrl.Callback):
    """Prints each step's reward, and stops the run at a held-out accuracy."""

    def __init__(self, accuracy: float = 0.95) -> None:
        self.accuracy = accuracy

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        """Print the reward."""
        print(f"step {step}: mean reward {metrics['reward/mean']:.3f}")

    def on_evaluation(self, trainer: Any, step: int, metrics: Any) -> None:
        """Stop if the model is good enough."""
        if metrics["eval/accuracy"] >= self.accuracy:
            trainer.stop()


def main() -> None:
    """Train, and print what has become of it."""
    overrides = ["+recipe=gsm8k_ppo", "eval.every_steps=5", *sys.argv[1:]]
    result = hybridrl.train(overrides, callbacks=[GoodEnough(0.9)])
    print(f"accuracy {result.accuracy:.3f} after {result.step} steps, in {result.folder}")


if __name__ == "__main__":
    main()
