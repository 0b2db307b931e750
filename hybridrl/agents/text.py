"""Text of the model: rendering, tokens, and the text of a completion while it is sampled."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from hybridrl.agents.images import RequestImages
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.images import ImageFile
from hybridrl.data.sources.tokenizer import (
    NO_OPTIONS,
    ids_after,
    plain_text,
    rendered,
    stop_tokens,
    token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A tool, to see whether a chat template renders tools.
PROBE = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
# Character of an incomplete UTF-8 sequence in decoded text.
INCOMPLETE = "�"
# Sets of stop strings, and texts, whose tokens are remembered, and the other way round.
STOP_SETS = TEXTS = 64


class ModelText:
    """Chat template and tokenizer of a model.

    Methods raise jinja2.TemplateError if the template does not accept the messages.

    Args:
        options: arguments of the chat template, unless a request has others.
        images: None if the model takes none.

    Attributes:
        size: number of tokens.
        longest: most characters of a token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Sequence[int],
        options: Mapping[str, Any] = NO_OPTIONS,
        images: RequestImages | None = None,
    ) -> None:
        self._tokenizer, self.images = tokenizer, images
        self._options = {"add_generation_prompt": True, **options}
        self.size = len(tokenizer)
        self.longest = max(map(len, tokenizer.get_vocab()))
        self._end_token_ids = tuple(end_token_ids)
        self.stop_token_ids = lru_cache(STOP_SETS)(self._stop_token_ids)
        # All episodes of a prompt begin with the same text, at the same time.
        self._encode_start = lru_cache(TEXTS)(self._encode)
        # The text of a completion is asked for with special tokens, without them and up to its end.
        self._decode = lru_cache(TEXTS)(self._decode_tokens)
        self._added = frozenset(tokenizer.added_tokens_decoder)

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the text of a prompt; `options` are those of apply_chat_template."""
        if not self._tokenizer.chat_template:
            if any(isinstance(message["content"], list) for message in messages):
                raise TemplateError("there is none, and it says how images stand in a text")
            return plain_text(list(messages))
        seen = [message | {"content": _shown(message["content"])} for message in messages]
        return rendered(self._tokenizer, seen, **self._options | options)

    @cached_property
    def has_tools(self) -> bool:
        """False if the chat template leaves tools out, so that the model would never see them."""
        asked = [{"role": "user", "content": "?"}]
        try:
            with_tools = self.render(asked, tools=[{"type": "function", "function": PROBE}])
            return with_tools != self.render(asked)
        except TemplateError:  # which the request itself will meet
            return True

    def encode(self, text: str, last: int | None, images: Sequence[ImageFile] = ()) -> list[int]:
        """Return the token ids of a text after the token `last`; None: at the beginning.

        Raises:
            RequestError: its images and their placeholders do not fit.
        """
        if last is None:
            ids = [*self._encode_start(text)]
        else:
            ids = ids_after(self._tokenizer, [last], [text])[0]
        return ids if self.images is None else self.images.expanded(ids, images)

    def _encode(self, text: str) -> list[int]:
        return token_ids(self._tokenizer, [text], special=not self._tokenizer.chat_template)[0]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, with special tokens or without."""
        return self._decode(tuple(tokens), special and not self._added.isdisjoint(tokens))

    def _decode_tokens(self, tokens: tuple[int, ...], special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        # Of a list, transformers would look at each element.
        text = self._tokenizer.decode(np.asarray(tokens, np.int64), **options)
        assert isinstance(text, str)
        return text

    def without_end(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion with special tokens, but for its end token."""
        end = len(tokens) - (bool(tokens) and tokens[-1] in self._end_token_ids)
        return self.decode(tokens[:end], special=True)

    def _stop_token_ids(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        """Return tokens that end a turn at once; () if a string is several tokens."""
        try:
            return stop_tokens(self._tokenizer, stop, self._end_token_ids)
        except ConfigError:
            return ()


def _shown(content: object) -> object:
    """Return the content of a message as chat templates read it: an image is its place."""
    if not isinstance(content, list):
        return content
    return [{"type": "image"} if "image_url" in part else part for part in content]


class TextStream:
    """Text of a completion as its tokens arrive, up to a stop string.

    Without stop strings and `in_pieces`, the text is decoded at its end.

    Attributes:
        text: so far, without the stop string at the end.
        stop: the stop string that was found.
        used: tokens up to the one that completes the stop string.
    """

    def __init__(self, model: ModelText, stop: Sequence[str], *, in_pieces: bool) -> None:
        self._model = model
        self._in_pieces = in_pieces
        self._stops = [text for text in stop if text]
        self._held = max(map(len, self._stops), default=1) - 1
        self._tokens: list[int] = []
        # Tokens whose text is complete, those that the last of them are decoded with, and the text.
        self._read, self._context, self._complete = 0, 0, ""
        self._sent = 0
        self.used = 0
        self.text = ""
        self.stop: str | None = None

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the further text that is certain."""
        first = len(self._tokens)
        self._tokens += tokens
        self.used = len(self._tokens)
        if not (self._in_pieces or self._stops):
            return ""
        self._decode()
        stops = [(at, stop) for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if not stops:
            return self._next(len(self.text.rstrip(INCOMPLETE)) - self._held)
        at, self.stop = min(stops)
        while self.used - 1 > first and self.stop in self._model.decode(
            self._tokens[: self.used - 1]
        ):
            self.used -= 1
        self.text = self.text[:at]
        return self.rest()

    def rest(self) -> str:
        """Return the text that was held back."""
        if self._read < self.used and self.stop is None:
            self._decode()
        return self._next(len(self.text))

    def _next(self, end: int) -> str:
        piece = self.text[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        return piece

    def _decode(self) -> None:
        """Update the text; only the last tokens are decoded again, with one part before them."""
        known = self._model.decode(self._tokens[self._context : self._read])
        new = self._model.decode(self._tokens[self._context :])[len(known) :]
        self.text = self._complete + new
        if not new.endswith(INCOMPLETE):
            self._context, self._read = self._read, len(self._tokens)
            self._complete = self.text
