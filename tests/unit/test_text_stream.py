"""Text of a completion, piece by piece, up to a stop string."""

from hybridrl.agents.text import ModelText, TextStream
from hybridrl.data.sources.tokenizer import load_tokenizer
from tests.support.role_configs import model_config


def test_nothing_of_a_stop_string_is_sent_whose_last_character_takes_several_tokens():
    text = ModelText(load_tokenizer(model_config("embedded")), [])
    stream = TextStream(text, ["e½"], in_pieces=True)
    pieces = [stream.add([token]) for token in text.encode(" License½", None)]
    assert len(pieces) == 3  # the last character is two tokens
    assert "".join(pieces) == stream.text == " Licens"
