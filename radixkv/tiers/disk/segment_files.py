# SPDX-License-Identifier: Apache-2.0
"""A segment: a file of records, the notes beside it, and the places of its records."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.tiers.disk.folder import USED, file_name
from radixkv.tiers.record import HEADER_BYTES, RecordError, RecordHeader, read_header

USE_BYTES = array("Q").itemsize
# In place of the number of a use: the record is forgotten. A higher number is damage.
GONE = 1 << 60


@dataclass(eq=False, slots=True)
class Segment:
    """A segment's file.

    Attributes:
        num_bytes: size of the file.
        about_bytes: size of the notes for people beside it.
        is_foreign: written by another version of the format: it stays, unread, until its room is needed.
        keys: keys of its records, in order.
        uses: number of each record's last use, higher for a later one.
        uses_changed: `uses` have changed since they were written.
    """

    number: int
    num_bytes: int = 0
    about_bytes: int = 0
    is_foreign: bool = False
    keys: list[bytes] = field(default_factory=list)
    uses: array[int] = field(default_factory=lambda: array("Q"))
    uses_changed: bool = False

    @property
    def disk_bytes(self) -> int:
        """Its bytes on the disk, its uses included."""
        return self.num_bytes + self.about_bytes + len(self.uses) * USE_BYTES


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a record.

    Attributes:
        index: its place among the segment's records.
        older: another copy, found at the start: power may have been lost while this one was copied forward.
    """

    segment: Segment
    index: int
    offset: int
    num_bytes: int
    older: Location | None = None


def scan(path: str, system: Any = os) -> Iterator[tuple[int, RecordHeader]]:
    """Yield offset and header of each record of a segment, up to the first incomplete one.

    Raises:
        OSError: it can't be read.
        RecordError: at the end, if there is more in the file than whole records.
    """
    file = system.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size, offset = system.fstat(file).st_size, 0
        while offset < size:
            header = read_header(system.pread(file, HEADER_BYTES, offset))
            if offset + header.record_bytes > size:
                raise RecordError("header")
            yield offset, header
            offset += header.record_bytes
    finally:
        system.close(file)


def read_bytes(path: str, offset: int, num_bytes: int, system: Any = os) -> memoryview:
    """Read a part of a file, or less if it is shorter."""
    buffer = np.empty(num_bytes, np.uint8).data
    file = system.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        done = 0
        while done < num_bytes:
            count = system.preadv(file, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
    finally:
        system.close(file)
    return buffer[:done]


def read_uses(folder: Path, number: int, count: int, system: Any = os) -> array[int]:
    """Return the recorded times of last use of a segment's first `count` records."""
    uses = array("Q")
    with contextlib.suppress(FileNotFoundError):
        data = read_bytes(file_name(folder, number, USED), 0, count * USE_BYTES, system)
        uses.frombytes(data[: len(data) // USE_BYTES * USE_BYTES])
    return uses
