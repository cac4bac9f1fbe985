# SPDX-License-Identifier: Apache-2.0
"""BodyLimits: bounded decompression and JSON parsing of bodies."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.text.safe_text import without_surrogates

_HEAD_BYTES = 256
_TEXT_HEAD = re.compile(rb"\s*(?:[{\[\"]|data:|event|$)")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_ENCODINGS = 3  # one around the other
_MAX_MEMBERS = 16  # of a gzip body
_PIECE_BYTES = 256 << 10
_ZSTD_WINDOW = 8 << 20  # what RFC 9659 allows a body to need


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds on a body, the same for all encodings.

    Attributes:
        max_bytes: without its compression.
        max_pieces: arrays, objects, strings and elements of its JSON; None: no bound.
    """

    max_bytes: int = 256 << 20
    max_pieces: int | None = None

    def unpacked(self, data: bytes, encoding: str) -> bytes:
        """Return a body without its compression. O(its unpacked size, or the limit).

        Args:
            encoding: value of its `Content-Encoding` header; several are undone from the last to the first.

        Raises:
            NoRequest: it is damaged, above the limit, or packed in a way that can't be read here.
        """
        kinds = [kind for part in encoding.lower().split(",") if (kind := part.strip()) not in _PLAIN]
        if _is_text(data):  # recorders often keep the headers of bodies that they have unpacked
            kinds = []
        if len(kinds) > _MAX_ENCODINGS:
            raise NoRequest(f"a body in {len(kinds)} encodings; at most {_MAX_ENCODINGS} are undone")
        for kind in reversed(kinds):
            data = _unpack(data, kind, self.max_bytes + 1)
        if len(data) > self.max_bytes:
            raise NoRequest(f"a body of more than {self.max_bytes >> 20} MiB unpacked")
        return data

    def parsed(self, data: bytes) -> Any:
        """Return the value of a JSON body. O(its size).

        Raises:
            NoRequest: it is not JSON, or has more pieces than the limit.
        """
        if self.max_pieces is not None and num_pieces(data, self.max_pieces) > self.max_pieces:
            raise NoRequest(f"a body of more than {self.max_pieces:,} pieces of JSON")
        return read_json(data)


#: For logs, which are read one body after the other.
DEFAULT_LIMITS = BodyLimits()


def read_json(data: bytes | str) -> Any:
    """Return the value of a JSON text, without lone surrogates.

    Raises:
        NoRequest: it is not JSON; says why, and nothing of its text.
    """
    try:
        return from_json(data, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    try:
        return without_surrogates(json.loads(data))  # which JavaScript writes
    except (ValueError, RecursionError):
        raise NoRequest(f"not JSON ({reason[:120]})") from None


def num_pieces(data: bytes, limit: int) -> int:
    """Count the strings, arrays, objects and commas of a JSON text; some number above `limit` beyond it.

    Text inside of strings does not count. O(bytes), without a loop in Python.
    """
    if len(data) <= limit:
        return len(data)
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > limit:
        return strings
    outside = b"".join(plain.split(b'"')[::2])
    return strings + sum(map(outside.count, (b",", b"[", b"{")))


def _is_text(data: bytes) -> bool:
    """Return whether a body begins like JSON or a stream of events, with text alone.

    The first byte does not decide: brotli's may be a bracket.
    """
    head = data[:_HEAD_BYTES]
    if not _TEXT_HEAD.match(head) or _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _unpack(data: bytes, kind: str, most: int) -> bytes:
    """Return at most about `most` bytes of the unpacked data."""
    unpack = _UNPACKERS.get(kind)
    if unpack is None:
        raise NoRequest(f"a body packed by {kind[:20]!r}, which can't be read here; record it unpacked")
    try:
        return unpack(data, most)
    except ImportError as error:
        raise NoRequest(
            f"a body packed by {kind}: `pip install {error.name}`, or record it unpacked"
        ) from None
    except Exception:  # the libraries' own errors, of damaged data
        raise NoRequest(f"a damaged {kind} body") from None


def _inflate(data: bytes, most: int) -> bytes:
    plain, wbits = bytearray(), zlib.MAX_WBITS | 32  # zlib's header or gzip's
    if not (data.startswith(_GZIP_MAGIC) or (data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0)):
        wbits = -zlib.MAX_WBITS  # no header, as some servers send `deflate`
    for _ in range(_MAX_MEMBERS):
        packed = zlib.decompressobj(wbits=wbits)
        plain += packed.decompress(data, most - len(plain))
        data = packed.unused_data
        if len(plain) >= most or not packed.eof or not data.startswith(_GZIP_MAGIC):
            break
    return bytes(plain)


def _unpack_brotli(data: bytes, most: int) -> bytes:
    import brotli  # optional

    packed, plain = brotli.Decompressor(), bytearray()
    while len(plain) < most and (piece := packed.process(data, output_buffer_limit=_PIECE_BYTES)):
        plain += piece
        data = b""
    return bytes(plain)


def _unpack_zstd(data: bytes, most: int) -> bytes:
    import zstandard  # optional

    packed = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return bytes(packed.stream_reader(data, read_across_frames=True).read(most))


_PLAIN = ("", "identity")
_UNPACKERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _inflate,
    "x-gzip": _inflate,
    "deflate": _inflate,
    "br": _unpack_brotli,
    "zstd": _unpack_zstd,
}
