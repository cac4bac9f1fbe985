"""From what an API answered, whole or as a stream of server-sent events, to the answer and its usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from radixkv.audit.record import Block, Dialect, Json, ReportedUsage
from radixkv.audit.request_bodies import anthropic_content, chat_message, response_items

_MAX_TOKENS = 2**40  # of one request; more are no count


def answer_blocks(answer: Json, dialect: Dialect, index: int) -> tuple[Block, ...]:
    """What the assistant said, as blocks of the message `index`; nothing where it said nothing."""
    if dialect == "messages":
        blocks = anthropic_content(answer.get("content") or [], "assistant", index)
    elif dialect == "responses":
        blocks = response_items(_list(answer.get("output")), index)
    else:
        choice = next(iter(_list(answer.get("choices"))), None)
        if not isinstance(choice, dict):
            return ()
        if dialect == "completions":
            return (Block(str(choice.get("text") or ""), "", "text", index),)
        message = choice.get("message")
        blocks = chat_message(message, index) if isinstance(message, dict) else iter(())
    return tuple(blocks)


def usage_of(answer: Mapping[str, Any]) -> ReportedUsage:
    """What an answer tells of its tokens, in whichever API's words."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return ReportedUsage()
    output = _count(usage, "completion_tokens", "output_tokens")
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    prompt = _count(usage, "prompt_tokens")
    if isinstance(details, dict) or prompt is not None:
        details = details if isinstance(details, dict) else {}
        cached = _count(details, "cached_tokens")
        told = _count(details, "cache_write_tokens", "cache_creation_tokens", "created_cache_tokens")
        return ReportedUsage(
            _count(usage, "input_tokens") if prompt is None else prompt,
            read if cached is None else cached,
            written if told is None else told,
            output,
        )
    rest = _count(usage, "input_tokens")
    if rest is None or (read is None and written is None):
        return ReportedUsage(rest, read, written, output)
    # Anthropic's input_tokens are those after the last breakpoint alone.
    return ReportedUsage(rest + (read or 0) + (written or 0), read, written, output)


def _count(usage: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TOKENS:
            return value
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------------------------------------- streams


def events_in(text: str) -> Iterator[Json]:
    """The JSON objects of a stream of server-sent events; what is cut off or damaged is left out."""
    data: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("data:"):
            data.append(line[5:].lstrip())
        elif not line and data:
            try:
                value = from_json("\n".join(data))
            except ValueError:
                value = None
            data = []
            if isinstance(value, dict):
                yield value


def answer_of_events(events: Sequence[Json], dialect: Dialect) -> Json:
    """The answer that a stream's events add up to, as it would have come whole. O(events)."""
    if dialect == "messages":
        return _anthropic(events)
    if dialect == "responses":
        return _responses(events)
    return _chat(events, dialect)


def _responses(events: Sequence[Json]) -> Json:
    answer: Json = {}
    items = []
    for event in events:
        if isinstance(event.get("response"), dict):
            answer = event["response"]
        elif event.get("type") == "response.output_item.done" and isinstance(event.get("item"), dict):
            items.append(event["item"])
    return answer if answer.get("output") or not items else {**answer, "output": items}


def _anthropic(events: Sequence[Json]) -> Json:
    answer: Json = {}
    usage: Json = {}
    blocks: dict[int, Json] = {}
    pieces: dict[int, list[str]] = {}
    for event in events:
        kind, number = event.get("type"), event.get("index", 0)
        if kind == "message_start" and isinstance(event.get("message"), dict):
            answer = dict(event["message"])
            usage.update(answer.get("usage") or {})
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            blocks[number] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(event.get("delta"), dict):
            delta = event["delta"]
            text = delta.get("text") or delta.get("partial_json") or delta.get("thinking")
            if isinstance(text, str):
                pieces.setdefault(number, []).append(text)
        elif kind == "message_delta":
            told = event.get("usage") or {}
            usage.update({name: value for name, value in told.items() if value is not None})
    for number, block in blocks.items():
        text = "".join(pieces.get(number, ()))
        if block.get("type") == "tool_use":
            block["input"] = _partial(text) if text else block.get("input") or {}
        else:
            name = "thinking" if block.get("type") == "thinking" else "text"
            block[name] = str(block.get(name) or "") + text
    return {**answer, "content": [blocks[number] for number in sorted(blocks)], "usage": usage}


def _partial(text: str) -> Any:
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


def _chat(events: Sequence[Json], dialect: Dialect) -> Json:
    answer: Json = {}
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": [], "text": []}
    calls: dict[int, Json] = {}
    for event in events:
        answer.update({name: event[name] for name in ("id", "model", "usage") if event.get(name)})
        for choice in _list(event.get("choices")):
            if not isinstance(choice, dict) or choice.get("index", 0):
                continue
            delta = choice.get("delta")
            delta = delta if isinstance(delta, dict) else choice
            for name, names in _DELTAS:
                text = next((delta[one] for one in names if isinstance(delta.get(one), str)), None)
                if text:
                    texts[name].append(text)
            for call in _list(delta.get("tool_calls")):
                _add_call(calls, call)
    if dialect == "completions":
        return {**answer, "choices": [{"text": "".join(texts["text"])}]}
    message: Json = {"role": "assistant", "content": "".join(texts["content"])}
    if texts["reasoning_content"]:
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return {**answer, "choices": [{"message": message}]}


_DELTAS = (
    ("content", ("content",)),
    ("reasoning_content", ("reasoning_content", "reasoning")),
    ("text", ("text",)),
)


def _add_call(calls: dict[int, Json], delta: Any) -> None:
    if not isinstance(delta, dict):
        return
    call = calls.setdefault(delta.get("index", 0), {"function": {"name": "", "arguments": ""}})
    if delta.get("id"):
        call["id"] = delta["id"]
    function = delta.get("function")
    if isinstance(function, dict):
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
