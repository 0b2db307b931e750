"""A model folder that brings Python code, as auto_map of transformers would have it run."""

import json
from pathlib import Path

MODEL_MAP = {
    "AutoConfig": "brought.Config",
    "AutoModel": "brought.Model",
    "AutoModelForCausalLM": "brought.Model",
}
TOKENIZER_MAP = {"AutoTokenizer": ["brought.Tokenizer", "brought.Tokenizer"]}


def bring_code(folder: Path, **changes: str) -> Path:
    """Have a folder's configs point to a Python file of it; returns what that makes when it runs.

    Args:
        folder: of a model.
        changes: of config.json.
    """
    marker = folder / "code_has_run"
    (folder / "brought.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    for name, auto_map in (("config.json", MODEL_MAP), ("tokenizer_config.json", TOKENIZER_MAP)):
        path = folder / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(content | {"auto_map": auto_map} | changes))
    return marker
