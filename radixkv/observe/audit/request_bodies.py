# SPDX-License-Identifier: Apache-2.0
"""From the body of a request, in any of the APIs, to the blocks of its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import xxhash
from pydantic_core import to_json

from radixkv.observe.audit.record import DEFAULT_TTL, Block, BlockKind, Dialect, Json
from radixkv.observe.audit.recorded_images import image_words, with_image_tokens

_TTLS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
_TEXT_KINDS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})
_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "computer_call_output"})


class NoRequest(ValueError):
    """A body that is no request to a model; says why."""


def dialect_of(body: Mapping[str, Any], path: str = "", answer: Mapping[str, Any] | None = None) -> Dialect:
    """Return the API of a body, from its path, the form of its answer, or its own form.

    Raises:
        NoRequest: none of the APIs fits.
    """
    path = path.partition("?")[0].rstrip("/")
    for ending, dialect in _PATHS:
        if path.endswith(ending):
            return dialect
    kind = "" if answer is None else str(answer.get("object") or answer.get("type") or "")
    if kind in _ANSWERS:
        return _ANSWERS[kind]
    messages = body.get("messages")
    if isinstance(messages, list):
        return "messages" if _is_anthropic(body, messages) else "chat"
    if "input" in body:
        return "responses"
    if "prompt" in body:
        return "completions"
    raise NoRequest("neither messages nor input nor prompt in it")


_PATHS: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", "chat"),
    ("/messages", "messages"),
    ("/responses", "responses"),
    ("/completions", "completions"),
)
_ANSWERS: dict[str, Dialect] = {
    "chat.completion": "chat",
    "message": "messages",
    "response": "responses",
    "text_completion": "completions",
}


def _is_anthropic(body: Mapping[str, Any], messages: list[Any]) -> bool:
    if "system" in body or "anthropic_version" in body or "thinking" in body:
        return True
    tools = body.get("tools") or ()
    if any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return True
    kinds = {
        part.get("type")
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    }
    return bool(kinds & {"tool_use", "tool_result", "thinking"}) or str(body.get("model")).startswith(
        "claude"
    )


def blocks_of(body: Json, dialect: Dialect) -> tuple[tuple[Block, ...], tuple[Json, ...]]:
    """The blocks of a prompt, and its tools. O(the body).

    Raises:
        NoRequest: what should be a list of messages is none.
    """
    tools = body.get("tools") or body.get("functions") or ()
    if not isinstance(tools, list | tuple):
        raise NoRequest(f"tools must be a list, not {type(tools).__name__}")
    listed = tuple(tool for tool in tools if isinstance(tool, dict))
    blocks = [*map(_tool, listed), *_READERS[dialect](body)]
    model = str(body.get("model") or "")
    return tuple(with_image_tokens(block, model, dialect) for block in blocks), listed


def _tool(tool: Json) -> Block:
    ttl = ttl_of(tool)
    if ttl is not None:
        tool = {name: value for name, value in tool.items() if name not in _MARKS}
    function = tool.get("function")
    name = (function if isinstance(function, dict) else tool).get("name")
    return Block(_as_json(tool), "", "tool", -1, str(name or ""), ttl)


_MARKS = ("cache_control", "prompt_cache_breakpoint")


def ttl_of(part: Mapping[str, Any]) -> float | None:
    """The time of the breakpoint that a part carries; None: it carries none."""
    for name in _MARKS:
        mark = part.get(name)
        if mark:
            ttl = mark.get("ttl") if isinstance(mark, dict) else None
            return _TTLS.get(ttl, DEFAULT_TTL) if isinstance(ttl, str) else DEFAULT_TTL
    return None


def _as_json(value: Any) -> str:
    return to_json(value).decode()


def _chat(body: Json) -> Iterator[Block]:
    for index, message in enumerate(_messages(body)):
        yield from chat_message(message, index)


def chat_message(message: Json, index: int) -> Iterator[Block]:
    """The blocks of one message in OpenAI's form."""
    role = str(message.get("role") or "user")
    role = {"developer": "system", "function": "tool"}.get(role, role)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        yield Block(reasoning, role, "thinking", index)
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    if isinstance(message.get("function_call"), dict):
        calls.append(message["function_call"])
    content = message.get("content")
    images = message.get("images")  # Ollama's
    shown = [{"type": "image", "data": image} for image in images] if isinstance(images, list) else []
    if shown and isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if shown and isinstance(content, list):
        content = [*content, *shown]
    if content or not calls:
        yield from _content(content, role, index, ttl_of(message), _id(message.get("tool_call_id")))
    for call in calls:
        function = call.get("function") or call.get("custom") or call
        if isinstance(function, dict):
            arguments = function.get("arguments", function.get("input"))
            text = arguments if isinstance(arguments, str) else _as_json(arguments or {})
            name = str(function.get("name") or "")
            yield Block(text, role, "call", index, name, call_id=_id(call.get("id")))


