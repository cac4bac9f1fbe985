# SPDX-License-Identifier: Apache-2.0
"""ImageLoader: the images of chats from their sources to pixels, within bounds, and off the event loop.

    count        max_images                 before anything is read
    bytes        max_image_bytes            before base64 is decoded, or while a file is fetched
    pixels       max_image_pixels           by the headers, before one pixel is decoded;
                                            four times as many in all images of a chat together

Clients send all images of a conversation with each turn. Decoded ones are therefore kept for their owner (a
tenant and its salt, so that no time tells of another's images), the least recently used ones make room.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import (
    LOW_DETAIL_SIDE,
    DecodedImage,
    decode_base64,
    decode_image,
    read_header,
)
from radixkv.text.segments import text_owner
from radixkv.text.thread_priority import yield_to_steps
from radixkv_server.chats.image_fetcher import ImageFetcher
from radixkv_server.chats.image_marks import ImageSource

T = TypeVar("T")

#: Images that are decoded at once: the engine needs cores, too.
DECODED_AT_ONCE = 2
DECODER_NICENESS = 5
MAX_CHAT_PIXELS_FACTOR = 4


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """Images of one chat, by the keys of their marks.

    Attributes:
        shown: those with pixels.
        unshown: words for those that could not be decoded, which are in earlier turns or results of tools.
    """

    shown: Mapping[str, DecodedImage] = field(default_factory=dict)
    unshown: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> dict[str, str]:
        """Words for every image, by key, in which people and comparisons of prompts see it."""
        return {**{key: image.words for key, image in self.shown.items()}, **self.unshown}


@dataclass(slots=True)
class LoaderCounts:
    """Work of a loader since its start.

    Attributes:
        decoded: images decoded.
        reused: images whose pixels were there from an earlier turn.
        decode_s: seconds of decoding, in its threads.
        kept_bytes: of the pixels that are kept.
    """

    decoded: int = 0
    reused: int = 0
    decode_s: float = 0.0
    kept_bytes: int = 0


class ImageLoader:
    """Loads images of chats.

    Args:
        max_images: of a chat.
        max_bytes: of a file.
        max_pixels: of an image.
        max_kept_bytes: of the decoded images that are kept.
        fetcher: fetches addresses; None: they are refused.
        check_size: called with width and height; raises InvalidRequestError for what the model
            can't be shown; None: it can be shown all.

    Attributes:
        counts: its work.
    """

    def __init__(
        self,
        *,
        max_images: int,
        max_bytes: int,
        max_pixels: int,
        max_kept_bytes: int,
        fetcher: ImageFetcher | None = None,
        check_size: Callable[[int, int], object] | None = None,
    ) -> None:
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels
        self._max_kept_bytes = max_kept_bytes
        self._fetcher = fetcher
        self._check_size = check_size
        self._kept: OrderedDict[tuple[object, str], DecodedImage] = OrderedDict()
        self.counts = LoaderCounts()
        self._decoders = ThreadPoolExecutor(
            DECODED_AT_ONCE,
            thread_name_prefix="radixkv-images",
            initializer=yield_to_steps,
            initargs=(DECODER_NICENESS,),
        )

    async def load(self, keys: Sequence[str], sources: Mapping[str, ImageSource], param: str) -> LoadedImages:
        """Return the images of a chat. Cancelling it drops what has not begun.

        Args:
            keys: of the images in the order of the chat, with repetitions.
            param: name of the messages' field in the body, for errors.

        Raises:
            InvalidRequestError: there are too many, or one in the user's latest words can't be shown; names
                its place in the body, the limit and the remedy.
        """
        if len(keys) > self._max_images:
            raise InvalidRequestError(
                f"{param} has {len(keys)} images, and the limit is {self._max_images} (max_images): leave "
                "the oldest out",
                param=param,
                code="too_many_images",
            )
        owner, shown, unshown = text_owner.get(), {}, {}
        files: dict[str, bytes] = {}
        num_pixels = 0
        for key in dict.fromkeys(keys):
            source = sources[key]
            kept = self._find((owner, key))
            try:
                if kept is None:
                    files[key], (width, height) = await self._read(source)
                else:
                    shown[key], (width, height) = kept, (kept.width, kept.height)
                    self.counts.reused += 1
            except InvalidRequestError as error:
                unshown[key] = self._words(error, source)
                continue
            num_pixels += width * height
            if num_pixels > MAX_CHAT_PIXELS_FACTOR * self._max_pixels:
                raise InvalidRequestError(
                    f"{param}: its images have more than {MAX_CHAT_PIXELS_FACTOR * self._max_pixels:,} "
                    f"pixels together ({MAX_CHAT_PIXELS_FACTOR} times max_image_pixels): send smaller ones, "
                    "or fewer",
                    param=param,
                    code="too_many_images",
                )
        for key, data in files.items():
            source = sources[key]
            try:
                shown[key] = await self._in_thread(partial(self._decode, data, source))
            except InvalidRequestError as error:
                unshown[key] = self._words(error, source)
                continue
            self.counts.decoded += 1
            self._keep((owner, key), shown[key])
        return LoadedImages(shown, unshown)

    async def _read(self, source: ImageSource) -> tuple[bytes, tuple[int, int]]:
        """Return the file of an image, and its size by its header."""
        if source.is_address:
            if self._fetcher is None:
                raise InvalidRequestError(
                    "this server fetches no addresses (--image-urls)", code="invalid_image"
                )
            data = await self._fetcher.fetch(source.data)
        else:
            data = await self._in_thread(partial(decode_base64, source.data, self._max_bytes))
        return data, await self._in_thread(partial(read_header, data, self._max_pixels))

    def _decode(self, data: bytes, source: ImageSource) -> DecodedImage:
        began = time.thread_time()
        side = LOW_DETAIL_SIDE if source.detail == "low" else None
        try:
            image = decode_image(data, self._max_pixels, max_side=side)
        finally:
            self.counts.decode_s += time.thread_time() - began
        if self._check_size is not None:
            self._check_size(image.width, image.height)
        return image

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)

    @staticmethod
    def _words(error: InvalidRequestError, source: ImageSource) -> str:
        """Return words for an image of an earlier turn that can't be shown.

        Raises:
            InvalidRequestError: it is in the user's latest words.
        """
        if source.is_latest:
            message = f"{source.place}: the image can't be shown: {error}."
            raise InvalidRequestError(message, param=source.place, code=error.code) from None
        return f"[image {source.key[:8]}: not shown, it can't be read]"

    def _find(self, key: tuple[object, str]) -> DecodedImage | None:
        image = self._kept.get(key)
        if image is not None:
            self._kept.move_to_end(key)
        return image

    def _keep(self, key: tuple[object, str], image: DecodedImage) -> None:
        if key in self._kept or len(image.rgb) > self._max_kept_bytes:
            return
        self._kept[key] = image
        self.counts.kept_bytes += len(image.rgb)
        while self.counts.kept_bytes > self._max_kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.counts.kept_bytes -= len(dropped.rgb)

    def close(self) -> None:
        """End the threads; images that have not begun are dropped."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
