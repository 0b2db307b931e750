"""Tokenizer and chat template of a model: messages to prompt text, texts to token ids and back."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridrl.config.command.input_errors import parse_json
from hybridrl.config.errors import ConfigError, shown
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.images import ImageText, images_in
from hybridrl.data.sources.rows import Message
from hybridrl.models.resolve import VOCABULARIES, plain_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# AutoTokenizer loads PreTrainedTokenizerFast for these, after seconds of imports.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# Exceptions of a template's expressions.
_TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)

# Arguments of a chat template.
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

# Placeholders of a turn and its answer in the rendered chat template.
TURN, ANSWER = "hybridrlturn", "hybridrlanswer"

# Token ids of many responses -> their texts; ids are lists for one response at a time.
Decode = Callable[[Iterable[list[int]]], list[str]]


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model.

    Raises:
        ConfigError: there is no such model, or its folder has no usable tokenizer.
    """
    folder = plain_folder(model.path)
    config: dict[str, Any] = {}
    try:
        if (file := folder / "tokenizer_config.json").is_file():
            config = parse_json(file.read_bytes())
        longest = config.get("model_max_length")
        if isinstance(longest, bool) or not isinstance(longest, int | float | None):
            raise ValueError(f"model_max_length = {shown(repr(longest))}, expected a number")
        trusts = model.trust_remote_code and "auto_map" in config
        # transformers makes an empty tokenizer of a folder without files.
        if not trusts and not any((folder / name).is_file() for name in VOCABULARIES):
            raise OSError(f"there is none of {', '.join(VOCABULARIES)}")
        # Absent in folders whose class follows from config.json's model type.
        named = config.get("tokenizer_class")
        if named in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        from transformers import AutoConfig, AutoTokenizer

        # Without it, AutoTokenizer would also run code that config.json names.
        lm = AutoConfig.from_pretrained(folder, trust_remote_code=False) if trusts else None
        return AutoTokenizer.from_pretrained(folder, config=lm, trust_remote_code=trusts)
    except Exception as error:  # tokenizers raises plain Exception, transformers any class
        if "auto_map" in config and not model.trust_remote_code:
            raise ConfigError(
                f"model.path = {model.path}: the tokenizer in {folder} is custom code "
                "(auto_map in tokenizer_config.json), which would run with your rights.\nRead it "
                "and set model.trust_remote_code=true, or use a folder whose tokenizer.json "
                "transformers can load without it."
            ) from None  # transformers' message asks for an argument that is not available here
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"model.path = {model.path}: its tokenizer cannot be loaded from {folder} "
            f"({reason[0] if reason else type(error).__name__}).\n"
            "The folder needs tokenizer.json and tokenizer_config.json; copy those of the model."
        ) from error


def token_ids(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, special: bool
) -> list[list[int]]:
    """Tokenise texts, with the tokenizer's special tokens or without."""
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), add_special_tokens=special)
    return encoded["input_ids"]


def ids_after(
    tokenizer: "PreTrainedTokenizerBase", last: Sequence[int], texts: Sequence[str]
) -> list[list[int]]:
    """Tokenise texts that follow the tokens `last`, one each.

    Some tokenizers put a space before a text by itself, or drop white space after a special token.
    So a text is tokenised together with that of the token before, whose own tokens are cut off.
    """
    before = {token: tokenizer.decode([token]) for token in set(last)}
    starts = dict(
        zip(before, token_ids(tokenizer, list(before.values()), special=False), strict=True)
    )
    joined = [before[token] + text for token, text in zip(last, texts, strict=True)]
    both = token_ids(tokenizer, joined, special=False)
    return [
        ids[len(start) :]
        if ids[: len(start)] == start
        else token_ids(tokenizer, [text], special=False)[0]
        for ids, start, text in zip(both, map(starts.__getitem__, last), texts, strict=True)
    ]


def rendered(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Any], /, **options: Any
) -> str:
    """Return the chat template's text of messages; `options` are those of apply_chat_template.

    Raises:
        jinja2.TemplateError: the template raises for these messages.
    """
    seen = [
        {**message, "content": message["content"].parts}
        if isinstance(message["content"], ImageText)
        else message
        for message in messages
    ]
    try:
        text = tokenizer.apply_chat_template(seen, tokenize=False, **options)
    except _TEMPLATE_ERRORS as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    assert isinstance(text, str)
    return text


