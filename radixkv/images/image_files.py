# SPDX-License-Identifier: Apache-2.0
"""Image files as pixels: PNG, JPEG, WebP, and the first frame of a GIF, within bounds that are checked before
anything is decoded.

A file of a few kilobytes may unpack to gigabytes. Its header says how many pixels it has, so that
`read_header` refuses it without decoding one. Other formats that Pillow knows are not tried: each is a
decoder more to trust.

The pixels are those of transformers' `load_image`: turned as the EXIF orientation says, in RGB. What is
transparent shows white behind it, as a browser's page would, where `load_image` shows colours that no one
sees.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
#: Longest side of an image that a client asks for in low detail.
LOW_DETAIL_SIDE = 512
THUMBNAIL_SIDE = 96

#: EXIF's tag of the orientation, and its values that exchange width and height.
_ORIENTATION = 0x0112
_TURNED = frozenset(range(5, 9))
# Width and height of the picture that `look_of` compares: 8 differences in each of 8 rows.
_LOOK_SIZE = (9, 8)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels of an image.

    Attributes:
        width, height: pixels.
        rgb: uint8 [height, width, 3], row by row.
        digest: SHA-256 of the size and the pixels, 32 bytes.
        look: 64 bits that hardly change with the size of a picture; see `look_of`.
    """

    width: int
    height: int
    rgb: bytes
    digest: bytes
    look: int

    @property
    def name(self) -> str:
        """The first 32 bits of its digest, in hex: enough to tell the images of a cache apart for people."""
        return self.digest.hex()[:8]

    @property
    def words(self) -> str:
        """The image in words, a function of its pixels: `[image 3f2a9c1b 1280x720 0f1e2d3c4b5a6978]`."""
        return f"[image {self.name} {self.width}x{self.height} {self.look:016x}]"

    def thumbnail(self) -> str:
        """Return a small picture of it as a data URL, of a few kilobytes. O(pixels)."""
        from PIL import Image  # heavy, and only where images are

        picture = Image.frombytes("RGB", (self.width, self.height), self.rgb)
        picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=70)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def invalid_image(why: str) -> InvalidRequestError:
    """Return the error of an image that can't be shown to a model."""
    return InvalidRequestError(why, code="invalid_image")


def decode_base64(text: str, max_bytes: int) -> bytes:
    """Return the bytes of base64 text, or of a data URL with it; line breaks in it are ignored.

    Raises:
        InvalidRequestError: it is none, or stands for more than `max_bytes`, which is found without decoding.
    """
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise invalid_image("its data URL must be data:image/...;base64, and the data")
    if len(text) > max_bytes * 4 // 3 + max_bytes // 32 + 4:  # with a line break after each 76 characters
        raise too_many_bytes(max_bytes)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise invalid_image("its data is no base64: send the file's bytes in base64, with padding") from None
    if len(data) > max_bytes:
        raise too_many_bytes(max_bytes)
    return data


def too_many_bytes(max_bytes: int) -> InvalidRequestError:
    """Return the error of a file that is too large."""
    return invalid_image(f"the file is larger than {max_bytes:,} bytes (max_image_bytes): send a smaller one")


def read_header(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image file as it will be shown, from its header alone. O(1).

    Raises:
        InvalidRequestError: it is no image of `FORMATS`, or has more than `max_pixels`.
    """
    with _opened(data, max_pixels) as image:
        return _shown_size(image)


def decode_image(data: bytes, max_pixels: int, *, max_side: int | None = None) -> DecodedImage:
    """Return the pixels of an image file. O(pixels), without Python's global lock for most of it.

    Args:
        max_side: a larger image is shrunk, so that no side is longer.

    Raises:
        InvalidRequestError: see `read_header`; or the file is cut off or damaged.
    """
    with _opened(data, max_pixels) as image:
        try:
            picture = _in_rgb(image)
        except Exception as error:  # a decoder raises what it likes for a damaged file
            raise invalid_image(
                f"its file is cut off or damaged ({_reason(error)}): send the whole file"
            ) from None
    if max_side is not None and max(picture.size) > max_side:
        picture.thumbnail((max_side, max_side))
    return image_of(picture)


def image_of(picture: PillowImage) -> DecodedImage:
    """Return the pixels of a picture of Pillow's, in RGB. O(pixels)."""
    if picture.mode != "RGB":
        picture = _in_rgb(picture)
    width, height = picture.size
    rgb = picture.tobytes()
    digest = hashlib.sha256(b"%d x %d\n" % (width, height))
    digest.update(rgb)
    return DecodedImage(width, height, rgb, digest.digest(), look_of(picture))


def blank_image(width: int, height: int) -> DecodedImage:
    """Return a white image of a size. O(pixels)."""
    from PIL import Image  # heavy, and only where images are

    return image_of(Image.new("RGB", (width, height), "white"))


def look_of(picture: PillowImage) -> int:
    """Return 64 bits of a picture that hardly change with its size or its compression.

    Each says whether a place of a tiny grey copy is darker than the place at its right (a "difference hash").
    Two pictures of one screen, one of them shrunk, differ in few; two screens mostly in twenty and more.
    """
    from PIL import Image  # heavy, and only where images are

    small = picture.convert("L").resize(_LOOK_SIZE, Image.Resampling.BOX)
    grey = small.tobytes()
    width, height = _LOOK_SIZE
    bits = 0
    for row in range(height):
        for at in range(row * width, row * width + width - 1):
            bits = bits << 1 | (grey[at] < grey[at + 1])
    return bits


def _opened(data: bytes, max_pixels: int) -> PillowImage:
    """Return an image whose header has been read.

    Raises:
        InvalidRequestError: it is no image of `FORMATS`, or has more than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError  # heavy, and only where images are

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise invalid_image(
            "its file is no PNG, JPEG, WebP or GIF: convert it to one of these (its media type is not read)"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels("far too many", max_pixels) from None
    except Exception as error:  # a decoder raises what it likes for a damaged file
        raise invalid_image(f"its file is damaged ({_reason(error)})") from None
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise _too_many_pixels(f"{width:,} x {height:,}", max_pixels)
    return image


def _too_many_pixels(count: str, max_pixels: int) -> InvalidRequestError:
    return invalid_image(
        f"it has {count} pixels, and the limit is {max_pixels:,} (max_image_pixels): send a smaller one"
    )


def _shown_size(image: PillowImage) -> tuple[int, int]:
    width, height = image.size
    try:
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    except Exception:  # damaged EXIF data turns nothing
        turned = False
    return (height, width) if turned else (width, height)


def _in_rgb(image: PillowImage) -> PillowImage:
    """Return an image as its viewer sees it: turned upright, and white where it is transparent."""
    from PIL import Image, ImageOps  # heavy, and only where images are

    image.load()
    picture = ImageOps.exif_transpose(image)
    if picture.mode.startswith("I;16"):  # Pillow cuts off what is brighter than 255 of 65,535
        is_little = not picture.mode.endswith("B")
        picture = Image.frombytes("L", picture.size, picture.tobytes()[is_little::2])
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__
