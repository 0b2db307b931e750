"""Images in a packed forward: the tower's inputs, its pass, and the positions of tokens.

Shapes:  N = packed tokens   B = sequences

The tower runs once per micro-batch, on each image once, however many responses share it. It is
sharded as all else, so every rank takes part: one without an image computes a small one, of whose
states it takes none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hybridrl.data.images import PromptImages

# Models and configurations of transformers, whose names are those of their families.
OfFamily = Any
# Grids of patches in time, height and width; or heights and widths in pixels.
GRIDS, SIZES, PIXELS = "image_grid_thw", "image_sizes", "pixel_values"


class PackedImages(NamedTuple):
    """Images of a micro-batch, at least one.

    Attributes:
        tensors: arguments of transformers' `get_image_features`, of each distinct image.
        order: for each image of the packed tokens, in their order, its index among these.
        places: [M] int64, the packed tokens that are states of images.
    """

    tensors: Mapping[str, Tensor]
    order: list[int]
    places: Tensor


def decoder(model: PreTrainedModel) -> OfFamily:
    """Return what has the embedding, decoder layers and last norm: all below a head, or a part."""
    base = model.base_model
    return base._modules.get("language_model", base)


def vision_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return what makes states of an image: a tower and perhaps what follows it; [] without."""
    base, text = model.base_model, decoder(model)
    return [] if text is base else [part for part in base.children() if part is not text]


def text_config(model: PreTrainedModel) -> OfFamily:
    """Return the configuration of a model's language model."""
    return model.config.get_text_config()


def freeze_vision(model: PreTrainedModel) -> None:
    """Freeze what makes states of images."""
    for part in vision_parts(model):
        part.requires_grad_(False)


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a tower that are alike, such as its layers."""
    parts = (module for part in vision_parts(model) for module in part.modules())
    return [block for each in parts if isinstance(each, nn.ModuleList) for block in each]


class ImagePacker:
    """Packs images for a model of transformers, whose weights it does not use."""

    def __init__(self, base: OfFamily) -> None:
        self._base = base
        self._token = base.config.image_token_id
        self._has_grids = "get_rope_index" in dir(type(base))
        self._smallest = smallest_image(base.config)

    def pack(self, input_ids: Tensor, rows: Sequence[PromptImages | None]) -> PackedImages:
        """Put together the images of sequences, [B], on the CPU; input_ids are [N].

        Raises:
            ValueError: tokens are not those of the images.
        """
        prompts = {id(row): row for row in rows if row is not None and len(row)}
        start, starts = 0, dict[int, int]()
        for key, prompt in prompts.items():
            starts[key] = start
            start += len(prompt)
        order = [
            starts[id(row)] + index for row in rows if row is not None for index in range(len(row))
        ]
        joined = [prompt.tensors for prompt in prompts.values()]
        if not (joined and self._has_grids):  # of a single state transformers loses a dim
            joined.append(self._smallest)
        tensors = {name: _joined(name, [one[name] for one in joined]) for name in self._smallest}
        places = (input_ids == self._token).nonzero().flatten()
        expected = sum(self._states(row) for row in rows if row is not None)
        if len(places) != expected:
            raise ValueError(f"{len(places)} tokens for images that have {expected} states")
        return PackedImages(tensors, order, places)

    def _states(self, images: PromptImages) -> int:
        """Return the number of tokens of a prompt's images."""
        sizes, config = torch.tensor(images.sizes), self._base.config
        if self._has_grids:
            return int(sizes.prod(-1).sum()) // config.vision_config.spatial_merge_size**2
        side = config.vision_config.patch_size * config.spatial_merge_size
        return int((sizes // side).prod(-1).sum())

    def positions(
        self, sequences: Sequence[Tensor], rows: Sequence[PromptImages | None]
    ) -> Tensor | None:
        """Return positions in time, height and width of the tokens, [3, N]; None without such."""
        if not self._has_grids:
            return None
        parts = []
        for ids, images in zip(sequences, rows, strict=True):
            if images is None:
                parts.append(torch.arange(len(ids)).expand(3, -1))
                continue
            kinds = (ids == self._token).int()[None]
            grids = images.tensors[GRIDS]
            own, _ = self._base.get_rope_index(ids[None], kinds, image_grid_thw=grids)
            parts.append(own[:, 0])
        return torch.cat(parts, 1)


def image_packer(model: PreTrainedModel) -> ImagePacker | None:
    """Return the packer of a model, perhaps with a head; None if it takes no images."""
    return ImagePacker(model.base_model) if vision_parts(model) else None


def _joined(name: str, values: Sequence[Tensor]) -> Tensor:
    """Concatenate what processors made of several prompts; images of pixels get one size."""
    if name == PIXELS and values[0].dim() == 4:
        height, width = (max(x.shape[dim] for x in values) for dim in (2, 3))
        values = [F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) for x in values]
    return torch.cat(list(values))


def smallest_image(config: OfFamily) -> dict[str, Tensor]:
    """Return what a processor makes of a black image with one state, or two."""
    tower = config.vision_config.to_dict()
    merge, side = tower.get("spatial_merge_size"), tower["patch_size"]
    if merge is None:
        side *= config.spatial_merge_size  # of a single state transformers loses a dim
        pixels = torch.zeros(1, tower["num_channels"], side, 2 * side)
        return {PIXELS: pixels, SIZES: torch.tensor([[side, 2 * side]])}
    values = tower["in_channels"] * tower["temporal_patch_size"] * side**2
    return {PIXELS: torch.zeros(merge**2, values), GRIDS: torch.tensor([[1, merge, merge]])}


def inputs_with_images(base: OfFamily, input_ids: Tensor, images: PackedImages) -> dict[str, Any]:
    """Run the tower; return the arguments of a language model for tokens [1, N]."""
    bounds = {}
    if SIZES in images.tensors:  # which their model does not pass on as bounds
        lengths = (images.tensors[SIZES] // base.config.vision_config.patch_size).prod(-1)
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(input_ids.device, torch.int32)
        bounds = {"cu_seq_lens_q": ends, "max_length_q": int(lengths.max())}
    output = base.get_image_features(**images.tensors, **bounds, return_dict=True)
    sizes = [len(states) for states in output.pooler_output]

    def ordered(states: Tensor | Sequence[Tensor]) -> Tensor:
        parts = states.split(sizes) if isinstance(states, Tensor) else states
        # With no states of a small image its graph is still there, so that backwards match, too.
        return torch.cat([parts[index] for index in images.order] or [parts[0][:0]])

    embeddings = base.get_input_embeddings()(input_ids)
    states = ordered(output.pooler_output).to(embeddings.dtype)
    inputs: dict[str, Any] = {
        "inputs_embeds": embeddings.index_copy(1, images.places, states[None])
    }
    if "deepstack_features" in output:  # added to states of the first layers
        mask = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, images.places, True)
        inputs["visual_pos_masks"] = mask
        inputs["deepstack_visual_embeds"] = [*map(ordered, output.deepstack_features)]
    return inputs
