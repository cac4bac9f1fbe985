# SPDX-License-Identifier: Apache-2.0
"""MessageLog: recorded OpenAI conversations, a schedule that sends them, and the tokenizers for both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cli.replay.trace import TraceError
from radixkv.errors import InvalidRequestError

Message = dict[str, Any]
NumberedLines = Iterable[tuple[int, dict[str, Any]]]


#: Turns messages and tool definitions into the token ids of a prompt, generation prompt included.
PromptTokenizer = Callable[[list[Message], Any], npt.NDArray[Any]]


def plain_text(messages: list[Message], tools: Any | None) -> str:
    """A rendering for tokenizers that have none of their own.

    `<tools>` + JSON with sorted keys + `</tools>` and a line feed if there are tools; per message `<|role|>`,
    the content, the tool calls as JSON, a line feed; then `<|assistant|>`.
    """
    parts = [f"<tools>{json.dumps(tools, sort_keys=True)}</tools>\n"] if tools else []
    for message in messages:
        calls = message.get("tool_calls")
        parts.append(
            f"<|{message['role']}|>{_text_of(message)}{json.dumps(calls, sort_keys=True) if calls else ''}\n"
        )
    parts.append("<|assistant|>")
    return "".join(parts)


def _text_of(message: Message) -> str:
    """A message's content as text; parts of a list content are joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or json.dumps(part, sort_keys=True) for part in content)


def _bytes_of(messages: list[Message], tools: Any | None) -> npt.NDArray[np.uint8]:
    return np.frombuffer(plain_text(messages, tools).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _load_pretrained(name: str) -> Any:
    """A transformers tokenizer from a folder, a file or the hub."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # heavy

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # files from anywhere: the libraries raise whatever they stumble over
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TraceError(
            f"tokenizer {name!r} can't be loaded ({first_line}); give a folder, a tokenizer.json, a hub id, "
            "or `bytes`"
        ) from None


def load_tokenizer(name: str) -> PromptTokenizer:
    """`bytes`, or a Hugging Face tokenizer by folder, tokenizer.json or hub id.

    `bytes` is the plain rendering, one byte a token: it needs no model and no download. Others render
    messages by their chat template, as the server does; one without a template gets the plain rendering.

    Raises:
        TraceError: no such tokenizer.
    """
    if name == "bytes":
        return _bytes_of
    from radixkv.text.tokenizer import Tokenizer  # heavy: torch or transformers

    tokenizer = Tokenizer(_load_pretrained(name))

    def prompt_tokens(messages: list[Message], tools: Any | None) -> npt.NDArray[np.int32]:
        if tokenizer.has_chat_template:
            # An answer of tool calls alone has no content in many logs, and templates print it unasked.
            messages = [{**message, "content": message.get("content") or ""} for message in messages]
            try:
                ids = tokenizer.apply_chat_template(messages, tools=tools or None)
            except InvalidRequestError as error:
                raise TraceError(f"tokenizer {name!r}: {error}") from None
        else:
            ids = tokenizer.encode(plain_text(messages, tools).encode("utf-8", "replace").decode("utf-8"))
        return np.asarray(ids, dtype=np.int32)

    return prompt_tokens


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A prompt, or a whole session, of a log: `line` is the number of its schedule (or log) line."""

    messages: list[Message]
    tools: Any | None
    arrival: float
    max_tokens: int
    line: int


class MessageLog:
    """Conversations by session number, and the requests a schedule makes of them."""

    def __init__(self, path: Path, sessions: dict[Any, LoggedRequest]) -> None:
        self._path = path
        self._sessions = sessions

    @classmethod
    def load(cls, path: Path, lines: NumberedLines, tools_path: Path | None) -> MessageLog:
        """Check and index the lines of a log.

        Raises:
            TraceError: messages that are no list of objects with a role; an unknown tool key; a session
                that appears twice; a tools file that can't be read.
        """
        tools_by_key = _load_tools(tools_path)
        sessions: dict[Any, LoggedRequest] = {}
        for line, record in lines:
            where = f"{path}, line {line}"
            messages = record.get("messages")
            if not isinstance(messages, list) or not messages:
                raise TraceError(f"{where}: messages must be a non-empty list")
            for index, message in enumerate(messages):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise TraceError(f"{where}: messages[{index}] must be an object with a role")
                if not isinstance(message.get("content"), str | list | None):
                    raise TraceError(f"{where}: messages[{index}].content must be text, a list or null")
            tools = record.get("tools")
            if isinstance(tools, str):
                if tools not in tools_by_key:
                    known = ", ".join(sorted(tools_by_key)) or "none; pass --tools"
                    raise TraceError(f"{where}: unknown tools {tools!r} (known: {known})")
                tools = tools_by_key[tools]
            key = record.get("n", line - 1)
            if not isinstance(key, int | str):
                raise TraceError(f"{where}: n, the session's number, must be an integer or a string")
            if key in sessions:
                raise TraceError(f"{where}: session {key!r} stands in line {sessions[key].line} already")
            arrival = record.get("timestamp", 0.0)
            if not isinstance(arrival, int | float) or isinstance(arrival, bool):
                raise TraceError(f"{where}: timestamp must be a number of seconds")
            max_tokens = int(_amount(where, record, "max_tokens"))
            sessions[key] = LoggedRequest(messages, tools, float(arrival), max_tokens, line)
        return cls(path, sessions)

    def requests(self, schedule: Path | None, lines: NumberedLines | None) -> Iterator[LoggedRequest]:
        """Yield the schedule's requests in its order; without one, every session once, whole.

        Raises:
            TraceError: an unknown session, or `upto` outside the session's messages.
        """
        if lines is None:
            yield from self._sessions.values()
            return
        for line, record in lines:
            where = f"{schedule}, line {line}"
            key, upto = record.get("session"), record.get("upto")
            found = self._sessions.get(key) if isinstance(key, int | str) else None
            if found is None:
                raise TraceError(f"{where}: no session {key!r} in {self._path}")
            if not isinstance(upto, int) or not 1 <= upto <= len(found.messages):
                raise TraceError(
                    f"{where}: upto must be from 1 to {len(found.messages)}, the messages of session "
                    f"{key!r}, not {upto!r}"
                )
            arrival, max_tokens = _amount(where, record, "t"), int(_amount(where, record, "max_tokens"))
            yield LoggedRequest(found.messages[:upto], found.tools, arrival, max_tokens, line)


def _amount(where: str, record: dict[str, Any], name: str) -> float:
    """The field's number; 0 where it is missing or null."""
    value = record.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TraceError(f"{where}: {name} must be a non-negative number, not {value!r}")
    return float(value)


def _load_tools(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: the tool definitions can't be read ({error})") from None
    if not isinstance(value, dict):
        raise TraceError(f"{path}: expected a JSON object of tool definitions by key")
    return value
