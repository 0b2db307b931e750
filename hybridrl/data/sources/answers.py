"""Reference answers of supervised fine-tuning, as token ids with an end token."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.rows import Message
from hybridrl.data.sources.tokenizer import NO_OPTIONS, ids_after, load_tokenizer, rendered
from hybridrl.models.end_tokens import stop_token_ids
from hybridrl.models.resolve import plain_folder


class AnswerTokens:
    """Tokeniser of the assistant's turns that follow rendered prompts.

    A turn is tokenised behind the last token of its prompt, which stays the same in training and in
    generation. It ends at the model's end token, as sampled responses do. `options` are further
    arguments of the chat template.

    Raises:
        ConfigError: there is no such model, or it has no end token.
    """

    def __init__(self, model: ModelConfig, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        self._tokenizer, self._options = load_tokenizer(model), options
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

        It is the answer alone without a template, and with one that renders the prompt otherwise
        once an answer follows, or drops a part of the answer, such as its thinking.

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
