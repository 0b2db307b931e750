"""Answers as token ids behind what was sampled, and the tokens at which turns end."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from hybridrl.agents.text import ModelText
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.data.sources.turns import TurnTokens
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import model_folder

END = 1  # of the embedded model: <|end|>
STOP = " ="


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_config("embedded"))


def turns(tokenizer, stop=("=",), role="user") -> TurnTokens:
    return TurnTokens(tokenizer, [END], stop, role)


def test_every_token_that_ends_with_a_stop_text_ends_a_turn(tokenizer):
    tokens = turns(tokenizer)
    assert {tokenizer.decode([i]) for i in tokens.stop_token_ids} == {"=", " ="}
    both = turns(tokenizer, stop=("=", "\n")).stop_token_ids
    assert {tokenizer.decode([i]) for i in both} == {"=", " =", "\n"}
    assert turns(tokenizer, stop=()).stop_token_ids == ()


def test_a_stop_text_of_several_tokens_is_refused_with_its_number(tokenizer):
    with pytest.raises(ConfigError) as caught:
        turns(tokenizer, stop=("=>", "=", ""))
    first, second = caught.value.texts
    assert "'=>', which is 2 tokens" in first and "'', which is 0 tokens" in second


def test_behind_a_stop_text_the_answer_stands_as_it_is(tokenizer):
    tokens = turns(tokenizer)
    stop = tokens.stop_token_ids[0]
    (ids,) = tokens.answers([" 20\n"], [stop])
    assert tokenizer.decode(ids) == " 20\n"


def test_behind_the_end_token_the_answer_is_a_message(tokenizer):
    """Turn, end token, answer and the next turn's beginning are what the template renders."""
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "16 + 4"},
        {"role": "user", "content": "20"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = whole[: whole.index(END) + 1]
    (answer,) = turns(tokenizer).answers(["20"], [END])
    assert before + answer == whole


def test_an_answer_is_tokenised_as_behind_the_end_token():
    """Phi-3's end token takes the newline with it, and each text gets a space at its beginning."""
    vocab = {text: k for k, text in enumerate(["?", "▁", "2", "0", "\n"])}
    plain = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    plain.normalizer = normalizers.Prepend("▁")
    plain.add_special_tokens([AddedToken(text, rstrip=True) for text in ("<|end|>", "<|user|>")])
    template = "{% for m in messages %}<|user|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    (answer,) = TurnTokens(tokenizer, [end], (), "user").answers(["20"], [end])
    assert tokenizer.convert_ids_to_tokens(answer) == ["<|user|>", "▁", "2", "0", "<|end|>"]
    assert ModelText(tokenizer, [end]).encode("\n<|user|>\n20<|end|>\n", end) == answer


def test_without_a_template_an_answer_is_a_paragraph(tmp_path):
    folder = model_folder(tmp_path / "model", ["\nyes", "\n"], template=None)
    tokenizer = load_tokenizer(model_config(folder))
    tokens = TurnTokens(tokenizer, [0], (), "user")
    (ids,) = tokens.answers(["yes"], [0])
    assert tokenizer.decode(ids) == "\n\nyes\n"


@pytest.mark.parametrize(
    ("role", "names"),
    [("tool", "unknown role tool"), ("user", "role = user: .*cannot render an answer")],
)
def test_a_template_without_a_place_for_answers_is_named_when_one_is_needed(tmp_path, role, names):
    """This one knows no tool, and writes no end token behind a turn."""
    tokenizer = load_tokenizer(model_config(model_folder(tmp_path / "model", ["yes", "= 4"])))
    tokens = TurnTokens(tokenizer, [0], (), role)
    with pytest.raises(ConfigError, match=names):
        tokens.answers(["yes"], [0])
