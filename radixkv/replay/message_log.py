"""MessageLog: recorded OpenAI conversations, a schedule that sends them, and the tokenizers for both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from radixkv.replay.trace import TraceError

Message = dict[str, Any]
NumberedLines = Iterable[tuple[int, dict[str, Any]]]


class PromptTokenizer(Protocol):
    """Turns messages (and tool definitions) into the token ids of a prompt, generation prompt included."""

    def prompt_tokens(self, messages: list[Message], tools: Any | None) -> npt.NDArray[Any]: ...


class BytesTokenizer:
    """One byte, one token: needs no model and no download.

    The rendering: `<tools>` + JSON with sorted keys + `</tools>` and a line feed if there are tools; per
    message `<|role|>`, the content, the tool calls as JSON, a line feed; then `<|assistant|>`.
    """

    def prompt_tokens(self, messages: list[Message], tools: Any | None) -> npt.NDArray[np.uint8]:
        parts = [f"<tools>{json.dumps(tools, sort_keys=True)}</tools>\n"] if tools else []
        for message in messages:
            calls = message.get("tool_calls")
            parts.append(
                f"<|{message['role']}|>{_text_of(message)}"
                f"{json.dumps(calls, sort_keys=True) if calls else ''}\n"
            )
        parts.append("<|assistant|>")
        return np.frombuffer("".join(parts).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _text_of(message: Message) -> str:
    """A message's content as text; parts of a list content are joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or json.dumps(part, sort_keys=True) for part in content)


class ChatTemplateTokenizer:
    """A Hugging Face tokenizer with a chat template.

    Args:
        name: folder or hub id. Imported on construction, so that the bytes tokenizer needs no
            transformers.

    Raises:
        TraceError: no such tokenizer, or it has no chat template.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise TraceError(
                f"tokenizer {name!r} can't be loaded ({first_line}); give a folder or hub id, or `bytes`"
            ) from None
        if not self._tokenizer.chat_template:
            raise TraceError(f"tokenizer {name!r} has no chat template, so messages can't be rendered")

    def prompt_tokens(self, messages: list[Message], tools: Any | None) -> npt.NDArray[np.int32]:
        ids = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return np.asarray(ids, dtype=np.int32)


def load_tokenizer(name: str) -> PromptTokenizer:
    """`bytes`, or a Hugging Face tokenizer by folder or hub id.

    Raises:
        TraceError: as `ChatTemplateTokenizer`.
    """
    return BytesTokenizer() if name == "bytes" else ChatTemplateTokenizer(name)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of a log: `line` is where its schedule (or log) line stands."""

    messages: list[Message]
    tools: Any | None
    arrival: float
    max_tokens: int
    line: int


@dataclass(frozen=True, slots=True)
class _Session:
    messages: list[Message]
    tools: Any | None
    arrival: float
    line: int


class MessageLog:
    """Conversations by session number, and the requests a schedule makes of them."""

    def __init__(self, path: Path, sessions: dict[Any, _Session]) -> None:
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
        sessions: dict[Any, _Session] = {}
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
            sessions[key] = _Session(messages, tools, float(arrival), line)
        return cls(path, sessions)

    def requests(self, schedule: Path | None, lines: NumberedLines | None) -> Iterator[LoggedRequest]:
        """Yield the schedule's requests in its order; without one, every session once, whole.

        Raises:
            TraceError: an unknown session, or `upto` outside the session's messages.
        """
        if lines is None:
            for session in self._sessions.values():
                yield LoggedRequest(session.messages, session.tools, session.arrival, 0, session.line)
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
            arrival, max_tokens = record.get("t", 0.0), record.get("max_tokens", 0)
            for name, value in (("t", arrival), ("max_tokens", max_tokens)):
                if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                    raise TraceError(f"{where}: {name} must be a non-negative number, not {value!r}")
            yield LoggedRequest(found.messages[:upto], found.tools, float(arrival), int(max_tokens), line)


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
