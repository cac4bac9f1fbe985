# SPDX-License-Identifier: Apache-2.0
"""Readers: files to `Trace` (hash-id JSON lines, message logs) or to bare lengths (CSV arrivals).

The kind of a file is known by its first line, not from its name:

| first line | kind |
| --- | --- |
| `{"hash_ids": ...}` | block ids, Mooncake's form; with `chat_id` Qwen's (ids name contents, seconds) |
| `{"messages": ...}` | OpenAI messages; with a schedule beside it, one request per schedule line |
| `{"session": ..., "upto": ...}` | such a schedule; its message log lies beside it |
| `TIMESTAMP,ContextTokens,GeneratedTokens` | arrivals without any prefix information |
| any log that `radixkv audit` reads: a request with its answer, a HAR | requests in order |

All may be gzipped.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from radixkv.cli.replay.message_log import MessageLog, load_tokenizer
from radixkv.cli.replay.trace import FloatArray, Int64Array, Trace, TraceBuilder, TraceError
from radixkv.observe.audit.prompt_units import prompt_text
from radixkv.observe.audit.readers.lines import DamagedFile, numbered_lines
from radixkv.observe.audit.readers.recording import Recording
from radixkv.observe.audit.record import Record

BlockIds = Literal["auto", "prefix", "content"]
BLOCK_IDS: tuple[BlockIds, ...] = get_args(BlockIds)

_SCHEDULE = "_schedule"
MAX_FIRST_LINE = 64 * 1024 * 1024  # bytes; of a longer one it is no use to know the kind
#: Fields of a model request beside its messages, absent in a line of a message log.
_OF_REQUESTS = frozenset({"model", "system", "call_type"})


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Lengths and times without prefix information.

    Attributes:
        name: short name, from the file's.
        input_lengths: int64 [requests], prompt tokens.
        output_lengths: int64 [requests], generated tokens.
        arrivals: float64 [requests], seconds since the first line.
    """

    name: str
    input_lengths: Int64Array
    output_lengths: Int64Array
    arrivals: FloatArray


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a trace.

    Attributes:
        block_size: tokens per block; None: inferred (hash ids) or 16 (message logs).
        block_ids: meaning of an id: its whole `prefix`, the `content` of its block, or `auto`: content in
            Qwen's form, prefix otherwise.
        schedule: schedule of a message log; None: the file `<log>_schedule.jsonl[.gz]` beside it, if any.
        tools: JSON object of tool definitions by key; None: `<log>_tools.json` beside the log, if any.
        tokenizer: `bytes`, or a tokenizer's folder, file or hub id.
        limit: read at most this many requests; None: all.
    """

    block_size: int | None = None
    block_ids: BlockIds = "auto"
    schedule: Path | None = None
    tools: Path | None = None
    tokenizer: str = "bytes"
    limit: int | None = None


AS_IT_IS = ReadOptions()


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl`, `.json`, `.csv`, `.gz`."""
    name = path.name
    for suffix in (".gz", ".jsonl", ".json", ".csv"):
        name = name.removesuffix(suffix)
    return name