def _id(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _messages(body: Json) -> Iterator[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise NoRequest(f"messages must be a list, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise NoRequest(f"messages[{index}] must be an object, not {type(message).__name__}")
        yield message


def _content(
    content: Any, role: str, index: int, ttl: float | None = None, call_id: str = ""
) -> Iterator[Block]:
    """Blocks of a content: text, or a list of parts; the last one carries `ttl` if none of its own."""
    if content is None or isinstance(content, str):
        yield Block(content or "", role, "text", index, "", ttl, call_id)
        return
    parts = content if isinstance(content, list) else [content]
    for number, part in enumerate(parts):
        own = ttl_of(part) if isinstance(part, dict) else None
        if own is None and number + 1 == len(parts):
            own = ttl
        text, kind = _part_text(part)
        yield Block(text, role, kind, index, "", own, call_id)


def _part_text(part: Any) -> tuple[str, BlockKind]:
    if isinstance(part, str):
        return part, "text"
    if not isinstance(part, dict):
        return _as_json(part), "text"
    kind = part.get("type", "text")
    text = part.get("text")
    if isinstance(text, str) and (kind in _TEXT_KINDS or kind == "text"):
        return text, "text"
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"], "text"
    if "thinking" in str(kind):
        return str(part.get("thinking") or part.get("data") or ""), "thinking"
    return _mark(part), "media"


def _mark(part: Json) -> str:
    """Images in words, and what is none or can't be read by a digest: their data is no text of the prompt."""
    words = image_words(part)
    if words:
        return words
    plain = {name: value for name, value in part.items() if name not in _MARKS}
    return f"<{part.get('type')} {xxhash.xxh3_64_hexdigest(_as_json(plain).encode())}>"


def _anthropic(body: Json) -> Iterator[Block]:
    first = 0
    if body.get("system"):
        yield from _content(body["system"], "system", 0)
        first = 1
    index = first
    for message in _messages(body):
        role = str(message.get("role") or "user")
        content = message.get("content")
        if not isinstance(content, list) or not any(
            isinstance(part, dict) and part.get("type") == "tool_result" for part in content
        ):
            yield from anthropic_content(content, role, index)
            index += 1
            continue
        # Each result is a message of its own to everybody else.
        for part in content:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                yield from _content(
                    part.get("content"), "tool", index, ttl_of(part), _id(part.get("tool_use_id"))
                )
            else:
                yield from anthropic_content([part], role, index)
            index += 1


def anthropic_content(content: Any, role: str, index: int) -> Iterator[Block]:
    """The blocks of one message's content in Anthropic's form."""
    if not isinstance(content, list):
        yield from _content(content, role, index)
        return
    for part in content:
        if isinstance(part, dict) and part.get("type") == "tool_use":
            text = _as_json(part.get("input") or {})
            name = str(part.get("name") or "")
            yield Block(text, role, "call", index, name, ttl_of(part), _id(part.get("id")))
        else:
            yield from _content([part], role, index)


def _responses(body: Json) -> Iterator[Block]:
    if isinstance(body.get("instructions"), str) and body["instructions"]:
        yield Block(body["instructions"], "system", "text", 0)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    yield from response_items(items if isinstance(items, list) else [], FIRST_ITEM)[0]


class NextItem(NamedTuple):
    """Place of the next item of the Responses API.

    Attributes:
        message: index of its message.
        is_open: True for a message of the assistant, which takes reasoning and calls.
    """

    message: int
    is_open: bool = False


#: Before it there may be instructions.
FIRST_ITEM = NextItem(1)


def response_items(items: Iterable[Any], at: NextItem) -> tuple[list[Block], NextItem]:
    """Return the blocks of items of the Responses API, and where those after them go.

    Reasoning and calls go with the assistant's message.
    """
    blocks: list[Block] = []
    index, is_open = at
    for item in items:
        if not isinstance(item, dict) or item.get("type") == "configuration_update":  # not in the prompt
            continue
        kind = str(item.get("type") or "message")
        role = str(item.get("role") or "user")
        ours = kind in _CALLS or kind == "reasoning" or (kind == "message" and role == "assistant")
        if is_open and not ours:
            index += 1
        blocks += _response_item(item, kind, role, index)
        is_open = ours
        index += not ours
    return blocks, NextItem(index, is_open)


def _response_item(item: Json, kind: str, role: str, index: int) -> Iterator[Block]:
    if kind == "reasoning":
        texts = [part.get("text") for part in item.get("content") or item.get("summary") or ()]
        hidden = str(item.get("encrypted_content") or "")
        text = "".join(text for text in texts if isinstance(text, str)) or hidden
        yield Block(text, "assistant", "thinking", index)
    elif kind in _CALLS:
        given = item.get("arguments", item.get("input"))
        arguments = given if isinstance(given, str) else _as_json(given or {})
        name = str(item.get("name") or "")
        yield Block(arguments, "assistant", "call", index, name, call_id=_id(item.get("call_id")))
    elif kind in _OUTPUTS:
        yield from _content(item.get("output"), "tool", index, call_id=_id(item.get("call_id")))
    elif kind == "image_generation_call":
        yield Block(_mark({"type": "image", "data": item.get("result")}), "assistant", "media", index)
    elif kind == "message":
        role = "system" if role == "developer" else role
        yield from _content(item.get("content"), role, index, ttl_of(item))
    else:
        yield Block(_mark(item), role, "media", index)


def _completions(body: Json) -> Iterator[Block]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    yield Block(prompt if isinstance(prompt, str) else _as_json(prompt), "", "text", 0)


_READERS = {"chat": _chat, "messages": _anthropic, "responses": _responses, "completions": _completions}
