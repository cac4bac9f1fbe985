# SPDX-License-Identifier: Apache-2.0
"""Lines of plain and gzipped files, with errors about damaged files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

_READ_BYTES = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"


class DamagedFile(ValueError):
    """A file can't be read, or not to its end.

    Attributes:
        line: number of the last readable line; 0: none.
        why: description of the damage, without the file's name.
    """

    def __init__(self, path: Path, line: int, why: str) -> None:
        where = f"{path}, after line {line}" if line else str(path)
        super().__init__(f"{where}: {why}")
        self.path, self.line, self.why = path, line, why


#: What reading a plain or a gzipped file may raise.
READ_ERRORS = (EOFError, OSError, zlib.error)


def damaged(path: Path, line: int, error: Exception, what: str = "the gzip stream") -> DamagedFile:
    """Make the error of a file that is unreadable after a line."""
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return DamagedFile(path, line, f"can't be read ({error.strerror or error})")
    return DamagedFile(path, line, f"{what} is damaged or cut short ({error}); fetch the file again")


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading bytes, unpacked if it is gzipped.

    Raises:
        DamagedFile: it is missing, a folder, or may not be read.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
        return cast(BinaryIO, gzip.open(path, "rb")) if zipped else path.open("rb")
    except FileNotFoundError:
        raise DamagedFile(path, 0, "no such file") from None
    except IsADirectoryError:
        raise DamagedFile(path, 0, "a folder, not a file; name the files in it") from None
    except OSError as error:
        raise DamagedFile(path, 0, f"can't be read ({error.strerror or error})") from None


def numbered_lines(path: Path, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes) of the lines of a file that are not blank.

    Args:
        max_bytes: longer lines are cut there, so that memory stays bounded; None: no line is.

    Raises:
        DamagedFile: as `open_plain`; or the file ends in the middle of its gzip stream.
    """
    number = 0
    limit = -1 if max_bytes is None else max_bytes + 1
    with open_plain(path) as stream:
        try:
            while line := stream.readline(limit):
                number += 1
                if max_bytes is not None and len(line) > max_bytes:
                    rest = line
                    while rest and not rest.endswith(b"\n"):
                        rest = stream.readline(_READ_BYTES)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                line = line.strip()
                if line:
                    yield number, line
        except READ_ERRORS as error:
            raise damaged(path, number, error) from None
