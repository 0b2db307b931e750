"""Writes the shapes that come with the package: `python tools/shapes.py`.

Those of embedded models. A test compares them.
"""

import json
from dataclasses import asdict
from typing import Any

from hybridrl.config.planner.description import SHIPPED, known_name, text_of
from hybridrl.distributed.description import describe
from hybridrl.models.resolve import EMBEDDED_FOLDERS, read_model_config


def shapes() -> dict[str, Any]:
    """Derive all of them."""
    configs = map(read_model_config, EMBEDDED_FOLDERS)
    derived = {known_name(text_of(config)): asdict(describe(config)) for config in configs}
    kept: dict[str, Any] = json.loads(json.dumps(derived))
    return kept


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(shapes(), indent=None, separators=(",", ":")) + "\n")
