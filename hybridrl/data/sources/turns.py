"""Tokens of turns: environment answers, stop tokens, reference answers of supervised fine-tuning.

Sampled tokens are never tokenised again. An environment's answer is tokenised behind the last of
them and appended:

    turn ended with a stop string           the answer's text alone
    turn ended with the model's end token   the answer as a message, with the text that the chat
                                            template has between two assistant turns

Without a chat template such a message follows a blank line and ends with a newline.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.images import MARK, ImageText
from hybridrl.data.sources.rows import Message
from hybridrl.data.sources.tokenizer import (
    ANSWER,
    NO_OPTIONS,
    TURN,
    ids_after,
    rendered,
    stop_tokens,
    token_ids,
)
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AnswerTokens:
    """Tokeniser of the assistant's turns that follow rendered prompts.

    A turn is tokenised behind the last token of its prompt, which stays the same in training and in
    generation. It ends at the model's end token, as sampled responses do. `options` are further
    arguments of the chat template.

    Raises:
        ConfigError: the model has no end token.
    """

    def __init__(
        self, model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._ends = stop_token_ids(plain_folder(model.path))
        if not self._ends:
            raise ConfigError(
                f"model.path = {model.path} has no end token: a model trained on answers without "
                "one never ends its own.\n"
                "Set eos_token in its tokenizer_config.json, or eos_token_id in "
                "generation_config.json."
            )

    def turn(self, messages: list[Message], prompt: str, answer: str) -> str:
        """Return what the chat template writes after `prompt` for an answer to `messages`.

        It is the answer alone without a template. So it is with one that renders the prompt
        otherwise once an answer follows, or drops a part of the answer, such as its thinking.

        Raises:
            jinja2.TemplateError: the template raises for an answer.
        """
        if not self._tokenizer.chat_template:
            return answer
        begun = ""
        if messages[-1]["role"] == "assistant":  # the beginning of the answer
            *messages, last = messages
            begun = last["content"]
        turn = {"role": "assistant", "content": begun + answer}
        text = rendered(self._tokenizer, [*messages, turn], **self._options)
        written = text.removeprefix(prompt)
        is_whole = "".join(answer.split()) in "".join(written.split())
        return written if text.startswith(prompt) and is_whole else answer

    def encode(self, prompts: Sequence[list[int]], turns: Sequence[str]) -> list[list[int]]:
        """Return the token ids of turns after prompts, each with one end token, its last."""
        last = [ids[-1] for ids in prompts]
        return [self._ended(ids) for ids in ids_after(self._tokenizer, last, turns)]

    def _ended(self, ids: list[int]) -> list[int]:
        """Cut after the first end token (a template may write a newline there), or add one."""
        for index, token in enumerate(ids):
            if token in self._ends:
                return ids[: index + 1]
        own = self._tokenizer.eos_token_id
        return [*ids, own if own in self._ends else self._ends[0]]


class TurnTokens:
    """Tokeniser of environment answers, and the stop tokens of turns.

    Args:
        tokenizer: of the model.
        end_token_ids: tokens that end a response of the model.
        stop: strings that also end a turn.
        role: of an answer in the chat template.
        options: further arguments of the chat template.

    Raises:
        ConfigError: a stop string is not one token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Sequence[int],
        stop: Sequence[str],
        role: str,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._end_token_ids = end_token_ids
        self._role = role
        self.stop_token_ids = stop_tokens(tokenizer, stop, end_token_ids)

    def answers(self, texts: Sequence[str], last_tokens: Sequence[int]) -> list[list[int]]:
        """Return the token ids of answers to turns that ended with `last_tokens`.

        Raises:
            ConfigError: a turn ended with the model's end token, and the chat template cannot
                render an answer.
        """
        stops = set(self.stop_token_ids)
        shown = map(self._with_places, texts)
        framed = [
            text if last in stops else self._frame[0] + text + self._frame[1]
            for text, last in zip(shown, last_tokens, strict=True)
        ]
        return ids_after(self._tokenizer, last_tokens, framed)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts without adding special tokens."""
        return token_ids(self._tokenizer, [*map(self._with_places, texts)], special=False)

    def _with_places(self, text: str) -> str:
        """Return a text with the chat template's placeholder of each of its images."""
        return text.replace(MARK, self._image) if isinstance(text, ImageText) else text

    @cached_property
    def _image(self) -> str:
        """Text of the chat template for an image between two texts."""
        if not self._tokenizer.chat_template:
            return ""
        return self._rendered(ImageText(f"{ANSWER}{MARK}{ANSWER}", ())).split(ANSWER)[1]

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """Text of the chat template before an answer (after the end token), and after it."""
        if not self._tokenizer.chat_template:
            return "\n\n", "\n"
        behind = self._rendered(ANSWER).partition(TURN)[2]
        ends = [self._tokenizer.decode([token]) for token in self._end_token_ids]
        end = next((text for text in ends if behind.startswith(text)), None)
        before, answer, after = behind.removeprefix(end or "").partition(ANSWER)
        if end is None or not answer:
            raise self._template_error(f"after a turn it renders {behind!r} without an end token")
        return before, after

    def _rendered(self, answer: str) -> str:
        """Return the chat template's text of an answer to a turn."""
        messages = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": TURN},
            {"role": self._role, "content": answer},
        ]
        try:
            options = {"add_generation_prompt": True, **self._options}
            return rendered(self._tokenizer, messages, **options)
        except TemplateError as error:
            raise self._template_error(str(error)) from error

    def _template_error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"environment.role = {self._role}: the model's chat template cannot render an "
            f"answer after a turn that ended with the model's end token ({reason}).\n"
            "Set environment.role to a role of the template, or use an environment that ends the "
            "conversation there."
        )
