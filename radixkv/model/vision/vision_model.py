# SPDX-License-Identifier: Apache-2.0
"""VisionModel: a loaded model's tower, and its forward on rows of images."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.images.image_files import DecodedImage
from radixkv.model.loading.weight_files import stored_tensors
from radixkv.model.step_context import chooses_rows
from radixkv.model.vision.encoder_cache import Encoding
from radixkv.model.vision.families import TOWERS, VISION_FAMILIES, family_of
from radixkv.model.vision.image_placing import ModelImageProcessor
from radixkv.model.vision.llama4_pixels import Llama4Pixels

logger = logging.getLogger("radixkv")

#: Attention inside of towers: images are encoded one by one, whole.
_TOWER_ATTENTION = "sdpa"
#: Files with the settings of a model's image processor.
_SETTINGS = ("preprocessor_config.json", "processor_config.json")


class VisionModel:
    """A model that sees.

    Args:
        model: of transformers, of a family in `VISION_FAMILIES`, with its tower.
        processor: places images in its prompts.

    Attributes:
        stops_between_layers: the tower can be made to stop there; see `radixkv.model.vision.paused_encoding`.
    """

    def __init__(self, model: Any, processor: ModelImageProcessor) -> None:
        self.model = model
        self.processor = processor
        self.stops_between_layers = False
        self.family = VISION_FAMILIES[processor.family]
        # Llama 4 has no model without its head.
        self._whole = model if hasattr(model, "language_model") else model.model
        self._inputs = frozenset(inspect.signature(self._whole.get_image_features).parameters)
        # The rest of the model attends to the paged cache, of which the tower knows nothing.
        model.config.vision_config._attn_implementation = _TOWER_ATTENTION
        self._tower_name = next(name for name in TOWERS if getattr(self._whole, name, None) is not None)
        part: Any
        for part in self.tower.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation = _TOWER_ATTENTION

    @property
    def tower(self) -> nn.Module:
        """What encodes images, but for a projection behind it."""
        tower: nn.Module = getattr(self._whole, self._tower_name)
        return tower

    @property
    def has_tower(self) -> bool:
        """False after `drop_tower`."""
        return not isinstance(self.tower, nn.Identity)

    def drop_tower(self) -> None:
        """Give the tower's memory back, where another rank encodes."""
        setattr(self._whole, self._tower_name, nn.Identity())

    def prepare(self, image: DecodedImage) -> dict[str, Tensor]:
        """Return the tower's inputs for an image. O(pixels); any thread.

        Raises:
            InvalidRequestError: no image of this shape can be shown.
        """
        return {name: value for name, value in self.processor.inputs(image).items() if name in self._inputs}

    def encode(self, prepared: dict[str, Tensor]) -> Encoding:
        """Run the tower on one image. O(its patches squared) in places.

        Alone, so that its rows do not depend on other images, or on where its prompt was cut.
        """
        device, dtype = self.model.device, self.model.dtype
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in prepared.items()
        }
        output = self._whole.get_image_features(**inputs, return_dict=True)
        deep = tuple(_joined(each) for each in getattr(output, "deepstack_features", None) or ())
        if self._whole is self.model:
            return Encoding(self.model.multi_modal_projector(_joined(output.last_hidden_state)))
        return Encoding(_joined(output.pooler_output), deep)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the [T, hidden] embeddings of token ids [T] within the vocabulary."""
        rows: Tensor = self.model.get_input_embeddings()(token_ids)
        return rows

    @property
    def adds_to_layers(self) -> bool:
        """True if each layer gets an embedding of the tokens of its own (Gemma 4 E2B and E4B)."""
        return bool(getattr(self.model.config.get_text_config(), "hidden_size_per_layer_input", 0))

    def embed_for_layers(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return [1, T, layers, size]: what layers add for token ids [T], of which `rows` are images'."""
        text = self._whole.language_model
        padded = token_ids.index_fill(0, rows, int(text.config.pad_token_id))
        embedded: Tensor = text.get_per_layer_inputs(padded[None])
        return embedded

    def __call__(self, *, logits_to_keep: Tensor | None = None, **inputs: Any) -> Any:
        """Call the model as `call_model` does, with rows for some of its first layers, too."""
        if not self.family.is_deep:
            if logits_to_keep is None:
                return self.model(**inputs)
            if chooses_rows(self.model):
                return self.model(**inputs, logits_to_keep=logits_to_keep)
            return SimpleNamespace(logits=self.model(**inputs).logits[:, logits_to_keep])
        # The whole model finds images by their token id, which an answer may spell.
        hidden = self._whole.language_model(**inputs).last_hidden_state
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.model.lm_head(hidden))


def _joined(features: Any) -> Tensor:
    """Return the rows of images, a tensor each or all in one, as [tokens, hidden]."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat(list(features))


def has_sight(hf_config: Any, folder: Path) -> bool:
    """Return True if a folder's model is of a family that sees, with a tower and settings for images."""
    return has_image_settings(hf_config, folder) and any(
        part in TOWERS for name in stored_tensors(folder) for part in name.split(".", 3)
    )


def has_image_settings(hf_config: Any, folder: Path) -> bool:
    """Return True if a folder's model is of a family that sees, with settings for images; of any weights."""
    return bool(family_of(hf_config)) and any((folder / name).is_file() for name in _SETTINGS)


def open_vision(name: str, model: Any, folder: Path, hf_tokenizer: Any) -> VisionModel | None:
    """Return the sight of a loaded model that `has_sight`; None, with a warning: it can't be had."""
    processor = open_image_processor(name, model.config, folder, hf_tokenizer)
    return None if processor is None else VisionModel(model, processor)


def open_image_processor(
    name: str, hf_config: Any, folder: Path, hf_tokenizer: Any
) -> ModelImageProcessor | None:
    """Return the image processor of a folder that `has_image_settings`; None, with a warning: see above."""
    from transformers import AutoImageProcessor  # heavy

    family = family_of(hf_config)
    try:
        processor: Any
        if family == "llama4":
            processor = Llama4Pixels.read(folder)
        else:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:  # whatever transformers does with a folder's files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        logger.warning("%s is served without its sight: its image processor can't be had (%s)", name, reason)
        return None
    facts = VISION_FAMILIES[family].facts(hf_config, processor, hf_tokenizer)
    placeholder = int(facts.pop("placeholder", hf_config.image_token_id))
    return ModelImageProcessor(family, processor, placeholder, facts)
