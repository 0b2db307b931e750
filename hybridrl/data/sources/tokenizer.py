"""Tokenizer and chat template of a model."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.command.user_files import parse_json
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.rows import Message
from hybridrl.models.resolve import VOCABULARIES, plain_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# AutoTokenizer loads PreTrainedTokenizerFast for these, after seconds of imports.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# Exceptions of a template's expressions.
_TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)

# Token ids of many responses -> their texts; ids are lists for one response at a time.
Decode = Callable[[Iterable[list[int]]], list[str]]


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model.

    Raises:
        ConfigError: there is no such model, or its folder has no usable tokenizer.
    """
    folder = plain_folder(model_path)
    try:
        _check_files(folder)
        if _tokenizer_class(folder) in _PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception, transformers any class
        if _brings_code(folder):
            raise ConfigError(
                f"model.path = {model_path}: the tokenizer in {folder} is custom code "
                "(auto_map in tokenizer_config.json).\nCode of a checkpoint is never run. Use a "
                "folder whose tokenizer.json transformers can load without custom code."
            ) from None  # transformers' message asks for an argument that is not available here
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"model.path = {model_path}: its tokenizer cannot be loaded from {folder} "
            f"({reason[0] if reason else type(error).__name__}).\n"
            "The folder needs tokenizer.json and tokenizer_config.json; copy those of the model."
        ) from error


def _check_files(folder: Path) -> None:
    """Check the vocabulary: transformers makes an empty tokenizer of a folder without files.

    Raises:
        OSError: no vocabulary, or tokenizer.json is damaged.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise OSError(f"there is none of {', '.join(VOCABULARIES)}")
    path = folder / "tokenizer.json"
    if path.is_file():
        content = parse_json(path.read_bytes())
        if not isinstance(content, dict) or "model" not in content:
            raise OSError("tokenizer.json does not describe a tokenizer")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; empty without such a file.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / "tokenizer_config.json"
    config = parse_json(path.read_bytes()) if path.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is not a JSON object")
    return config


def _brings_code(folder: Path) -> bool:
    """Return true if the tokenizer's class is defined by a Python file of the folder."""
    try:
        return "auto_map" in _tokenizer_config(folder)
    except ValueError:
        return False


def _tokenizer_class(folder: Path) -> str | None:
    """Return the class in tokenizer_config.json, if it alone determines AutoTokenizer's choice."""
    if not (folder / "tokenizer.json").is_file():
        return None
    # Absent in folders whose class follows from config.json's model type.
    return _tokenizer_config(folder).get("tokenizer_class")


def token_ids(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, special: bool
) -> list[list[int]]:
    """Tokenise texts, with the tokenizer's special tokens or without."""
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), add_special_tokens=special)
    return encoded["input_ids"]


class Renderer:
    """Renderer of chat messages: to prompt text by the chat template, and to token ids.

    Without a chat template, messages are separated by blank lines, an answer by a newline, and the
    tokenizer adds its special tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(tokenizer.chat_template)
        if not self.has_template:
            log.warning("the tokenizer has no chat template: prompts are plain text")

    def render(self, messages: list[Message]) -> str:
        """Return the prompt text up to the beginning of the assistant's answer.

        Raises:
            jinja2.TemplateError: the template raises for these messages.
        """
        if not self.has_template:
            return _plain_text(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except _TEMPLATE_ERRORS as error:
            from jinja2 import TemplateError

            raise TemplateError(f"{type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts."""
        return token_ids(self._tokenizer, texts, special=not self.has_template)


def _plain_text(messages: list[Message]) -> str:
    """Join messages up to the beginning of an answer, on a new line."""
    text = ""
    for message in messages:
        between = "" if not text else "\n" if message["role"] == "assistant" else "\n\n"
        text += between + message["content"]
    return text + "\n"


def decoder(tokenizer: "PreTrainedTokenizerBase") -> Decode:
    """Return a function from token ids of responses to their texts without special tokens."""

    def decode(rows: Iterable[list[int]]) -> list[str]:
        return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    return decode