def read_lines(path: Path, max_bytes: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of the non-empty lines of a plain or gzipped UTF-8 file.

    Raises:
        TraceError: the file is missing, unreadable, cut short, or not UTF-8.
    """
    number = 0
    try:
        for number, line in numbered_lines(path, max_bytes):
            yield number, line.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceError(f"{path}, line {number}: not UTF-8 text; is it a trace?") from None
    except DamagedFile as error:
        raise TraceError(str(error)) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON lines file.

    Raises:
        TraceError: as `read_lines`, or a line that is not a JSON object.
    """
    for number, text in read_lines(path):
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise TraceError(f"{path}, line {number}: not JSON ({reason}): {_clip(text)}") from None
        if not isinstance(value, dict):
            raise TraceError(f"{path}, line {number}: expected a JSON object, found {_clip(text)}")
        yield number, value


def read(path: Path, options: ReadOptions = AS_IT_IS) -> Trace | Arrivals:
    """Read any supported file.

    Raises:
        TraceError: the file is not a trace, or a line of it is wrong.
    """
    kind = _kind_of(path)
    if kind == "csv":
        return read_arrivals(path, options.limit)
    if kind == "hash_ids":
        return read_hash_ids(path, options)
    if kind == "schedule":
        log = path.with_name(path.name.replace(_SCHEDULE, "", 1))
        if log == path or not log.exists():
            raise TraceError(
                f"{path}: a schedule without its message log; expected {log.name} beside it, or name the "
                "log and pass this file as --schedule"
            )
        return read_messages(log, replace(options, schedule=path))
    return read_recording(path, options) if kind == "recording" else read_messages(path, options)


def read_trace(path: Path, options: ReadOptions = AS_IT_IS) -> Trace:
    """Read a file from which prefixes are known.

    Raises:
        TraceError: as `read`; also for a CSV of arrivals, which has lengths only.
    """
    result = read(path, options)
    if isinstance(result, Arrivals):
        raise TraceError(
            f"{path}: arrivals without prefix information (no hash_ids, no messages), so no hit rate can "
            "be told from it; `radixkv simulate` can use its lengths"
        )
    return result


def _clip(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _kind_of(path: Path) -> Literal["csv", "hash_ids", "schedule", "messages", "recording"]:
    for number, text in read_lines(path, MAX_FIRST_LINE):
        if not text.startswith(("{", "[", '"')):
            columns = {column.strip().lower() for column in text.split(",")}
            if {"contexttokens", "generatedtokens"} <= columns:
                return "csv"
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            if text.startswith(("{", "[")) and next(iter(Recording([path])), None) is not None:
                return "recording"
            raise TraceError(
                f"{path}, line {number}: neither a JSON line nor a CSV header with ContextTokens and "
                f"GeneratedTokens: {_clip(text)}"
            ) from None
        if isinstance(value, dict):
            if "hash_ids" in value:
                return "hash_ids"
            if "messages" in value and not value.keys() & _OF_REQUESTS:
                return "messages"
            if "upto" in value and "session" in value:
                return "schedule"
            if next(iter(Recording([path])), None) is not None:
                return "recording"
        raise TraceError(
            f"{path}, line {number}: a trace line is an object with hash_ids or messages; found {_clip(text)}"
        )
    raise TraceError(f"{path}: empty; a trace needs at least one line")


def _number(
    path: Path, line: int, record: dict[str, Any], key: str, *, integer: bool = True, default: Any = None
) -> Any:
    """A non-negative number of a record, checked."""
    value = record.get(key, default)
    if value is None:
        raise TraceError(f"{path}, line {line}: {key} is missing")
    right_type = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not right_type or not math.isfinite(value) or value < 0:
        what = "a non-negative integer" if integer else "a non-negative number"
        raise TraceError(f"{path}, line {line}: {key} must be {what}, not {_clip(repr(value))}")
    return value


def read_hash_ids(path: Path, options: ReadOptions = AS_IT_IS) -> Trace:
    """Read hash-id JSON lines: `{"timestamp", "input_length", "output_length", "hash_ids"}`.

    Timestamps are milliseconds in Mooncake's form and seconds in Qwen's (lines with `chat_id`).

    Raises:
        TraceError: a missing or wrong field, ids that do not fit the lengths, an id with two parents.
    """
    builder: TraceBuilder | None = None
    to_seconds = 1e-3
    for line, record in islice(read_json_lines(path), options.limit):
        if builder is None:
            qwen = "chat_id" in record
            to_seconds = 1.0 if qwen else 1e-3
            prefixes = options.block_ids == "prefix" or (options.block_ids == "auto" and not qwen)
            builder = TraceBuilder(trace_name(path), ids_are_prefixes=prefixes)
        ids = record.get("hash_ids")
        if not isinstance(ids, list):
            raise TraceError(f"{path}, line {line}: hash_ids must be a list, not {_clip(repr(ids))}")
        if not all(type(block) is int or type(block) is str for block in ids):
            raise TraceError(f"{path}, line {line}: hash_ids must be integers or strings")
        length = _number(path, line, record, "input_length")
        if len(ids) > max(length, 1):
            raise TraceError(f"{path}, line {line}: {len(ids)} hash_ids for an input_length of {length}")
        arrival = _number(path, line, record, "timestamp", integer=False, default=0)
        output = _number(path, line, record, "output_length", default=0)
        builder.add(ids, input_length=length, output_length=output, arrival=arrival * to_seconds, line=line)
    if builder is None:
        raise TraceError(f"{path}: empty; a trace needs at least one line")
    return builder.build(options.block_size)


def read_messages(path: Path, options: ReadOptions = AS_IT_IS) -> Trace:
    """Read a log of OpenAI messages through a tokenizer; full blocks only.

    With a schedule, each of its lines `{"t", "session", "upto", "max_tokens"}` sends
    `messages[:upto]` of session `n`; without one, each log line is one request with all its messages.

    Raises:
        TraceError: a wrong line in either file, an unknown session or tool key, no such tokenizer.
    """
    block_size = options.block_size or 16
    stem = trace_name(path)
    tools = options.tools or _beside(path, stem + "_tools.json")
    schedule = options.schedule or _beside(path, f"{stem}{_SCHEDULE}.jsonl.gz", f"{stem}{_SCHEDULE}.jsonl")
    log = MessageLog.load(path, read_json_lines(path), tools)
    prompt_tokens = load_tokenizer(options.tokenizer)
    builder = TraceBuilder(stem, ids_are_prefixes=False)
    requests = log.requests(schedule, read_json_lines(schedule) if schedule else None)
    for request in islice(requests, options.limit):
        try:
            tokens = prompt_tokens(request.messages, request.tools)
        except TraceError as error:
            raise TraceError(f"{schedule or path}, line {request.line}: {error}") from None
        builder.add(
            _full_blocks(tokens.tobytes(), block_size * tokens.itemsize),
            input_length=len(tokens),
            output_length=request.max_tokens,
            arrival=request.arrival,
            line=request.line,
        )
    return builder.build(block_size)


def _full_blocks(data: bytes, width: int) -> list[bytes]:
    return [data[at : at + width] for at in range(0, len(data) - width + 1, width)]


def read_recording(path: Path, options: ReadOptions = AS_IT_IS) -> Trace:
    """Read recorded requests, in the forms that `radixkv audit` reads, through a tokenizer; full blocks only.

    Raises:
        TraceError: something in it is no request, or there is no such tokenizer.
    """
    block_size = options.block_size or 16
    builder = TraceBuilder(trace_name(path), ids_are_prefixes=False)
    recording = Recording([path])
    prompt_tokens = None if options.tokenizer == "bytes" else load_tokenizer(options.tokenizer)
    start: float | None = None
    for number, record in enumerate(islice(recording, options.limit), start=1):
        if recording.problems.count:
            break
        if prompt_tokens is None:
            data, width = str(prompt_text(record.blocks)).encode("utf-8", "surrogatepass"), block_size
        else:
            tokens = prompt_tokens(_messages_of(record), list(record.tools) or None)
            data, width = tokens.tobytes(), block_size * tokens.itemsize
        start = record.time if start is None else start
        builder.add(
            _full_blocks(data, width),
            input_length=len(data) * block_size // width,
            output_length=record.usage.output or 0,
            arrival=max(0.0, (record.time or 0.0) - (start or 0.0)),
            line=number,
        )
    if recording.problems.count:
        raise TraceError(f"{path.parent / recording.problems.named[0]}")
    return builder.build(block_size)


def _messages_of(record: Record) -> list[dict[str, Any]]:
    """The messages of a recorded request in OpenAI's form."""
    messages = []
    for parts in record.parts.messages:
        message: dict[str, Any] = {"role": parts.role or "user", "content": parts.text}
        if parts.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": text}}
                for name, text in parts.calls
            ]
        messages.append(message)
    return messages


def _beside(path: Path, *names: str) -> Path | None:
    return next((path.with_name(name) for name in names if path.with_name(name).exists()), None)


def read_arrivals(path: Path, limit: int | None = None) -> Arrivals:
    """Read a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's LLM traces).

    Raises:
        TraceError: a missing column, a value that is no number or no time.
    """
    rows = read_lines(path)
    _, header = next(rows)
    names = [column.strip().lower() for column in header.split(",")]
    inputs: list[int] = []
    outputs: list[int] = []
    times: list[float] = []
    start: datetime | None = None
    for line, text in islice(rows, limit):
        cells = next(csv.reader([text]))
        if len(cells) != len(names):
            raise TraceError(f"{path}, line {line}: {len(cells)} columns, the header has {len(names)}")
        record = dict(zip(names, cells, strict=True))
        try:
            inputs.append(int(record["contexttokens"]))
            outputs.append(int(record["generatedtokens"]))
        except ValueError:
            raise TraceError(f"{path}, line {line}: not a number of tokens: {_clip(text)}") from None
        if min(inputs[-1], outputs[-1]) < 0:
            raise TraceError(f"{path}, line {line}: a negative number of tokens: {_clip(text)}")
        if stamp := record.get("timestamp"):
            try:
                arrived = datetime.fromisoformat(stamp[:26])
            except ValueError:
                raise TraceError(f"{path}, line {line}: not a time: {_clip(stamp)}") from None
            start = start or arrived
            times.append((arrived - start).total_seconds())
        else:
            times.append(0.0)
    if not inputs:
        raise TraceError(f"{path}: a header but no line; a trace needs at least one request")
    return Arrivals(trace_name(path), np.array(inputs), np.array(outputs), np.array(times))
