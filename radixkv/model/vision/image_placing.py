# SPDX-License-Identifier: Apache-2.0
"""ModelImageProcessor: a model's rules for images in prompts, by transformers' image processor.

The number of an image's tokens, and its grid, depend on its size alone: they are found by a blank image once,
and an image inside a cached prefix is never resized.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import DecodedImage, invalid_image
from radixkv.images.placed_image import PlacedImage, identity_of, image_ids
from radixkv.model.vision import layouts
from radixkv.model.vision.families import VISION_FAMILIES
from radixkv.model.vision.layouts import Tokens

_MAX_KNOWN_SIZES = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Tokens of an image of one size.

    Attributes:
        tokens: ids of text, and None for rows of the tower.
        between: places of the text in it.
        grid: rows and columns, where positions need these.
        together: see `PlacedImage`.
    """

    tokens: Tokens
    between: tuple[int, ...]
    grid: tuple[int, int] | None
    together: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class ModelImageProcessor:
    """See `radixkv.images.image_processor.ImageProcessor`, which it is.

    Args:
        family: key of `VISION_FAMILIES`.
        processor: image processor of transformers, of those that need no torchvision, or `Llama4Pixels`.
        placeholder: id that stands for an image in what a chat template gives.
        facts: of the model; see `radixkv.model.vision.facts`.
    """

    family: str
    processor: Any
    placeholder: int
    facts: Mapping[str, Any]
    _layouts: OrderedDict[tuple[int, int], Layout] = field(init=False, default_factory=OrderedDict)
    _lock: Any = field(init=False, default_factory=threading.Lock)
    _settings: str = field(init=False, default="")

    def __post_init__(self) -> None:
        settings = self.processor.to_dict()
        self._settings = json.dumps([self.family, dict(self.facts), settings], sort_keys=True, default=str)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the constructor's arguments."""
        return ModelImageProcessor, (self.family, self.processor, self.placeholder, self.facts)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that the image processor gets with each image."""
        options = dict(VISION_FAMILIES[self.family].options)
        if VISION_FAMILIES[self.family].layout is layouts.in_lines:
            options["patch_size"] = self.facts["patch"]
        return options

    @property
    def most_together(self) -> int:
        """Most tokens in a row that see each other, and are computed in one step; 0: none do."""
        return int(self.facts.get("most_together", 0))

    @property
    def sees_ahead_in_windows_only(self) -> bool:
        """True if tokens of an image see each other in layers with a sliding window only."""
        return bool(self.facts.get("sees_ahead") == "in windows")

    def num_tokens(self, width: int, height: int) -> int:
        """See `ImageProcessor`."""
        return len(self._layout(width, height).tokens)

    def place(
        self, token_ids: Sequence[int], images: Sequence[DecodedImage]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """See `ImageProcessor`."""
        ids = np.asarray(token_ids, np.int32)
        if "breaks" in self.facts:
            ids = _between_breaks(ids, self.placeholder, self.facts["breaks"])
        places = np.flatnonzero(ids == self.placeholder)
        if len(places) != len(images):
            raise InvalidRequestError(
                f"the prompt has {len(places)} places for images, and {len(images)} images were given: a "
                "chat template gives a place for each, and a prompt as text needs the model's words for it",
                code="invalid_image",
            )
        pieces: list[Any] = []
        placed: list[PlacedImage] = []
        copied = length = shift = 0
        for place, image in zip(places.tolist(), images, strict=True):
            layout = self._layout(image.width, image.height)
            pieces.append(ids[copied:place])
            length += place - copied
            copied = place + 1
            one = PlacedImage(
                image,
                identity_of(image, self._settings),
                start=length,
                length=len(layout.tokens),
                between=layout.between,
                grid=layout.grid,
                rope_start=length + shift,
                together=layout.together,
            )
            rows = iter(image_ids(one.identity, one.num_rows))
            own = [next(rows) if token is None else token for token in layout.tokens]
            pieces.append(np.asarray(own, np.int32))
            placed.append(one)
            length, shift = one.end, one.rope_end - one.end
        return np.concatenate([*pieces, ids[copied:]]).tolist(), tuple(placed)

    def inputs(self, image: DecodedImage) -> dict[str, Any]:
        """Return what the model's tower takes, tensors by name. O(pixels).

        Raises:
            InvalidRequestError: no image of this shape can be shown.
        """
        from PIL import Image  # heavy, and only where images are

        return self._processed(Image.frombytes("RGB", (image.width, image.height), image.rgb))

    def _processed(self, picture: Any) -> dict[str, Any]:
        try:
            return dict(self.processor(images=[picture], return_tensors="pt", **self.options))
        except ValueError as error:
            raise _not_shown(picture.size, error) from error

    def _layout(self, width: int, height: int) -> Layout:
        size = width, height
        with self._lock:
            known = self._layouts.get(size)
        if known is None:
            from PIL import Image  # heavy, and only where images are

            inputs = self._processed(Image.new("RGB", size))
            try:
                known = self._layout_of(inputs)
            except ValueError as error:
                raise _not_shown(size, error) from error
            with self._lock:
                self._layouts[size] = known
                if len(self._layouts) > _MAX_KNOWN_SIZES:
                    self._layouts.popitem(last=False)
        return known

    def _layout_of(self, inputs: dict[str, Any]) -> Layout:
        family = VISION_FAMILIES[self.family]
        tokens = tuple(family.layout(inputs, self.facts))
        between = tuple(place for place, token in enumerate(tokens) if token is not None)
        grid: tuple[int, int] | None = None
        if family.has_grid:
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            grid = rows // self.facts["merge"], columns // self.facts["merge"]
        together = tuple(_runs(tokens)) if self.most_together else ()
        return Layout(tokens, between, grid, together)


def _runs(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each run of tokens that are no text."""
    start = 0
    for is_text, run in groupby(token is not None for token in tokens):
        end = start + len(list(run))
        if not is_text:
            yield start, end
        start = end


def _between_breaks(
    ids: npt.NDArray[np.int32], placeholder: int, breaks: Sequence[Sequence[int]]
) -> npt.NDArray[np.int32]:
    """Return a prompt with two line breaks more before and behind each placeholder.

    As the tokenizer writes them: a run of n breaks is `breaks[n]`, so that breaks of the text beside a
    placeholder become one run with them.
    """
    count_of = {run[0]: n for n, run in enumerate(breaks) if len(run) == 1}
    found: list[int] = []
    pending, is_beside = 0, False  # breaks that are not written yet; a placeholder is next to them

    def write(count: int) -> None:
        while count:
            run = min(count, len(breaks) - 1)
            found.extend(breaks[run])
            count -= run

    kept: list[int] = []  # the tokens of the pending breaks, as they were
    for token in ids.tolist():
        if token == placeholder:
            write(pending + 2)
            found.append(token)
            pending, is_beside, kept = 2, True, []
        elif token in count_of:
            pending += count_of[token]
            kept.append(token)
        else:
            if is_beside:
                write(pending)
            else:
                found += kept
            found.append(token)
            pending, is_beside, kept = 0, False, []
    if is_beside:
        write(pending)
    else:
        found += kept
    return np.asarray(found, np.int32)


def _not_shown(size: tuple[int, int], error: ValueError) -> InvalidRequestError:
    width, height = size
    return invalid_image(f"an image of {width} x {height} can't be shown to this model: {error}")
