# SPDX-License-Identifier: Apache-2.0
"""Images of requests, which cross a connection once: both ends keep the latest by the same rule.

Clients send all images of a conversation with each turn, megabytes of pixels each. The host keeps what came,
and the client knows what that is without asking, since messages arrive in their order:

    client to host    SentImage(a), Ask(a)    Ask(a)    SentImage(b), Ask(a, b) ...
    both keep         a                       a         a, b

Each is kept for its owner (a tenant and its salt): else the time of a request would tell of another's images.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from radixkv.cluster.remote.messages import Ask
from radixkv.errors import RequestFailedError
from radixkv.images.image_files import DecodedImage
from radixkv.scheduling.request import Request

T = TypeVar("T")

#: Bytes of pixels that a host keeps for a connection.
KEPT_BYTES = 256 * 2**20

#: Owner of an image, and its digest.
Key = tuple[str, str, bytes]


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of the next `Ask`, which the other end does not keep yet."""

    image: DecodedImage


@dataclass(frozen=True, slots=True)
class KeptImage:
    """Stands for an image that the other end has: it keeps it, or it came before this `Ask`."""

    digest: bytes


class _Latest(Generic[T]):
    """The latest images by key, within a bound on bytes of pixels."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._found: OrderedDict[Key, tuple[T, int]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def get(self, key: Key) -> T | None:
        """Return an image's value; None: it is not kept."""
        found = self._found.get(key)
        return None if found is None else found[0]

    def use(self, images: Iterable[tuple[Key, T, int]]) -> None:
        """Keep the images of an `Ask` as the latest: key, value and bytes of each; older ones make room."""
        for key, value, num_bytes in images:
            _, known = self._found.pop(key, (None, 0))
            self._found[key] = value, num_bytes
            self._num_bytes += num_bytes - known
        while self._num_bytes > self._max_bytes:
            _, (_, num_bytes) = self._found.popitem(last=False)
            self._num_bytes -= num_bytes


def _requests(ask: Ask) -> Iterator[tuple[int, Request]]:
    """Iterate over an Ask's requests with images, and their places in its arguments."""
    for at, argument in enumerate(ask.args):
        if isinstance(argument, Request) and argument.images:
            yield at, argument


def _with_images(ask: Ask, found: dict[int, list[DecodedImage | KeptImage]]) -> Ask:
    """Return an Ask whose requests have other images in place of theirs; the given ones stay as they are."""
    args: list[Any] = list(ask.args)
    for at, images in found.items():
        request = args[at] = copy.copy(args[at])
        request.images = tuple(
            replace(placed, image=image) for placed, image in zip(request.images, images, strict=True)
        )
    return replace(ask, args=tuple(args))


class SentImages:
    """The client's end."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._kept = _Latest[None](max_bytes)
        self._sizes = dict[Key, int]()

    def shortened(self, ask: Ask) -> list[SentImage | Ask]:
        """Return the messages to send for an Ask, in this order; `sent` follows. O(images)."""
        self._sizes = {}
        images: list[SentImage | Ask] = []
        found: dict[int, list[DecodedImage | KeptImage]] = {}
        for at, request in _requests(ask):
            found[at] = []
            for placed in request.images:
                image: DecodedImage = placed.image
                key = request.tenant, request.salt, image.digest
                if key not in self._kept and key not in self._sizes:
                    images.append(SentImage(image))
                self._sizes[key] = len(image.rgb)
                found[at].append(KeptImage(image.digest))
        return [*images, _with_images(ask, found) if found else ask]

    def sent(self) -> None:
        """Take note that all messages of the latest `shortened` are on their way."""
        self._kept.use((key, None, size) for key, size in self._sizes.items())


class ReceivedImages:
    """The host's end."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._kept = _Latest[DecodedImage](max_bytes)
        self._came: dict[bytes, DecodedImage] = {}

    def take(self, message: SentImage) -> None:
        """Hold an image for the next Ask."""
        self._came[message.image.digest] = message.image

    def restored(self, ask: Ask) -> Ask:
        """Return an Ask with its images. O(images).

        Raises:
            RequestFailedError: one is not there: the other end follows other rules.
        """
        used: dict[Key, DecodedImage] = {}
        found: dict[int, list[DecodedImage | KeptImage]] = {}
        for at, request in _requests(ask):
            found[at] = []
            for placed in request.images:
                key = request.tenant, request.salt, placed.image.digest
                image = used.get(key) or self._kept.get(key) or self._came.get(placed.image.digest)
                if image is None:
                    raise RequestFailedError("the engine's client refers to an image that it has not sent")
                used[key] = image
                found[at].append(image)
        self._came.clear()
        self._kept.use((key, image, len(image.rgb)) for key, image in used.items())
        return _with_images(ask, found) if found else ask
