"""Small tokenizers with tokens of the usual kinds, built from a few texts."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The unbelievable cat sat on 12345 mats, didn't it?\n\n  Yes: x = 3.14159;\tend. ",
    "\U0001f600\U0001f600 na\u00efve caf\u00e9 \u4f60\u597d\u4e16\u754c \ud55c\uad6d "
    "\U0001f468\u200d\U0001f469 ",
]
END = "</end>"


def byte_level(size: int, *normalizer: normalizers.Normalizer) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens cross words, and cut or join characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([*normalizer])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[^.]{1,12}|."), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def sentence_piece() -> PreTrainedTokenizerFast:
    """BPE as of Llama 2: spaces are U+2581, one more before each text; other characters, bytes."""
    pieces = [END, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [chr(code) for code in range(33, 127)]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("a", "t"), ("1", "2"), ("e", "n")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.add_special_tokens([END])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def unicode_folding() -> PreTrainedTokenizerFast:
    """Byte-level, but of normalised text in lower case: other text than it was given."""
    return byte_level(500, normalizers.NFKC(), normalizers.Lowercase())


def word_level() -> PreTrainedTokenizerFast:
    """Tokens are words: their bytes are not known, as of most tokenizers of encoders."""
    tokenizer = Tokenizer(models.WordLevel({END: 0, "the": 1}, unk_token=END))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
