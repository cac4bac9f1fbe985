# SPDX-License-Identifier: Apache-2.0
"""Streaming reader of JSON objects in a large document: the entries of a HAR, the items of a list.

The document is never in memory as a whole: the reader cuts it at the ends of objects at the wanted depth, and
drops the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from radixkv.observe.audit.readers.lines import READ_ERRORS, DamagedFile, damaged, open_plain

_CHUNK = 1 << 20
_MARK = re.compile(rb'["{}\[\]]')
_ESCAPES = re.compile(rb'(?:[^"\\]{0,64}\\.)++', re.DOTALL)  # near each other
_OPENING = b"{["


def objects_in(path: Path, depth: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, text) of the objects inside `depth` brackets and braces. O(file).

    Args:
        depth: 0: the document is a row of objects; 1: a list of them; 2: `{"log": {"entries": [...` is 3.
        max_bytes: of one object; of a longer one somewhat more than that is given.

    Raises:
        DamagedFile: the file can't be read, or ends within an object.
    """
    number, level, in_string, held = 0, 0, False, b""
    kept: bytearray | None = None  # of the object that began in an earlier chunk
    with open_plain(path) as stream:
        while True:
            try:
                more = stream.read(_CHUNK)
            except READ_ERRORS as error:
                raise damaged(path, 0, error, f"after object {number} the file") from None
            if not more:
                break
            chunk, held = held + more, b""
            start, at = -1, 0  # of the object in this chunk
            while True:
                if in_string:
                    at = _string_end(chunk, at)
                    if chunk[at : at + 1] != b'"':
                        chunk, held = chunk[:at], chunk[at:]  # a backslash waits for what it escapes
                        break
                    in_string, at = False, at + 1
                    continue
                found = _MARK.search(chunk, at)
                if found is None:
                    break
                at, mark = found.end(), found[0]
                if mark == b'"':
                    in_string = True
                elif mark in _OPENING:
                    if level == depth and mark == b"{":
                        start, kept = found.start(), bytearray()
                    level += 1
                else:
                    level -= 1
                    if level == depth and kept is not None:
                        number += 1
                        yield number, bytes(kept) + chunk[max(start, 0) : at]
                        kept, start = None, -1
            if kept is not None and len(kept) <= max_bytes:
                kept += chunk[max(start, 0) :]
    if kept is not None:
        raise DamagedFile(path, 0, f"after object {number} the file is cut short")


def _string_end(chunk: bytes, at: int) -> int:
    """Return the place of a string's closing quote, of a backslash that ends the chunk, or the chunk's end.

    O(n), at the speed of searching memory where there are no escapes.
    """
    quote = -1
    while True:
        if quote < at:
            quote = chunk.find(b'"', at)
            quote = len(chunk) if quote < 0 else quote
        slash = chunk.find(b"\\", at, quote)
        if slash < 0:
            return quote
        escapes = _ESCAPES.match(chunk, slash)
        if escapes is None:
            return slash
        at = escapes.end()
