"""RecordFile: requests and their answers as JSON lines, which `radixkv audit` reads."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from radixkv.audit.exchange import read_answer, read_json, unpacked
from radixkv.audit.record import Json, Record
from radixkv.audit.request_bodies import NoRequest
from radixkv.audit.response_bodies import answer_of_events, events_in
from radixkv_server.proxy.feed import Seen
from radixkv_server.proxy.redaction import Redaction

_REMOVED = "(key removed)"
#: Fields of bodies that hold keys, of the model's API or of servers of tools.
_KEY_FIELDS = frozenset(
    {
        *(
            "api_key",
            "apikey",
            "api-key",
            "x-api-key",
            "authorization",
            "authorization_token",
            "access_token",
        ),
        *("password", "client_secret", "secret_key", "aws_secret_access_key", "aws_session_token"),
    }
)


class RecordFile:
    """Appends to a file that its owner alone may read; a full one is kept under another name.

    Args:
        max_bytes: of a file; then it is renamed, `FILE` to `FILE.1`, that to `FILE.2` and so on.
        max_files: the oldest of more is removed.
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
        line = json.dumps(self._line(seen, record), ensure_ascii=False, separators=(",", ":"))
        for secret in seen.secrets:
            line = line.replace(json.dumps(secret, ensure_ascii=False)[1:-1], _REMOVED)
        data = (line + "\n").encode("utf-8", "surrogatepass")
        size = os.fstat(self._file).st_size
        if size and size + len(data) > self._max_bytes:
            self._rotate()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Nothing more is written."""
        os.close(self._file)

    def _line(self, seen: Seen, record: Record) -> Json:
        exchange = seen.exchange
        request: Any = _without_keys(record.body)
        response = _answer(seen)
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


def _answer(seen: Seen) -> Any:
    """The answer as JSON data, or a stream as its text; None: there is none that could be read."""
    headers = seen.exchange.response_headers
    try:
        data = unpacked(seen.exchange.response, headers.get("content-encoding", ""))
        text = data.decode("utf-8", "replace")
        return read_json(text) if text.lstrip()[:1] in ("{", "[") else read_answer(text)
    except NoRequest:
        return None


def _whole(response: Any, record: Record) -> Any:
    """A stream as the answer that it adds up to: pieces of words can't be hashed as the words are."""
    if isinstance(response, str):
        return answer_of_events(list(events_in(response)), record.dialect)
    return response


def _without_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_keys(item) for item in value]
    if isinstance(value, dict):
        return {
            name: _REMOVED if name.lower() in _KEY_FIELDS and isinstance(item, str) else _without_keys(item)
            for name, item in value.items()
        }
    return value
