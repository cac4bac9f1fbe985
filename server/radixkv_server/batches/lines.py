# SPDX-License-Identifier: Apache-2.0
"""Lines of a batch: a request a line on the way in, its answer a line on the way out.

The form is OpenAI's: `{"custom_id", "method": "POST", "url", "body"}`, and `{"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}`. Answers have the number of their request's line as `line`
besides, by which a batch that was cut off knows what is done.
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.regular_file import open_regular

#: Paths that a line may name.
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a server's batches; see `ServerLimits`."""

    max_files: int
    max_batch_lines: int
    max_batches: int


#: Most errors of a file that are told.
MAX_ERRORS = 100


class BadLine(Exception):
    """A line that is no request of a batch; the message says why.

    Attributes:
        custom_id: the line's own name, where it has one.
    """

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch.

    Attributes:
        line: its number in the file, from 1 on.
        url: path of its route, one of `URLS`.
        body: the request's JSON.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(number: int, text: bytes) -> BatchRequest:
    """Parse a line.

    Raises:
        BadLine: it is no JSON object of the form above, or asks for a stream.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"line {number} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine(
            f"line {number} is a {type(value).__name__}, not an object with custom_id, url and body"
        )
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"line {number}: custom_id must be a text that is not empty")
    if value.get("method", "POST") != "POST":
        raise BadLine(f"line {number}: method must be POST, not {value['method']!r}", custom_id)
    url, body = value.get("url"), value.get("body")
    if url not in URLS:
        raise BadLine(f"line {number}: url must be one of {', '.join(URLS)}, not {url!r}", custom_id)
    if not isinstance(body, dict):
        raise BadLine(f"line {number}: body must be an object, the request's JSON", custom_id)
    if body.get("stream"):
        raise BadLine(f"line {number}: a batch has no streams; leave stream out", custom_id)
    if body.get("background"):
        raise BadLine(f"line {number}: a batch waits for its answers; leave background out", custom_id)
    if url == "/v1/responses":
        body = {
            "store": False,
            **body,
        }  # it must not displace answers that conversations go on from
    return BatchRequest(number, custom_id, url, body)


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return the line of an answer, also of one with an error's status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(request.line, request.custom_id, response, None)


def error_line(number: int, error: BadLine, code: str = "invalid_line") -> dict[str, Any]:
    """Return the line that says why a line was not asked."""
    fault = {"code": code, "message": str(error)}
    return _output(number, error.custom_id, None, fault)


def line_errors(requests: InputFile, url: str, most_lines: int) -> list[dict[str, Any]]:
    """Return why a file is no batch of requests to `url`: at most `MAX_ERRORS` errors; none: it is one.

    O(bytes of the file).
    """
    if not requests.places:
        return [line_fault("empty_file", "the file has no requests", None)]
    if len(requests.places) > most_lines:
        message = (
            f"the file has {len(requests.places):,} requests, more than {most_lines:,} (max_batch_lines)"
        )
        return [line_fault("too_many_lines", message, None)]
    errors: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for number in requests.places:
        try:
            request = parse_line(number, requests.read(number))
        except BadLine as error:
            errors.append(line_fault("invalid_line", str(error), number))
        else:
            first = lines.setdefault(request.custom_id, number)
            if request.url != url:
                message = f"line {number}: url is {request.url}, and the batch's endpoint {url}"
                errors.append(line_fault("mismatched_url", message, number))
            elif first != number:
                message = f"line {number}: custom_id {request.custom_id[:80]!r} is that of line {first}"
                errors.append(line_fault("duplicate_custom_id", message, number))
        if len(errors) == MAX_ERRORS:
            break
    return errors


def line_fault(code: str, message: str, line: int | None) -> dict[str, Any]:
    """Return an error of a batch, about a line or about all of it."""
    return {"code": code, "message": message, "param": None, "line": line}


def is_failure(answer: dict[str, Any]) -> bool:
    """Return whether a line of the output has an error, or the refusal of a route."""
    response = answer["response"]
    return bool(answer["error"]) or response is None or not 200 <= response["status_code"] < 300


def _output(number: int, custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "line": number,
        "response": response,
        "error": error,
    }


class InputFile:
    """A file of requests, read line by line at any place; empty lines are skipped.

    Raises:
        ConfigError: it can't be read, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = io.BufferedReader(open_regular(path))  # type: ignore[type-var]
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; name a file of requests") from error
        #: Offset and length in bytes of each line with something in it, by its number.
        self.places = dict(self._find())

    def _find(self) -> Iterator[tuple[int, tuple[int, int]]]:
        offset = 0
        for number, text in enumerate(self._file, 1):
            if text.strip():
                yield number, (offset, len(text))
            offset += len(text)

    def read(self, number: int) -> bytes:
        """Return a line's bytes."""
        offset, length = self.places[number]
        self._file.seek(offset)
        return self._file.read(length)

    def close(self) -> None:
        self._file.close()


class OutputFile:
    """A file of answers, appended to line by line; what an earlier run wrote stays, and counts as done.

    Attributes:
        done: numbers of the lines that have their answer.
        num_failed: how many of these are failures.

    Raises:
        ConfigError: it can't be written, or holds something else than answers to these requests.
    """

    def __init__(self, path: Path, requests: InputFile) -> None:
        self.path = path
        self.done: set[int] = set()
        self.num_failed = 0
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; name another file") from error
        try:
            self._file.seek(0)
            self._take_earlier(requests)
        except BaseException:
            self._file.close()
            raise

    def _take_earlier(self, requests: InputFile) -> None:
        whole = 0
        for text in self._file:
            if not text.endswith(b"\n"):  # written when the earlier run was killed
                break
            whole += len(text)
            try:
                answer = json.loads(text)
                number, custom_id, failed = answer["line"], answer["custom_id"], is_failure(answer)
            except (ValueError, KeyError, TypeError) as error:
                raise self._foreign() from error
            if number not in requests.places or custom_id != _custom_id(requests.read(number)):
                raise self._foreign()
            self.done.add(number)
            self.num_failed += failed
        self._file.truncate(whole)

    def _foreign(self) -> ConfigError:
        return ConfigError(
            f"{self.path} holds something else than answers to this file of requests; name another file"
        )

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer; it is with the system when this returns.

        Raises:
            ConfigError: the disk is full, or fails.
        """
        try:
            self._file.write(json.dumps(answer).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self.path}: {error.strerror or error}; what is written stays, the same command goes on"
            ) from error
        self.done.add(answer["line"])
        self.num_failed += is_failure(answer)

    def close(self) -> None:
        self._file.close()


def _custom_id(text: bytes) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else None
