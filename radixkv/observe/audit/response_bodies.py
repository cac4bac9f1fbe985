# SPDX-License-Identifier: Apache-2.0
"""Reader of APIs' answers, whole or as server-sent events: the answer's blocks and its usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from radixkv.observe.audit.body_limits import read_json
from radixkv.observe.audit.record import Block, Dialect, Json, ReportedUsage
from radixkv.observe.audit.request_bodies import NextItem, anthropic_content, chat_message, response_items

_MAX_TOKENS = 2**40  # of one request; more are no count


def answers_blocks(answer: Json, dialect: Dialect, index: int) -> list[tuple[Block, ...]]:
    """Return the assistant's answers, one per sample, as blocks of the message `index`."""
    dialect = _form_of(answer, dialect)
    if dialect == "messages":
        return [tuple(anthropic_content(answer.get("content") or [], "assistant", index))]
    if dialect == "responses":
        return [tuple(response_items(_list(answer.get("output")), NextItem(index))[0])]
    samples: list[tuple[Block, ...]] = []
    for choice in _list(answer.get("choices")):
        if isinstance(choice, dict) and dialect == "completions":
            samples.append((Block(str(choice.get("text") or ""), "", "text", index),))
        elif isinstance(choice, dict) and isinstance(choice.get("message"), dict):
            samples.append(tuple(chat_message(choice["message"], index)))
    return samples


def _form_of(answer: Json, dialect: Dialect) -> Dialect:
    """The API in whose form an answer is: LiteLLM logs many as chats, whatever was asked."""
    return "chat" if dialect != "completions" and "choices" in answer else dialect


def has_ended(answer: Json, dialect: Dialect) -> bool:
    """Tell whether the model ended its answer itself, not a limit, a stop string, or the client."""
    dialect = _form_of(answer, dialect)
    if dialect == "messages":
        return answer.get("stop_reason") in ("end_turn", "tool_use")
    if dialect == "responses":
        return answer.get("status") == "completed"
    choice = next(iter(_list(answer.get("choices"))), None)
    ends = ("stop", "tool_calls", "function_call")
    return isinstance(choice, dict) and choice.get("finish_reason") in ends


def usage_of(answer: Mapping[str, Any]) -> ReportedUsage:
    """Return the token counts in an answer of any API."""
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
        reported = _count(details, "cache_write_tokens", "cache_creation_tokens", "created_cache_tokens")
        return ReportedUsage(
            _count(usage, "input_tokens") if prompt is None else prompt,
            read if cached is None else cached,
            written if reported is None else reported,
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
    """Yield the JSON objects of a stream of server-sent events, without truncated or damaged ones."""
    data: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("data:"):
            data.append(line[5:].lstrip())
        elif not line and data:
            try:
                value = read_json("\n".join(data))
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
            if isinstance(event.get("delta"), dict):
                answer["stop_reason"] = event["delta"].get("stop_reason")
            reported = event.get("usage") or {}
            usage.update({name: value for name, value in reported.items() if value is not None})
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
    samples: dict[int, _Sample] = {}
    for event in events:
        answer.update({name: event[name] for name in ("id", "model", "usage") if event.get(name)})
        for choice in _list(event.get("choices")):
            if isinstance(choice, dict):
                samples.setdefault(choice.get("index") or 0, _Sample()).add(choice)
    chosen = [samples[index].choice(dialect) for index in sorted(samples)]
    return {**answer, "choices": chosen or [_Sample().choice(dialect)]}


class _Sample:
    """Answer of a chat or a completion, assembled from its deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": [], "text": []}
        self._calls: dict[int, Json] = {}
        self._finish: Any = None

    def add(self, choice: Json) -> None:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else choice
        for name, names in _DELTAS:
            text = next((delta[one] for one in names if isinstance(delta.get(one), str)), None)
            if text:
                self._texts[name].append(text)
        for call in _list(delta.get("tool_calls")):
            _add_call(self._calls, call)
        self._finish = choice.get("finish_reason") or self._finish

    def choice(self, dialect: Dialect) -> Json:
        joined = {name: "".join(texts) for name, texts in self._texts.items()}
        if dialect == "completions":
            return {"text": joined["text"], "finish_reason": self._finish}
        message: Json = {"role": "assistant", "content": joined["content"]}
        if joined["reasoning_content"]:
            message["reasoning_content"] = joined["reasoning_content"]
        if self._calls:
            message["tool_calls"] = [self._calls[number] for number in sorted(self._calls)]
        return {"message": message, "finish_reason": self._finish}


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
