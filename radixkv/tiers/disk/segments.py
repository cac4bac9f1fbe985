"""SegmentStore: records in append-only files below a cap. One writes, others may read meanwhile.

    append ... append  sync     written | and certainly there after a loss of power: acknowledged
    [ 00000004 ][ 00000005 ][ 00000006 ... ]
      the oldest              the one that grows; after a restart always a new one

What is not whole at the end of a file was never acknowledged. At the cap the oldest segment goes, and those
of its records that were read since they were written are copied forward first (a second chance): on traces of
chats whose texts are three to twenty times the cap, that came to 80 to 98 % of the hits of an exact
least-recently-used order by record, where whole segments in the order of their last use came to 80 to 87 %
and in the order of writing to 35 to 82 %. It costs up to twice the writing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.tiers.disk.folder import ABOUT, SEGMENT, USED, file_name, files_in
from radixkv.tiers.record import (
    HEADER_BYTES,
    BlockName,
    RecordError,
    RecordHeader,
    pack_record,
    read_header,
    unpack_record,
    verify_record,
)
from radixkv.tiers.tier import Bytes

# The part of a segment that may be copied forward, of the first one that goes for a record, the second, ...:
# at last one makes room, though all are used all the time.
_KEPT_SHARES = (1.0, 0.5, 0.0)


@dataclass(slots=True)
class DiskCounts:
    """What came of records, since the start.

    Attributes:
        written, read: records.
        damaged: records that were not believed, and are forgotten; one for a file whose rest is not made out.
        evicted: records that went for others; `kept` of those that would have were copied forward.
    """

    written: int = 0
    read: int = 0
    damaged: int = 0
    evicted: int = 0
    kept: int = 0


@dataclass(eq=False, slots=True)
class Segment:
    """One file.

    Attributes:
        num_bytes: of the file.
        about_bytes: of what is written beside it, for people.
        is_foreign: another version of the format wrote it: it stays, unread, until its room is needed.
        keys: of its records, in order.
        used: a byte for each: whether it was read since it was written.
        used_changed: since that was written down.
    """

    number: int
    num_bytes: int = 0
    about_bytes: int = 0
    is_foreign: bool = False
    keys: list[bytes] = field(default_factory=list)
    used: bytearray = field(default_factory=bytearray)
    used_changed: bool = False

    @property
    def disk_bytes(self) -> int:
        """What it takes up, its uses included."""
        return self.num_bytes + self.about_bytes + len(self.used)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is.

    Attributes:
        index: of the segment's records.
        older: another copy, found at the start: power may have been lost while this one was copied forward.
    """

    segment: Segment
    index: int
    offset: int
    num_bytes: int
    older: Place | None = None


