# SPDX-License-Identifier: Apache-2.0
"""StepImages: which rows of a step are images', and the rotary positions of all others.

A request's images are part of it, so that both are functions of the request and the range that is computed:
nothing is kept from step to step but the encodings.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.images.placed_image import PlacedImage
from radixkv.model.vision.encoder_cache import EncoderCache, Encoding
from radixkv.model.vision.paused_encoding import PausedEncoding, stop_between_layers
from radixkv.model.vision.vision_model import VisionModel
from radixkv.sampling.device_arrays import to_device
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.sequence import Sequence
from radixkv_kernels import Ahead

#: Bytes of encodings that are kept.
ENCODER_CACHE_BYTES = 256 * 2**20


def rope_positions(images: Items[PlacedImage], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions [3, end - start] of a prompt's tokens [start, end), and of its answer's.

    Text goes on by one in all three components. An image's tokens have its first token's position, plus their
    row and their column in its grid. O(end - start).
    """
    positions = np.arange(start, end)
    rows = np.repeat(positions[None], 3, axis=0)
    first = bisect_right(images, start, key=lambda image: image.end)
    if first:
        rows += images[first - 1].rope_end - images[first - 1].end
    for image in images[first:]:
        if image.start >= end:
            break
        assert image.grid is not None
        inside = slice(max(image.start, start) - start, min(image.end, end) - start)
        in_rows, in_columns = np.divmod(positions[inside] - image.start, image.grid[1])
        rows[:, inside] = image.rope_start
        rows[1, inside] += in_rows
        rows[2, inside] += in_columns
        rows[:, inside.stop :] = positions[inside.stop :] + (image.rope_end - image.end)
    return rows


