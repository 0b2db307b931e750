"""Tokenisation of environment answers in conversations, and stop tokens of turns.

Sampled tokens are never tokenised again. An answer is tokenised by itself and appended:

    turn ended with a stop string           the answer's text alone
    turn ended with the model's end token   the answer as a message, with the text that the chat
                                            template has between two assistant turns

Without a chat template such a message follows a blank line and ends with a newline.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders of a turn and its answer in the rendered chat template.
_TURN, _ANSWER = "hybridrlturn", "hybridrlanswer"


class TurnTokens:
    """Tokeniser of environment answers, and the stop tokens of turns.

    Args:
        tokenizer: of the model.
        end_token_ids: tokens that end a response of the model.
        stop: stop strings, which also end a turn.
        role: of an answer in the chat template.

    Raises:
        ConfigError: a stop string is not one token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_token_ids: Sequence[int],
        stop: Sequence[str],
        role: str,
    ) -> None:
        self._tokenizer = tokenizer
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
        framed = [
            text if last in stops else self._frame[0] + text + self._frame[1]
            for text, last in zip(texts, last_tokens, strict=True)
        ]
        return self.encode(framed)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts without adding special tokens."""
        return token_ids(self._tokenizer, texts, special=False)

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """Text of the chat template before an answer (after the end token), and after it."""
        if not self._tokenizer.chat_template:
            return "\n\n", "\n"
        # jinja2 is optional: only chat templates need it.
        from jinja2 import TemplateError

        messages = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _TURN},
            {"role": self._role, "content": _ANSWER},
        ]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise self._template_error(str(error)) from error
        assert isinstance(rendered, str)
        behind = rendered.partition(_TURN)[2]
        ends = [self._tokenizer.decode([token]) for token in self._end_token_ids]
        end = next((text for text in ends if behind.startswith(text)), None)
        before, found, after = behind.removeprefix(end or "").partition(_ANSWER)
        if end is None or not found:
            raise self._template_error(f"after a turn it renders {behind!r} without an end token")
        return before, after

    def _template_error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"environment.role = {self._role}: the model's chat template cannot render an "
            f"answer after a turn that ended with the model's end token ({reason}).\n"
            "Set environment.role to a role of the template, or use an environment that ends the "
            "conversation there."
        )


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