def scan(path: str, system: Any = os) -> Iterator[tuple[int, RecordHeader]]:
    """Offset and header of each record of a segment, up to the first that is not whole.

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
    """A part of a file, or less where it is shorter."""
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


class SegmentStore:
    """See the module's text. The caller holds the folder's lock.

    Args:
        max_bytes: most that its files take up.
        segment_bytes: of a file; a small part of the former, and several records.
        about: what to write beside each new file, for people.
        system: the operating system's calls, as the module `os` has them.

    Raises:
        OSError: of every method that touches files.
    """

    def __init__(
        self, folder: Path, max_bytes: int, segment_bytes: int, *, about: bytes = b"", system: Any = os
    ) -> None:
        self.folder = folder
        self._about = about
        self.max_bytes = max_bytes
        self.segment_bytes = segment_bytes
        self.counts = DiskCounts()
        self._system = system
        self._sync_data = getattr(system, "fdatasync", system.fsync)
        self._lock = threading.Lock()  # around the next two, and what segments say of their records
        self._places: dict[bytes, Place] = {}
        self._segments: list[Segment] = []  # the oldest first
        self._num_bytes = 0
        self._grows: Segment | None = None
        self._file: int | None = None  # the segment that grows
        self._is_dirty = self._is_new = False  # what the next sync has to do
        self._next_number = 1
        self._folder_file = system.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._open_all()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def num_bytes(self) -> int:
        """What its files take up."""
        return self._num_bytes

    @property
    def foreign_bytes(self) -> int:
        """Of these, what another version of the format wrote."""
        return sum(segment.num_bytes for segment in self._segments if segment.is_foreign)

    # ------------------------------------------------------------------ at the start

    def _open_all(self) -> None:
        for number, ending in files_in(self.folder):
            self._next_number = max(self._next_number, number + 1)
            if ending == SEGMENT:
                segment = self._scanned(number)
                if segment.keys or segment.is_foreign:
                    self._segments.append(segment)
                    self._num_bytes += segment.disk_bytes
                    continue
            elif self._segments and self._segments[-1].number == number:
                continue
            self._system.unlink(file_name(self.folder, number, ending))
        self._make_room(0)

    def _scanned(self, number: int) -> Segment:
        segment, path = Segment(number), file_name(self.folder, number, SEGMENT)
        try:
            for offset, header in scan(path, self._system):
                older = self._places.get(header.key)
                self._note(segment, header.key, offset, header.record_bytes, older)
        except RecordError as error:
            segment.is_foreign = error.reason == "version" and not segment.keys
            self.counts.damaged += not segment.is_foreign
        segment.num_bytes = self._system.stat(path).st_size
        with contextlib.suppress(FileNotFoundError):
            segment.about_bytes = self._system.stat(file_name(self.folder, number, ABOUT)).st_size
        try:
            used = bytes(read_bytes(file_name(self.folder, number, USED), 0, len(segment.keys), self._system))
        except FileNotFoundError:
            used = b""
        for index, byte in enumerate(used):
            segment.used[index] = byte == 1
        return segment

    def _note(
        self, segment: Segment, key: bytes, offset: int, num_bytes: int, older: Place | None = None
    ) -> None:
        with self._lock:
            self._places[key] = Place(segment, len(segment.keys), offset, num_bytes, older)
            segment.keys.append(key)
            segment.used.append(0)

    # ------------------------------------------------------------------ reading, on any thread

    def read(self, name: BlockName, tokens: Bytes) -> memoryview | None:
        """A block, verified; None: it is not there, or is not believed (and forgotten)."""
        while (place := self._places.get(name.key)) is not None:
            path = file_name(self.folder, place.segment.number, SEGMENT)
            try:
                record = read_bytes(path, place.offset, place.num_bytes, self._system)
                block = unpack_record(record, name, tokens)
            except FileNotFoundError:
                self._forget(name.key, place)
            except RecordError:
                self.counts.damaged += self._forget(name.key, place)
            else:
                self.counts.read += 1
                place.segment.used[place.index] = 1
                place.segment.used_changed = True
                return block
        return None

    def _forget(self, key: bytes, place: Place) -> bool:
        """A copy is no good, there may be an older one; False: it was forgotten already."""
        with self._lock:
            if self._places.get(key) is not place:
                return False
            if place.older is None:
                del self._places[key]
            else:
                self._places[key] = place.older
            return True

    # ------------------------------------------------------------------ writing, on one thread

    def append(self, name: BlockName, tokens: Bytes, block: Bytes) -> None:
        """Write a record; it can be read from now on, and is acknowledged by the next `sync`."""
        start, data = pack_record(name, tokens, block)
        self._make_room(len(start) + data.nbytes + 1)
        self._write(name.key, [start, data])
        self.counts.written += 1

    def sync(self) -> None:
        """Return when all that was appended is certainly there after a loss of power."""
        if self._file is not None and self._is_dirty:
            self._sync_data(self._file)
            self._is_dirty = False
        if self._is_new:
            self._system.fsync(self._folder_file)
            self._is_new = False
        for segment in self._segments:
            if segment.used_changed:
                segment.used_changed = False
                self._write_beside(segment, USED, bytes(segment.used))

    def close(self) -> None:
        """Sync, and let go of the files. May be called again."""
        try:
            if self._folder_file >= 0:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the files, whatever has become of them."""
        files = [file for file in (self._file, self._folder_file) if file is not None and file >= 0]
        self._file, self._folder_file = None, -1
        for file in files:
            self._system.close(file)

    def _write(self, key: bytes, parts: list[Any]) -> None:
        """At the end of the segment that grows, or of a new one."""
        size = sum(map(len, parts))
        if self._grows is None or self._grows.num_bytes + size > max(self.segment_bytes, size):
            self._begin_segment()
        segment, file = self._grows, self._file
        assert segment is not None
        assert file is not None
        offset = segment.num_bytes
        self._is_dirty = True
        left = [memoryview(part) for part in parts]
        while left:
            count = self._system.pwritev(file, left, segment.num_bytes)
            segment.num_bytes += count
            self._num_bytes += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        self._note(segment, key, offset, size)
        self._num_bytes += 1

    def _begin_segment(self) -> None:
        if self._file is not None:
            self.sync()
            file, self._file = self._file, None
            self._system.close(file)
        segment = Segment(self._next_number)
        self._next_number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = self._system.open(file_name(self.folder, segment.number, SEGMENT), flags, 0o600)
        self._is_new = True
        if self._about:
            self._write_beside(segment, ABOUT, self._about)
            segment.about_bytes = len(self._about)
            self._num_bytes += len(self._about)
        self._grows = segment
        self._segments.append(segment)

    def _write_beside(self, segment: Segment, ending: str, content: bytes) -> None:
        """What is neither synced nor missed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        file = self._system.open(file_name(self.folder, segment.number, ending), flags, 0o600)
        try:
            self._system.pwrite(file, content, 0)
        finally:
            self._system.close(file)

    # ------------------------------------------------------------------ room

    def _make_room(self, num_bytes: int) -> None:
        """Let the oldest segments go; there is always room for what is copied forward out of one."""
        shares = itertools.chain(_KEPT_SHARES, itertools.repeat(0.0))
        while self._num_bytes and self._num_bytes + num_bytes + self.segment_bytes > self.max_bytes:
            if self._segments[0] is self._grows:
                self._begin_segment()
            self._let_go(self._segments[0], next(shares))

    def _let_go(self, segment: Segment, kept_share: float) -> None:
        path = file_name(self.folder, segment.number, SEGMENT)
        with self._lock:
            live = [
                (key, self._places[key])
                for key in segment.keys
                if key in self._places and self._places[key].segment is segment
            ]
        room, kept = kept_share * min(segment.num_bytes, self.segment_bytes), 0
        for key, place in live:
            if segment.used[place.index] and place.num_bytes <= room:
                room -= place.num_bytes
                kept += self._copy_forward(path, key, place)
        if kept:
            self.sync()  # before the only other copy goes
        with self._lock:
            gone = [key for key, place in live if self._places.get(key) is place]
            for key in gone:
                del self._places[key]
        self._segments.remove(segment)
        self._num_bytes -= segment.disk_bytes
        self.counts.kept += kept
        self.counts.evicted += len(gone)
        for ending in (SEGMENT, ABOUT, USED):
            try:
                self._system.unlink(file_name(self.folder, segment.number, ending))
            except FileNotFoundError:
                continue

    def _copy_forward(self, path: str, key: bytes, place: Place) -> bool:
        try:
            record = read_bytes(path, place.offset, place.num_bytes, self._system)
            verify_record(record)
        except FileNotFoundError:
            return False
        except RecordError:
            self.counts.damaged += self._forget(key, place)
            return False
        self._write(key, [record])
        return True