@dataclass(slots=True)
class StepImages:
    """Images of one step.

    Attributes:
        rows: rows of the step that are images', ascending.
        encodings: what goes there: encodings, with the first and the last + 1 of their rows.
        rope: rotary positions int64 [3, T]; None: they are the places in the prompt.
        ahead: what rows see after their own position; None: nothing.
    """

    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    encodings: list[tuple[Encoding, int, int]] = field(default_factory=list)
    rope: npt.NDArray[np.int64] | None = None
    ahead: Ahead | None = None

    @property
    def is_text(self) -> bool:
        """True where no row is an image's: images come before them alone."""
        return not self.rows and self.ahead is None

    def inputs(self, vision: VisionModel, token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the arguments of a model's call for a step.

        Args:
            token_ids, positions: int64 [T], perhaps padded.
        """
        inputs: dict[str, Any] = {"position_ids": positions[None]}
        if self.rope is not None:
            rope = to_device(self.rope.reshape(-1), positions.device).view(3, -1)
            padding = len(positions) - rope.shape[1]
            inputs["position_ids"] = torch.nn.functional.pad(rope, (0, padding))[:, None]
        rows = to_device(np.concatenate([np.zeros(0, np.int64), *self.rows]), token_ids.device)
        if vision.adds_to_layers:
            inputs["per_layer_inputs"] = vision.embed_for_layers(token_ids, rows)
        if not self.rows:
            inputs["inputs_embeds"] = vision.embed(token_ids)[None]
            return inputs
        embeds = vision.embed(token_ids.index_fill(0, rows, 0))
        shown = self.joined(embeds.dtype)
        embeds[rows] = shown.rows
        inputs["inputs_embeds"] = embeds[None]
        if vision.family.is_deep:
            mask = torch.zeros(1, len(token_ids), dtype=torch.bool, device=token_ids.device)
            mask[0, rows] = True
            inputs["visual_pos_masks"] = mask
            inputs["deepstack_visual_embeds"] = list(shown.deep)
        return inputs

    def joined(self, dtype: torch.dtype) -> Encoding:
        """Return what goes into all rows of images, of which there are some, as one encoding."""

        def cut(of: Callable[[Encoding], Tensor]) -> Tensor:
            return torch.cat([of(each)[start:end] for each, start, end in self.encodings]).to(dtype)

        layers = len(self.encodings[0][0].deep)
        deep = (cut(lambda each, layer=layer: each.deep[layer]) for layer in range(layers))  # type: ignore[misc]
        return Encoding(cut(lambda each: each.rows), tuple(deep))


def _look_ahead(counts: npt.NDArray[np.int32], image: PlacedImage, start: int, end: int, offset: int) -> None:
    """Let an image's tokens in [start, end) see each other; the row of a position is `offset` further."""
    for first, last in image.together:
        places = np.arange(max(start, image.start + first), min(end, image.start + last))
        counts[places + offset] = image.start + last - 1 - places


class RunnerImages:
    """Encodes the images of a runner's steps, and before that in pieces: see `radixkv.engine.image_encoding`.

    Attributes:
        num_encoded: images that the tower has run on.
        encode_s: seconds that this took.
    """

    def __init__(self, vision: VisionModel, max_bytes: int = ENCODER_CACHE_BYTES) -> None:
        self.vision = vision
        self.cache = EncoderCache(max_bytes)
        self.num_encoded = 0
        self.encode_s = 0.0
        self._begun: tuple[Hashable, PausedEncoding] | None = None
        stop_between_layers(vision)

    @property
    def num_evicted(self) -> int:
        """Encodings that made room for others."""
        return self.cache.num_evicted

    @property
    def num_bytes(self) -> int:
        """Bytes of the encodings that are kept."""
        return self.cache.num_bytes

    def key(self, request: Sequence, image: PlacedImage) -> Hashable:
        """Return the name of an encoding. Namespaces share none: its time would tell of another's images."""
        return request.namespace, image.identity

    def has(self, key: Hashable) -> bool:
        """Return True if an encoding is there; it becomes the latest."""
        return self.cache.get(key) is not None

    def advance(self, key: Hashable, image: PlacedImage, seconds: float) -> bool:
        """Encode an image for some time, from where it was left; True: it is there, or has failed."""
        if self._begun is not None and self._begun[0] != key:
            self.cancel()
        if self.cache.get(key) is not None:
            return True
        if self._begun is None:
            self._begun = key, PausedEncoding(self.vision, image.image)
        begun, start = self._begun[1], time.monotonic()
        is_done = begun.advance(seconds)
        self.encode_s += time.monotonic() - start
        if is_done:
            self._begun = None
            if begun.result is not None:
                self._keep(key, image, begun.result)
        return is_done

    def cancel(self) -> None:
        """Give the image that was begun up."""
        if self._begun is not None:
            self._begun[1].cancel()
            self._begun = None

    def exchange(self, vision: VisionModel) -> None:
        """Encode with another tower, or with new weights of this one: nothing encoded before is kept."""
        self.cancel()
        self.cache.clear()
        if vision is not self.vision:
            self.vision = vision
            stop_between_layers(vision)

    def of(self, batch: Batch) -> StepImages | None:
        """Return a batch's images, encoded; None: none of its requests has one. O(entries), and the tower."""
        shown: StepImages | None = None
        has_grid = self.vision.family.has_grid
        for entry, first in zip(batch.entries, batch.query_starts.tolist(), strict=False):
            images = entry.request.request.images
            if not images:
                continue
            if shown is None:
                rope = np.repeat(batch.positions[None], 3, axis=0) if has_grid else None
                shown = StepImages(rope=rope)
            start, end = entry.start, entry.start + entry.count
            if shown.rope is not None:
                shown.rope[:, first : first + entry.count] = rope_positions(images, start, end)
            at = bisect_right(images, start, key=lambda image: image.end)
            for image in images[at:]:
                if image.start >= end:
                    break
                self._add(shown, self.key(entry.request, image), image, start, end, first - start)
                if image.together:
                    if shown.ahead is None:
                        none = np.zeros(batch.num_tokens, np.int32)
                        shown.ahead = Ahead(none, self.vision.processor.sees_ahead_in_windows_only)
                    _look_ahead(shown.ahead.counts, image, start, end, first - start)
        return shown

    def _add(
        self, shown: StepImages, key: Hashable, image: PlacedImage, start: int, end: int, offset: int
    ) -> None:
        """Add an image's tokens in [start, end); the row of a position is `offset` further."""
        start, end = max(start, image.start), min(end, image.end)
        places = np.arange(start, end)
        if image.between:
            places = places[~np.isin(places - image.start, image.between)]
        if len(places):
            shown.rows.append(places + offset)
            encoding = self._encoded(key, image)
            shown.encodings.append((encoding, image.row_at(start), image.row_at(end)))

    def _encoded(self, key: Hashable, image: PlacedImage) -> Encoding:
        """Return an image's encoding, made at once where it is not there."""
        found = self.cache.get(key)
        if found is None:
            start = time.monotonic()
            found = self.vision.encode(self.vision.prepare(image.image))
            self.encode_s += time.monotonic() - start
            self._keep(key, image, found)
        return found

    def _keep(self, key: Hashable, image: PlacedImage, encoding: Encoding) -> None:
        assert len(encoding.rows) == image.num_rows, "the tower gives other rows than the processor says"
        self.num_encoded += 1
        self.cache.put(key, encoding)
