# SPDX-License-Identifier: Apache-2.0
"""A paged hash model that sees: the rows of an image are the virtual ids of its tokens.

Encoder cache, pauses between layers and waiting are the engine's own; what they give to each step is compared
with the prompt: rows at all tokens of images and nowhere else, each its own image's, and the rotary positions
of a plain loop. The tower fails where it is told to.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from paged_language_model import PagedHashModel
from scripted_images import picture
from torch import nn

from radixkv.engine.engine import Engine
from radixkv.engine.image_encoding import ImageEncoding
from radixkv.images.image_files import DecodedImage, image_of
from radixkv.images.placed_image import FIRST_IMAGE_ID, PlacedImage, identity_of, image_ids
from radixkv.model.vision.encoder_cache import Encoding
from radixkv.model.vision.step_images import RunnerImages
from radixkv.scheduling.batch import Batch

NUM_PICTURES = 8
_CELL = 8  # pixels of a token's side
_LINE_END = 5
_NUM_LAYERS = 3


class BrokenTower(RuntimeError):
    """What a tower raises that was told to fail."""


class HashImages:
    """Pictures of one seed, how a prompt gets them, and the failures of the tower.

    Args:
        seed: of the pictures' sizes.
        has_grid: rotary positions have three components; else a text token ends each line of an image.

    Attributes:
        pictures: some of them with as many tokens.
        broken: digests of those that can't be encoded.
        flaky: digests of those whose next encoding fails.
    """

    def __init__(self, seed: int, has_grid: bool) -> None:
        self.has_grid = has_grid
        random = np.random.default_rng(seed)
        sizes = [(int(w) * _CELL, int(h) * _CELL) for w, h in random.integers(1, 6, (NUM_PICTURES // 2, 2))]
        self.pictures = [image_of(picture(seed, sizes[seed // 2])) for seed in range(NUM_PICTURES)]
        self.broken: set[bytes] = set()
        self.flaky: set[bytes] = set()

    def num_tokens(self, width: int, height: int) -> int:
        """See `ImageProcessor`."""
        rows, columns = height // _CELL, width // _CELL
        return rows * columns if self.has_grid else rows * (columns + 1)

    def place(
        self, token_ids: Sequence[int | DecodedImage], images: Sequence[DecodedImage] = ()
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return a prompt of tokens and pictures as ids, and the pictures at their places.

        Args:
            images: pictures at the places of the token 0; see `ImageProcessor`.
        """
        given = iter(images)
        token_ids = [next(given) if images and part == 0 else part for part in token_ids]
        ids: list[int] = []
        placed: list[PlacedImage] = []
        shift = 0
        for part in token_ids:
            if not isinstance(part, DecodedImage):
                ids.append(part)
                continue
            length = self.num_tokens(part.width, part.height)
            rows, columns = part.height // _CELL, part.width // _CELL
            between = () if self.has_grid else tuple((i + 1) * (columns + 1) - 1 for i in range(rows))
            image = PlacedImage(
                part,
                identity_of(part, ""),
                start=len(ids),
                length=length,
                between=between,
                grid=(rows, columns) if self.has_grid else None,
                rope_start=len(ids) + shift,
            )
            own = iter(image_ids(image.identity, image.num_rows))
            ids += [_LINE_END if at in between else next(own) for at in range(length)]
            placed.append(image)
            shift = image.rope_end - image.end
        return ids, placed


class _Layer(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(_NUM_LAYERS))


class HashVision:
    """Stands where `radixkv.model.vision.vision_model.VisionModel` stands."""

    stops_between_layers = False

    def __init__(self, images: HashImages) -> None:
        self._images = images
        self.tower = _Tower()
        self.family = SimpleNamespace(has_grid=images.has_grid, is_deep=False)

    def prepare(self, image: DecodedImage) -> dict[str, Any]:
        """Fails for half of the pictures that are to fail."""
        if image.digest[0] % 2:
            self._fail(image)
        return {"image": image}

    def encode(self, prepared: dict[str, Any]) -> Encoding:
        """Fails, in the midst of its layers, for the other half."""
        image: DecodedImage = prepared["image"]
        _, (placed,) = self._images.place([image])
        rows = torch.tensor(image_ids(placed.identity, placed.num_rows))[:, None] - _NUM_LAYERS
        for at, layer in enumerate(self.tower.layers):
            if at == _NUM_LAYERS - 1:
                self._fail(image)
            rows = layer(rows)
        return Encoding(rows)

    def _fail(self, image: DecodedImage) -> None:
        if image.digest in self._images.broken or image.digest in self._images.flaky:
            self._images.flaky.discard(image.digest)
            raise BrokenTower(f"{image.words} can't be encoded")


