# SPDX-License-Identifier: Apache-2.0
"""ImageEncoding: encodes the images of waiting requests in pieces between steps, so that streams go on.

A request begins once the images behind its cached prefix are encoded; images inside that are not. Each is
waited for once: what was dropped for room since, or failed, is encoded by the step that needs it, so no
request waits for good, and an error ends the request that has the image.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from radixkv.engine.counts import EngineStats, ImageCounts
from radixkv.engine.hooks import StepHook
from radixkv.images.placed_image import PlacedImage
from radixkv.scheduling.sequence import Sequence

#: Longest time of a step that goes to images; a layer of the tower that has begun is finished.
SLICE_S = 0.05
#: Images remembered as ones that can't be encoded.
MAX_FAILED = 1000


class Encoder(Protocol):
    """Encodes images, one at a time, in pieces."""

    num_encoded: int
    encode_s: float

    @property
    def num_evicted(self) -> int:
        """Encodings that made room for others."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the encodings that are kept."""

    def key(self, request: Sequence, image: PlacedImage) -> Hashable:
        """Return the name of an image's encoding for a request."""

    def has(self, key: Hashable) -> bool:
        """Return True if an encoding is there."""

    def advance(self, key: Hashable, image: PlacedImage, seconds: float) -> bool:
        """Encode an image for some time, from where it was left; True: it is there, or has failed."""

    def cancel(self) -> None:
        """Give the image that was begun up."""


class ImageEncoding(StepHook):
    """Makes requests wait for their images; see `radixkv.scheduling.seams.ImageWaits`.

    Attributes:
        slice_s: longest time of a step that goes to images.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.slice_s = SLICE_S
        self.image_waits = self
        self._encoder = encoder
        # What waiting requests still wait for, in the order in which they came.
        self._wanted: dict[Sequence, dict[Hashable, PlacedImage]] = {}
        self._failed: dict[Hashable, None] = {}
        self._num_hits = self._num_misses = 0

    @property
    def somebody_waits(self) -> bool:
        return any(self._wanted.values())

    def holds_up(self, request: Sequence, num_known: int) -> bool:
        wanted = self._wanted.get(request)
        if wanted is None:
            images = {
                self._encoder.key(request, image): image
                for image in request.request.images
                if image.end > num_known
            }
            missing = {key: image for key, image in images.items() if not self._encoder.has(key)}
            self._num_hits += len(images) - len(missing)
            self._num_misses += len(missing)
            wanted = {key: image for key, image in missing.items() if key not in self._failed}
            self._wanted[request] = wanted
        return bool(wanted)

    def forget(self, request: Sequence) -> None:
        self._wanted.pop(request, None)

    def before_step(self) -> None:
        """Encode images of the first waiting request for a slice of time."""
        first = next((wanted for wanted in self._wanted.values() if wanted), None)
        if first is None:
            self._encoder.cancel()  # its requests are gone
            return
        key, image = next(iter(first.items()))
        if self._encoder.advance(key, image, self.slice_s):
            for wanted in self._wanted.values():
                wanted.pop(key, None)
            if not self._encoder.has(key):
                self._failed[key] = None
                if len(self._failed) > MAX_FAILED:
                    del self._failed[next(iter(self._failed))]

    def idle_s(self) -> float | None:
        return 0.0 if self.somebody_waits else None

    def add_counts(self, stats: EngineStats) -> None:
        encoder = self._encoder
        stats.images = ImageCounts(
            encoded=encoder.num_encoded,
            encode_s=encoder.encode_s,
            hits=self._num_hits,
            misses=self._num_misses,
            evicted=encoder.num_evicted,
            kept_bytes=encoder.num_bytes,
        )

    def close(self, *, save: bool) -> None:
        self._encoder.cancel()
