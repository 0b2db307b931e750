"""The tiny model's tokenizer: words and single digits, as an ordinary fast tokenizer.

A space belongs to the token behind it, so decoding is concatenation and `#### 42`, which is
the tokens "####", " 4" and "2", comes back as it was.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL = (PAD, END, UNKNOWN, *ROLES)

_SIGNS = tuple("+-*/=.,:;?!$%()'\"<>")
_PIECES = r" ?[A-Za-z]+| ?[0-9]| ?####|\n| ?[^\sA-Za-z0-9]|\s"
# Sizes of embeddings are kept divisible by this.
_VOCAB_MULTIPLE = 8

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer that knows every word of `texts`, all digits and the usual signs."""
    splitter = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    pieces = {"\n", "####", " ####"}
    pieces |= {space + sign for sign in (*_SIGNS, *"0123456789") for space in ("", " ")}
    for text in texts:
        pieces |= {piece for piece, _ in splitter.pre_tokenize_str(text)}
    tokens = [*SPECIAL, *sorted(pieces)]
    missing = -len(tokens) % _VOCAB_MULTIPLE
    tokens += [f"<|reserved_{k}|>" for k in range(missing)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in tokens if t.startswith("<|")]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write the files that transformers' AutoTokenizer reads.

    Args:
        tokenizer: from `build_tokenizer`.
        folder: existing folder of the model.
        max_tokens: longest sequence of the model.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
