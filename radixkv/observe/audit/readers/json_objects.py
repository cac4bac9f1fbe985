# SPDX-License-Identifier: Apache-2.0
"""JSON objects out of one large document, one at a time: the entries of a HAR, the items of a list.

The document is never in memory as a whole: it is cut where an object at the wanted depth begins and ends.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from radixkv.observe.audit.readers.lines import DamagedFile, open_plain

_CHUNK = 1 << 20
#: A whole string, or one that is not ended yet, or a brace or bracket.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
_OPENING, _CLOSING = b"{[", b"}]"


def objects_in(path: Path, depth: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, text) of the objects that so many brackets and braces stand around.

    Args:
        depth: 0: the document is a row of objects; 1: a list of them; 2: `{"log": {"entries": [...` is 3.
        max_bytes: of one object; longer ones come cut, and are no JSON.

    Raises:
        DamagedFile: the file can't be read, or ends within an object.
    """
    number, level, start, at = 0, 0, -1, 0
    buffer = b""
    with open_plain(path) as stream:
        while True:
            try:
                more = stream.read(max(_CHUNK, len(buffer) // 2))
            except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
                why = f"after object {number} the file is damaged or cut short ({error})"
                raise DamagedFile(path, 0, why) from None
            buffer += more
            while found := _TOKEN.search(buffer, at):
                token = found[0]
                if token[:1] == b'"':
                    if not found[1] or len(token) == 1:
                        at = found.start()  # the string goes on in what is read next
                        break
                elif token in _OPENING:
                    if level == depth and token == b"{":
                        start = found.start()
                    level += 1
                else:
                    level -= 1
                    if level == depth and start >= 0:
                        number += 1
                        yield number, buffer[start : found.end()]
                        start = -1
                at = found.end()
            else:
                at = len(buffer)
            if not more:
                break
            if start >= 0 and len(buffer) - start > max_bytes:
                number += 1
                yield number, buffer[start : start + 64]
                start = -1
            keep = min(at, start if start >= 0 else at)
            buffer, at = buffer[keep:], at - keep
            start = 0 if start >= 0 else -1
    if start >= 0:
        raise DamagedFile(path, 0, f"after object {number} the file is cut short")