class Renderer:
    """Renderer of chat messages: to prompt text by the chat template, and to token ids.

    Without a chat template, messages are separated by blank lines, an answer by a newline, and the
    tokenizer adds its special tokens.

    Args:
        tokenizer: of the model.
        options: further arguments of the chat template.

    Attributes:
        unknown_id: token of text that the tokenizer does not know; -1 without one of its own.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any] = NO_OPTIONS
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self.has_template = bool(tokenizer.chat_template)
        used = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        unknown = tokenizer.unk_token_id
        self.unknown_id = -1 if unknown is None or unknown in used else unknown
        if not self.has_template:
            log.warning("the tokenizer has no chat template: prompts are plain text")

    def render(self, messages: list[Message]) -> str:
        """Return the prompt text up to the beginning of the assistant's answer.

        A last message of the assistant is the beginning of the answer.

        Raises:
            jinja2.TemplateError: the template raises for these messages.
        """
        is_begun = messages[-1]["role"] == "assistant"
        if not self.has_template:
            if images_in(messages):
                raise TemplateError("there is none, and it says how images stand in a text")
            return plain_text(messages).removesuffix("\n" * is_begun)
        begin = "continue_final_message" if is_begun else "add_generation_prompt"
        return rendered(self._tokenizer, messages, **{begin: True}, **self._options)

    @property
    def lacks_marker(self) -> bool:
        """True if prompts end before the assistant's turn begins.

        The template then renders them the same with and without add_generation_prompt, and puts
        more before an assistant's message. (Some need no marker: after [/INST] the turn begins.)
        """
        user = [{"role": "user", "content": ANSWER}]
        turns = [*user, {"role": "assistant", "content": TURN}]
        if not self.has_template:
            return False
        try:
            with_marker = self.render(user)
            without = rendered(self._tokenizer, user, **self._options)
            both = rendered(self._tokenizer, turns, **self._options)
        except TemplateError:
            return False
        before = both.partition(TURN)[0]
        return with_marker == without and with_marker.strip() != before.strip()

    def unused_options(self) -> list[str]:
        """Return a message for each option that the chat template does not mention."""
        words = {*re.findall(r"\w+", str(self._tokenizer.chat_template))}
        return [
            f"data.chat_template_kwargs.{name} has no effect: the model's chat template does not "
            f"read it.\nRemove it, or correct its name: '~data.chat_template_kwargs.{name}'"
            for name in self._options
            if name not in words
        ]

    @property
    def description(self) -> str:
        """Origin of the chat template, for the user."""
        return "the tokenizer's own" if self.has_template else "none: prompts are plain text"

    def unknown_texts(self, text: str, count: int = 5) -> list[str]:
        """Return the first `count` different unknown parts of a text, quoted."""
        encoded: Any = self._tokenizer(text, return_offsets_mapping=self._tokenizer.is_fast)
        spans = zip(encoded["input_ids"], encoded.get("offset_mapping", ()), strict=False)
        unknown = [repr(text[a:b]) for token, (a, b) in spans if token == self.unknown_id]
        return list(dict.fromkeys(unknown))[:count]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts."""
        return token_ids(self._tokenizer, texts, special=not self.has_template)


def plain_text(messages: list[Message]) -> str:
    """Join messages up to the beginning of an answer, on a new line."""
    text = ""
    for message in messages:
        between = "" if not text else "\n" if message["role"] == "assistant" else "\n\n"
        text += between + message["content"]
    return text + "\n"


def decoder(tokenizer: "PreTrainedTokenizerBase", *, special: bool = False) -> Decode:
    """Return a function from token ids to texts, without special tokens unless asked for."""

    def decode(rows: Iterable[list[int]]) -> list[str]:
        return [tokenizer.decode(row, skip_special_tokens=not special) for row in rows]

    return decode


def stop_tokens(
    tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str], end_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Return all tokens whose text, with or without trailing white space, ends with a stop string.

    vLLM's engine core stops at tokens, not texts: a stop string must be a single token.

    Raises:
        ConfigError: a stop string is empty or several tokens.
    """
    if not stop:
        return ()
    counts = {text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in stop}
    wrong = [
        f"environment.stop has {text!r}, which is {count} tokens of this model; a turn can "
        f"end at single tokens only.\nUse a shorter string (=, ?, ]), or only the model's "
        f"end token: environment.stop=[]"
        for text, count in counts.items()
        if count != 1
    ]
    if wrong:
        raise ConfigError(*wrong)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return tuple(
        token
        for token, text in enumerate(texts)
        if token not in end_token_ids
        and any(text.endswith(end) or text.rstrip().endswith(end) for end in stop)
    )
