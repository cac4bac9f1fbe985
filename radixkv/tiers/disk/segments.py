# SPDX-License-Identifier: Apache-2.0
"""SegmentStore: records in append-only files below a cap. One writes, others may read meanwhile.

    append ... append  sync     written | and certainly there after a loss of power: acknowledged
    [ 00000004 ][ 00000005 ][ 00000006 ... ]
      the oldest              the one that grows; after a restart always a new one

An incomplete record at the end of a file was never acknowledged. Each record has a number for its
last use, which is written down beside its segment and survives. At the cap, evict the segment with the
least data among the most recently used 31 parts in 32 of the cap, after copying that data forward; if texts
leave in the order they came, there is none. Older data is forgotten, wherever it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.tiers.disk.folder import ABOUT, SEGMENT, USED, file_name, files_in
from radixkv.tiers.disk.segment_files import GONE, USE_BYTES, Location, Segment, read_bytes, read_uses, scan
from radixkv.tiers.record import (
    BlockName,
    RecordError,
    pack_record,
    unpack_record,
    verify_record,
)
from radixkv.tiers.tier import Bytes

# The part of the cap with the least recently used data, which is not copied forward.
_SLACK = 1 / 32
# Bytes that are copied forward at the start, where the cap was lowered.
_MAX_COPIED_AT_START = 1 << 30


@dataclass(slots=True)
class DiskCounts:
    """Counts of records, since the start.

    Attributes:
        written, read: records.
        damaged: records that failed verification, and are forgotten; one for a file with an unreadable rest.
        evicted: records evicted for others; `kept` of the candidates were copied forward.
    """

    written: int = 0
    read: int = 0
    damaged: int = 0
    evicted: int = 0
    kept: int = 0


class SegmentStore:
    """Records in the segments of a folder; see the module. The caller holds the folder's lock.

    Args:
        max_bytes: limit of the size of its files.
        segment_bytes: size of a file; a small part of the limit, and several records.
        about: text for people, written beside each new file.
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
        self._locations: dict[bytes, Location] = {}
        self._segments: list[Segment] = []  # the oldest first
        self._num_bytes = 0
        self._grows: Segment | None = None
        self._file: int | None = None  # the segment that grows
        self._is_dirty = self._is_new = False  # what the next sync has to do
        self._next_number = 1
        self._last_use = 0
        self._folder_file = system.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._open_all()

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: bytes) -> bool:
        return key in self._locations

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return self._num_bytes

    @property
    def foreign_bytes(self) -> int:
        """Bytes of these in other versions of the format."""
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
        self._make_room_at_start()

    def _scanned(self, number: int) -> Segment:
        segment, path = Segment(number), file_name(self.folder, number, SEGMENT)
        try:
            for offset, header in scan(path, self._system):
                older = self._locations.get(header.key)
                self._note(segment, header.key, offset, header.record_bytes, older=older)
        except RecordError as error:
            segment.is_foreign = error.reason == "version" and not segment.keys
            self.counts.damaged += not segment.is_foreign
        segment.num_bytes = self._system.stat(path).st_size
        with contextlib.suppress(FileNotFoundError):
            segment.about_bytes = self._system.stat(file_name(self.folder, number, ABOUT)).st_size
        uses = read_uses(self.folder, number, len(segment.keys), self._system)
        for index, key in enumerate(segment.keys):
            # Records written just before the process was killed count as used last.
            use = uses[index] if index < len(uses) and 0 < uses[index] <= GONE else self._last_use + 1
            segment.uses[index] = use
            if use < GONE:
                self._last_use = max(self._last_use, use)
            elif (location := self._locations.get(key)) and (location.segment, location.index) == (
                segment,
                index,
            ):
                self._forget(key, location)
        return segment

    def _note(
        self,
        segment: Segment,
        key: bytes,
        offset: int,
        num_bytes: int,
        use: int = 0,
        older: Location | None = None,
    ) -> None:
        with self._lock:
            self._locations[key] = Location(segment, len(segment.keys), offset, num_bytes, older)
            segment.keys.append(key)
            segment.uses.append(use)

    # ------------------------------------------------------------------ reading, on any thread

    def read(self, name: BlockName, tokens: Bytes) -> memoryview | None:
        """Read and verify a block; None: it is missing, or damaged (and forgotten)."""
        while (location := self._locations.get(name.key)) is not None:
            path = file_name(self.folder, location.segment.number, SEGMENT)
            try:
                record = read_bytes(path, location.offset, location.num_bytes, self._system)
                block = unpack_record(record, name, tokens)
            except FileNotFoundError:
                self._forget(name.key, location)
            except RecordError:
                self.counts.damaged += self._forget(name.key, location)
            else:
                self.counts.read += 1
                return block
        return None

    def use(self, keys: Sequence[bytes]) -> bool:
        """Record a use of consecutive blocks, the first evicted last; return True if any is present."""
        with self._lock:
            there = [location for key in reversed(keys) if (location := self._locations.get(key)) is not None]
            for location in there:
                self._last_use += 1
                location.segment.uses[location.index] = self._last_use
                location.segment.uses_changed = True
        return bool(there)

    def next_uses(self, count: int) -> range:
        """Return times of use for consecutive blocks of a text to append."""
        with self._lock:
            self._last_use += count
            return range(self._last_use, self._last_use - count, -1)

    def _forget(self, key: bytes, location: Location) -> bool:
        """Forget a damaged copy in favour of an older one, if any; False: it was forgotten already."""
        with self._lock:
            if self._locations.get(key) is not location:
                return False
            if location.older is None:
                del self._locations[key]
            else:
                self._locations[key] = location.older
            return True

    # ------------------------------------------------------------------ writing, on one thread

    def append(self, name: BlockName, tokens: Bytes, block: Bytes, use: int | None = None) -> None:
        """Write a record; it can be read from now on, and is acknowledged by the next `sync`.

        Args:
            use: one of `next_uses`; None: it is used now.
        """
        start, data = pack_record(name, tokens, block)
        self._make_room(len(start) + data.nbytes + USE_BYTES)
        self._write(name.key, [start, data], self.next_uses(1)[0] if use is None else use)
        self.counts.written += 1

    def sync(self) -> None:
        """Return when all appended records would survive a loss of power."""
        if self._file is not None and self._is_dirty:
            self._sync_data(self._file)
            self._is_dirty = False
        if self._is_new:
            self._system.fsync(self._folder_file)
            self._is_new = False
        for segment in self._segments:
            if segment.uses_changed:
                segment.uses_changed = False
                with self._lock:
                    uses = segment.uses.tobytes()
                self._write_beside(segment, USED, uses)

    def close(self) -> None:
        """Sync, and let go of the files. May be called again."""
        try:
            if self._folder_file >= 0:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files without syncing, after a fault."""
        files = [file for file in (self._file, self._folder_file) if file is not None and file >= 0]
        self._file, self._folder_file = None, -1
        for file in files:
            self._system.close(file)

    def _write(self, key: bytes, parts: list[Any], use: int) -> None:
        """Write at the end of the growing segment, or of a new one."""
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
        self._note(segment, key, offset, size, use)
        segment.uses_changed = True
        self._num_bytes += USE_BYTES

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
        """Write bytes that are not synced, and whose loss does no harm."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        file = self._system.open(file_name(self.folder, segment.number, ending), flags, 0o600)
        try:
            self._system.pwrite(file, content, 0)
        finally:
            self._system.close(file)

    # ------------------------------------------------------------------ room

    def _make_room(self, num_bytes: int) -> None:
        """Evict segments; there is always room for the data copied forward out of one. O(records) then."""
        while (excess := self._excess(num_bytes)) > 0:
            goes = self._next_to_go(excess + int(_SLACK * self.max_bytes))
            self._let_go(*goes, self.max_bytes - self._num_bytes)

    def _make_room_at_start(self) -> None:
        """Evict after the cap was lowered."""
        room = _MAX_COPIED_AT_START
        while (excess := self._excess(0)) > 0:
            room -= self._let_go(*self._next_to_go(excess), room)

    def _excess(self, num_bytes: int) -> int:
        """Return the bytes to evict before `num_bytes` are added."""
        if not any(segment.num_bytes for segment in self._segments):
            return 0
        return self._num_bytes + num_bytes + self.segment_bytes - self.max_bytes

    def _next_to_go(self, num_bytes: int) -> tuple[Segment, int]:
        """Return the segment with the least data to keep (of equals, the oldest), and the earliest use kept.

        Args:
            num_bytes: amount of the least recently used data that is not kept.
        """
        segments = [segment for segment in self._segments if segment.num_bytes]
        live = [self._live(segment) for segment in segments]
        uses = np.array([use for records in live for use, _, _ in records], np.uint64)
        sizes = np.array([location.num_bytes for records in live for _, _, location in records], np.int64)
        order = np.argsort(uses)
        last_gone = int(np.searchsorted(np.cumsum(sizes[order]), num_bytes))
        # After a loss of power several may have one number: these go together.
        oldest_kept = int(uses[order[last_gone]]) + 1 if last_gone < len(order) else GONE

        def to_keep(number: int) -> tuple[float, int]:
            kept = sum(location.num_bytes for use, _, location in live[number] if use >= oldest_kept)
            latest_use = max((use for use, _, _ in live[number]), default=0)
            return kept / segments[number].num_bytes, latest_use

        return segments[min(range(len(live)), key=to_keep)], oldest_kept

    def _live(self, segment: Segment) -> list[tuple[int, bytes, Location]]:
        """Return the live records of a segment: last use, key and location."""
        with self._lock:
            return [
                (segment.uses[location.index], key, location)
                for key in segment.keys
                if (location := self._locations.get(key)) is not None and location.segment is segment
            ]

    def _let_go(self, segment: Segment, oldest_kept: int, room: int) -> int:
        """Copy forward the data used since then, as far as there is room; return its bytes."""
        if segment is self._grows:
            self._begin_segment()
        path = file_name(self.folder, segment.number, SEGMENT)
        live = self._live(segment)
        num_kept = num_copied = 0
        for use, key, location in sorted(live, key=itemgetter(0), reverse=True):
            if use < oldest_kept or num_copied + location.num_bytes > room:
                break
            if self._copy_forward(path, key, location, use):
                num_kept += 1
                num_copied += location.num_bytes
        if num_kept:
            self.sync()  # before the only other copy goes
        gone = [(use, key, location) for use, key, location in live if self._locations.get(key) is location]
        latest_gone = max((use for use, _, _ in gone if use < oldest_kept), default=0)
        self._segments.remove(segment)
        self._num_bytes -= segment.disk_bytes
        for other in self._segments:  # else a text would outlive others that were used since
            gone += [record for record in self._live(other) if record[0] < latest_gone]
        with self._lock:
            for _, key, location in gone:
                if self._locations.get(key) is location:
                    del self._locations[key]
                    location.segment.uses[location.index] = GONE
                    location.segment.uses_changed = True
        self.counts.kept += num_kept
        self.counts.evicted += len(gone)
        for ending in (SEGMENT, ABOUT, USED):
            try:
                self._system.unlink(file_name(self.folder, segment.number, ending))
            except FileNotFoundError:
                continue
        return num_copied

    def _copy_forward(self, path: str, key: bytes, location: Location, use: int) -> bool:
        try:
            record = read_bytes(path, location.offset, location.num_bytes, self._system)
            verify_record(record)
        except FileNotFoundError:
            return False
        except RecordError:
            self.counts.damaged += self._forget(key, location)
            return False
        self._write(key, [record], use)
        return True