class SeesImages(PagedHashModel):
    """Mixed into a hash model: it sees, and checks what it is given to see. `see` comes first."""

    images: RunnerImages

    def see(self, images: HashImages, max_bytes: int) -> None:
        """Take prompts with pictures, and keep so many bytes of their encodings."""
        self.images = RunnerImages(HashVision(images), max_bytes)  # type: ignore[arg-type]

    def execute(self, batch: Batch) -> torch.Tensor:
        self._look(batch)
        return super().execute(batch)

    def _look(self, batch: Batch) -> None:
        shown = self.images.of(batch)
        self.images.cache.check()
        has_images = any(entry.request.request.images for entry in batch.entries)
        if (shown is not None) != has_images:
            self._wrong("images are shown where there are none, or none where there are some")
        if shown is None:
            return
        rows = np.concatenate([np.array([], np.int64), *shown.rows])
        given = [each.rows[a:b, 0].numpy() for each, a, b in shown.encodings]
        token_ids = batch.token_ids if batch.fed_tokens is None else batch.fed_tokens.numpy()
        expected = np.flatnonzero(token_ids >= FIRST_IMAGE_ID)
        if rows.tolist() != expected.tolist():
            self._wrong(f"rows {rows.tolist()} are images', and not {expected.tolist()}")
        if len(rows) and not np.array_equal(np.concatenate(given), token_ids[rows]):
            self._wrong("rows of other images, or in another order")
        if shown.rope is not None:
            for entry, first in zip(batch.entries, batch.query_starts.tolist(), strict=False):
                plain = plain_rope(entry.request.request.images, entry.start + entry.count)[:, entry.start :]
                if not np.array_equal(shown.rope[:, first : first + entry.count], plain):
                    self._wrong(f"other rotary positions of {entry!r}")

    def _wrong(self, what: str) -> None:
        self.violations.append(what)
        raise AssertionError(what)


def plain_rope(images: Sequence[PlacedImage], length: int) -> np.ndarray[Any, Any]:
    """Rotary positions [3, length], token by token."""
    columns: list[tuple[int, int, int]] = []
    position = 0
    begun = {image.start: image for image in images}
    while len(columns) < length:
        image = begun.get(len(columns))
        if image is None:
            columns.append((position, position, position))
            position += 1
            continue
        assert image.grid is not None
        columns += [(position, position + y, position + x) for y, x in np.ndindex(image.grid)]
        position += max(image.grid)
    return np.array(columns[:length], np.int64).reshape(-1, 3).T


def encode_layer_by_layer(engine: Engine) -> None:
    """Let an engine's steps encode one layer of an image each, however long that takes."""
    for hook in engine.hooks:
        if isinstance(hook, ImageEncoding):
            hook.slice_s = 0.0


def check_nothing_is_left(engine: Engine, max_bytes: int) -> None:
    """Nothing runs any more: no image is being encoded or waited for, and the encodings are within bounds."""
    images: RunnerImages = engine.runner.images  # type: ignore[assignment]
    images.cache.check()
    assert images.num_bytes <= max_bytes or len(images.cache) == 1
    assert not engine.has_work
    engine.step()  # gives up what nobody waits for
    waiting = next(hook.image_waits for hook in engine.hooks if hook.image_waits is not None)
    assert waiting is not None
    assert not waiting.somebody_waits
    encoders = [thread for thread in threading.enumerate() if thread.name == "radixkv-encoder"]
    for thread in encoders:  # one that has just ended its work
        thread.join(5)
    assert not any(thread.is_alive() for thread in encoders)
