"""A model folder that brings Python code, as auto_map of transformers would have it run."""

import json
from pathlib import Path

MODEL_MAP = {
    "AutoConfig": "brought.Config",
    "AutoModel": "brought.Model",
    "AutoModelForCausalLM": "brought.Model",
}
TOKENIZER_MAP = {"AutoTokenizer": ["brought.Tokenizer", "brought.Tokenizer"]}


# A real tokenizer, one token per word of a file that transformers knows nothing of.
TOKENIZER = """
from transformers import PreTrainedTokenizer


class Words(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "words.dat.txt"}

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file) as file:
            self.words = file.read().split()
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: index for index, word in enumerate(self.words)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, index):
        return self.words[index]
"""


def bring_tokenizer(folder: Path) -> Path:
    """Write a tokenizer that is code, beside a model whose code is named; see `bring_code`."""
    marker = bring_code(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "words.dat.txt").write_text("the end of words")
    (folder / "words_tokenizer.py").write_text(TOKENIZER)
    auto_map = {"AutoTokenizer": ["words_tokenizer.Words", None]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Words", "eos_token": "end", "auto_map": auto_map})
    )
    return marker


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
