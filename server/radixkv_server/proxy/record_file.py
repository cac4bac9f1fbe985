# SPDX-License-Identifier: Apache-2.0
"""RecordFile: requests and their answers as JSON lines, which `radixkv audit` reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from radixkv.observe.audit.exchange import read_answer
from radixkv.observe.audit.record import Json, Record
from radixkv.observe.audit.response_bodies import answer_of_events, events_in
from radixkv_server.dialect import dump
from radixkv_server.proxy.feed import Seen
from radixkv_server.proxy.redaction import Redaction


class RecordFile:
    """Append-only file readable by its owner alone; a full one is renamed.

    Args:
        max_bytes: size at which the file is renamed, `FILE` to `FILE.1`, that to `FILE.2` and so on.
        max_files: number of files to keep; the oldest is removed.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int, redaction: Redaction | None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._redaction = redaction
        self._file = self._open()

    def write(self, seen: Seen, record: Record) -> None:
        """Append a request.

        Raises:
            OSError: the file can't be written.
        """
        data = dump(self._line(seen, record)) + b"\n"
        size = os.fstat(self._file).st_size
        if size and size + len(data) > self._max_bytes:
            self._rotate()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _line(self, seen: Seen, record: Record) -> Json:
        exchange = seen.exchange
        request: Any = record.body
        response = read_answer(seen.exchange.response)
        conversation = record.conversation
        if self._redaction is not None:
            request = self._redaction.value(request)
            response = self._redaction.value(_whole(response, record))
            conversation = self._redaction.text(conversation)
        line: Json = {
            "time": exchange.time,
            "path": exchange.path,
            "status": exchange.status,
            "seconds": exchange.seconds,
            "first_seconds": exchange.first_seconds,
            "key": exchange.key,
            "conversation": conversation,
            "upstream": seen.upstream,
            "request": request,
            "response": response,
        }
        return {name: value for name, value in line.items() if value not in (None, "")}

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(self._path, flags, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.fchmod(file, 0o600)
        return file

    def _rotate(self) -> None:
        os.close(self._file)
        names = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, self._max_files))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                newer.replace(older)
        if self._max_files == 1:
            self._path.unlink()
        self._file = self._open()


def _whole(response: Any, record: Record) -> Any:
    """Assemble a stream's answer, since pieces of words have other hashes than whole words."""
    if isinstance(response, str):
        return answer_of_events(list(events_in(response)), record.dialect)
    return response
