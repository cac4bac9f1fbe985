# SPDX-License-Identifier: Apache-2.0
"""Image files: formats, orientation, transparency, and bounds that hold before anything is decoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from PIL import Image
from scripted_images import base64_of, file_of, picture

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import decode_base64, decode_image, read_header

PIXELS = 10_000


def pixels(data: bytes) -> Image.Image:
    image = decode_image(data, PIXELS)
    return Image.frombytes("RGB", (image.width, image.height), image.rgb)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_formats_give_their_pixels(kind: str) -> None:
    shown = picture(1)
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    data = file_of(shown, kind, **options)
    assert read_header(data, PIXELS) == (32, 24)
    got = pixels(data)
    if kind == "JPEG":
        assert got.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()
    else:
        assert got.tobytes() == shown.tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_the_first_frame_of_an_animation_counts(kind: str) -> None:
    frames = [picture(seed) for seed in (1, 2)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert pixels(data).tobytes() == frames[0].tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_that_of_transformers(orientation: int) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(1), "JPEG", exif=exif)
    expected = load_image(base64.b64encode(data).decode())
    assert pixels(data).tobytes() == expected.tobytes()
    assert read_header(data, PIXELS) == expected.size


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    if mode == "P":
        data = file_of(Image.new("P", (4, 4), 0), "GIF", transparency=0)
    else:
        data = file_of(clear.convert(mode))
    assert set(pixels(data).tobytes()) == {255}


def test_grey_and_palettes_become_rgb() -> None:
    assert pixels(file_of(picture(1, mode="L"))).tobytes() == picture(1).tobytes()
    assert pixels(file_of(picture(1).quantize(256))).size == (32, 24)


def test_an_image_has_one_digest_whatever_its_file() -> None:
    png, gif = (decode_image(file_of(picture(1), kind), PIXELS) for kind in ("PNG", "GIF"))
    assert png == gif
    assert decode_image(file_of(picture(2)), PIXELS).digest != png.digest


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    wide, high = (Image.new("RGB", size, "red") for size in ((8, 4), (4, 8)))
    assert decode_image(file_of(wide), PIXELS).digest != decode_image(file_of(high), PIXELS).digest


def test_a_shrunk_picture_looks_the_same_and_another_does_not() -> None:
    def look(image: Image.Image) -> int:
        return decode_image(file_of(image), 10**6).look

    large = picture(1, (640, 480))
    small = large.resize((320, 240), Image.Resampling.LANCZOS)
    assert (look(large) ^ look(small)).bit_count() <= 4
    assert (look(large) ^ look(picture(2, (640, 480)))).bit_count() > 10


def test_low_detail_shrinks() -> None:
    image = decode_image(file_of(picture(1, (64, 32))), PIXELS, max_side=16)
    assert (image.width, image.height) == (16, 8)


def test_16_bits_of_grey_are_not_cut_off() -> None:
    rows = b"".join((level * 257).to_bytes(2, "little") for level in range(256))
    decoded = decode_image(file_of(Image.frombytes("I;16", (256, 1), rows)), PIXELS)
    assert list(decoded.rgb) == [level for level in range(256) for _ in range(3)]


def test_a_thumbnail_is_small() -> None:
    thumbnail = decode_image(file_of(picture(1, (100, 90))), PIXELS).thumbnail()
    head, _, data = thumbnail.partition(",")
    assert head == "data:image/jpeg;base64"
    assert max(pixels(base64.b64decode(data)).size) <= 96


# ---------------------------------------------------------------------- what is refused


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and little more."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(101, 100), (9_000, 9_000), (12_000, 12_000), (60_000, 60_000)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="max_image_pixels"):
        decode_image(png_header(*size), PIXELS)


def test_damaged_files_are_refused() -> None:
    whole = file_of(picture(1, (90, 90)), "JPEG")
    with pytest.raises(InvalidRequestError, match="cut off or damaged"):
        decode_image(whole[: len(whole) // 2], PIXELS)
    with pytest.raises(InvalidRequestError, match="cut off or damaged"):
        decode_image(png_header(90, 90)[:60], PIXELS)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "PPM", "PDF"])
def test_other_formats_are_not_tried(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="no PNG, JPEG, WebP or GIF"):
        read_header(file_of(picture(1), kind), PIXELS)


@pytest.mark.parametrize(
    "data", [b"", b"<svg/>", bytes(100), b"GIF89a", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="file is"):
        decode_image(data, PIXELS)


def test_base64_is_read_strictly_and_within_bounds() -> None:
    text = base64_of(picture(1))
    data = base64.b64decode(text)
    assert decode_base64(text, 10_000) == data
    assert decode_base64(f"data:image/png;base64,{text}", len(data)) == data
    assert decode_base64("\n".join(text[at : at + 76] for at in range(0, len(text), 76)), len(data)) == data
    for wrong in (text[:-3] + "?=", "data:image/png,abc", "data:image/png;base64", "ä", text + "A"):
        with pytest.raises(InvalidRequestError, match="base64"):
            decode_base64(wrong, 10_000)
    with pytest.raises(InvalidRequestError, match="max_image_bytes"):
        decode_base64(text, len(data) - 1)
    with pytest.raises(InvalidRequestError, match="max_image_bytes"):
        decode_base64("A" * 10**6, 100)
