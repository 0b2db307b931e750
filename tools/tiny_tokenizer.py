"""The tiny model's tokenizer: byte-level BPE, as an ordinary fast tokenizer.

It reads and writes back any text. The words of the problems are one token each, and so is every
digit, with or without the space before it: `#### 42` is "####", " 4" and "2".
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 640

# Words, digits, runs of signs, white space; a space belongs to the piece behind it.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer(
    texts: Iterable[str], size: int = VOCAB_SIZE, special: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer of `size` tokens: special ones, all bytes, the frequent parts of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END, *ROLES, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_tokens: int, template: str = CHAT_TEMPLATE
) -> None:
    """Write the files that transformers' AutoTokenizer reads.

    Args:
        tokenizer: from `build_tokenizer`.
        folder: existing folder of the model.
        max_tokens: longest sequence of the model.
        template: for chat messages.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
