# SPDX-License-Identifier: Apache-2.0
"""Reports on a folder of segments, for people; the folder may be in use meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from radixkv.cache.keys import TOKEN_BYTES
from radixkv.tiers.disk.folder import ABOUT, SEGMENT, file_name, files_in
from radixkv.tiers.disk.segment_files import read_bytes, scan
from radixkv.tiers.record import RecordError, verify_record


@dataclass(slots=True)
class SegmentReport:
    """Report on a file.

    Attributes:
        file: its name.
        num_bytes: its size.
        modified: when it was written last, seconds since 1970.
        num_records, num_tokens: number of whole records, and of tokens in their blocks.
        damaged: offsets of records with other contents than written; empty if they were not read.
        lost_bytes: at the end, after the last whole record.
        is_foreign: written by another version of the format: nothing is known of its records.
        model, fingerprint: model of the records; empty: not known.
    """

    file: str
    num_bytes: int
    modified: float
    num_records: int
    num_tokens: int
    damaged: list[int]
    lost_bytes: int
    is_foreign: bool
    model: str
    fingerprint: str

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.lost_bytes


def report_segments(folder: Path, *, verify: bool) -> Iterator[SegmentReport]:
    """Yield a report for each file, the oldest first; each file is read when its report is taken.

    Args:
        verify: read the records' contents, too.

    Raises:
        OSError: the folder can't be read.
    """
    for number, ending in files_in(folder):
        if ending == SEGMENT:
            try:
                yield _report(folder, number, verify=verify)
            except FileNotFoundError:  # it has gone for others meanwhile
                continue


def _report(folder: Path, number: int, *, verify: bool) -> SegmentReport:
    path = file_name(folder, number, SEGMENT)
    status = os.stat(path)
    num_records = num_tokens = end = 0
    damaged = []
    is_foreign = False
    try:
        for offset, header in scan(path):
            if verify:
                try:
                    verify_record(read_bytes(path, offset, header.record_bytes))
                except RecordError:
                    damaged.append(offset)
            num_records += 1
            num_tokens += header.token_bytes // TOKEN_BYTES
            end = offset + header.record_bytes
    except RecordError as error:
        is_foreign = error.reason == "version" and not num_records
    try:
        about = Path(file_name(folder, number, ABOUT)).read_text("utf-8", "replace")
    except FileNotFoundError:
        about = ""
    model, fingerprint = (*about.splitlines(), "", "")[:2]
    return SegmentReport(
        file=os.path.basename(path),
        num_bytes=status.st_size,
        modified=status.st_mtime,
        num_records=num_records,
        num_tokens=num_tokens,
        damaged=damaged,
        lost_bytes=0 if is_foreign else max(0, status.st_size - end),
        is_foreign=is_foreign,
        model=model,
        fingerprint=fingerprint,
    )


def clear(folder: Path) -> int:
    """Remove all files of ours but the lock, which the caller holds; return their bytes.

    Raises:
        OSError: a file can't be removed.
    """
    num_bytes = 0
    for number, ending in files_in(folder):
        path = Path(file_name(folder, number, ending))
        num_bytes += path.stat().st_size
        path.unlink()
    return num_bytes
