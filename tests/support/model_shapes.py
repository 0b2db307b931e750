"""Shapes of models that tests reckon with; nothing of that size is built."""

from dataclasses import replace

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import ModelShape
from hybridrl.models.known_shapes import QWEN2_5

QWEN, QWEN_7B = QWEN2_5["0.5B"], QWEN2_5["7B"]
# The order of size of the embedded model.
TINY = QWEN | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 65,
    "max_position_embeddings": 256,
}
# What the config.json of a reward model adds.
REWARD_HEAD = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
QWEN_1_5B = model_shape(QWEN2_5["1.5B"])


def with_window(shape: ModelShape, window: int, layers: int) -> ModelShape:
    """Return a shape of equal layers, of which the first few have a sliding window."""
    (kind,) = shape.kinds

    sliding = replace(kind, attention=kind.attention._replace(window=window))
    order = (1,) * layers + (0,) * (shape.layers - layers)
    return replace(shape, kinds=(kind, sliding), order=order)
