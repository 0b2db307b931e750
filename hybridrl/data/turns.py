"""How an environment's answers become token ids, and at which tokens a turn ends.

What the model sampled stays as it was sampled; an answer is tokenised once, by itself, and its ids
are put behind:

    the turn ended with a stop string      the answer's text, nothing else
    with the model's own end token         what the chat template puts between an assistant's end
                                           token and its next turn, the answer in it as a message

Without a chat template such a message stands between a blank line and a line's end.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridrl.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stand in for the texts of a turn and of its answer while the chat template is looked at.
_TURN, _ANSWER = "hybridrlturn", "hybridrlanswer"


class TurnTokens:
    """Answers as token ids, and the tokens at which a turn ends.

    Args:
        tokenizer: of the model.
        end_token_ids: tokens that end a response of the model.
        stop: texts at which a turn ends, too.
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
        """The ids of answers to turns that ended with these tokens.

        Raises:
            ConfigError: one ended with the model's end token, and the chat template has no place
                for an answer.
        """
        stops = set(self.stop_token_ids)
        framed = [
            text if last in stops else self._frame[0] + text + self._frame[1]
            for text, last in zip(texts, last_tokens, strict=True)
        ]
        return self.encode(framed)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts as they are, without special tokens around them."""
        if not texts:
            return []
        encoded: Any = self._tokenizer(list(texts), add_special_tokens=False)
        return encoded["input_ids"]

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What stands between the end token and an answer, and behind that until the next turn."""
        if not self._tokenizer.chat_template:
            return "\n\n", "\n"
        # transformers needs jinja2 for templates; runs that never render do without.
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
            raise self._no_place(str(error)) from error
        assert isinstance(rendered, str)
        behind = rendered.partition(_TURN)[2]
        ends = [self._tokenizer.decode([token]) for token in self._end_token_ids]
        end = next((text for text in ends if behind.startswith(text)), None)
        before, found, after = behind.removeprefix(end or "").partition(_ANSWER)
        if end is None or not found:
            raise self._no_place(f"behind a turn it writes {behind!r}, whose end token is not one")
        return before, after

    def _no_place(self, reason: str) -> ConfigError:
        return ConfigError(
            f"environment.role = {self._role}: the model's chat template has no place for an "
            f"answer to a turn that ended with the model's end token ({reason}).\n"
            "Choose a role that it knows, or an environment that is done then."
        )


def stop_tokens(
    tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str], end_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Every token whose text ends with one of the stop strings, white space behind it aside.

    vLLM's engine core knows tokens, not texts: a stop string must be a token.

    Raises:
        ConfigError: a stop string is empty or more than one token.
    """
    if not stop:
        return ()
    wrong = []
    for text in stop:
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if count != 1:
            wrong.append(
                f"environment.stop has {text!r}, which is {count} tokens of this model; a turn can "
                f"end at single tokens only.\nTake a shorter marker (=, ?, ]), or let the "
                f"model's own end token end turns: environment.stop=[]"
            )
    if wrong:
        raise ConfigError(*wrong)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return tuple(
        token
        for token, text in enumerate(texts)
        if token not in end_token_ids
        and any(text.endswith(end) or text.rstrip().endswith(end) for end in stop)
    )
