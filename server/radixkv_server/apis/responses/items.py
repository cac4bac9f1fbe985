# SPDX-License-Identifier: Apache-2.0
"""Items of a conversation: the forms that clients send, the stored plain form, and messages for templates.

An item has one plain form, whether a client sent it or the model wrote it, and only plain forms become
messages: a turn renders to the same tokens in every later turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from radixkv.images.image_parts import IMAGE_KINDS, image_data
from radixkv.text.json_text import read_json_text
from radixkv_server.apis.common.chat_messages import Media, TextPart, joined
from radixkv_server.apis.common.fields import TEXT_OR_LIST, Asynchronous, ByType, Caller
from radixkv_server.apis.common.returned_text import hide, unhide
from radixkv_server.apis.responses.configuration import UPDATE, ConfigurationItem
from radixkv_server.apis.responses.provider_items import ProviderItem, call_of, is_provider_item, result_of
from radixkv_server.apis.responses.tools import Called, Toolbox
from radixkv_server.chats.call_memory import Recall
from radixkv_server.chats.image_marks import Detail, ImageSource, has_marks, split_text, with_parts
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import NoOp, WithoutEffect

MAX_ID = 128
#: What this server hides as `encrypted_content` begins with it.
HIDDEN = "radixkv."

Id = Annotated[str, Field(max_length=MAX_ID)]


class _Item(StrictModel):
    id: Id | None = None
    status: str | None = None
    created_by: NoOp = None
    internal_chat_message_metadata_passthrough: NoOp = None


class InputPart(TextPart):
    KINDS: ClassVar = ("input_text", "output_text", "text", "refusal")

    file_id: Media = None
    file_data: Media = None
    file_url: Media = None
    filename: Media = None
    detail: Media = None


_Text = Annotated[str | Annotated[list[InputPart], FAIL_FAST], TEXT_OR_LIST]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text
    phase: Annotated[Any, WithoutEffect("templates know no phases of an answer")] = None

    def plain(self, item_id: str) -> Json:
        text = joined(self.content)
        return {
            "id": item_id,
            "type": "message",
            "role": self.role,
            "status": "completed",
            "content": [
                output_text(text) if self.role == "assistant" else {"type": "input_text", "text": text}
            ],
        }


class _CallItem(_Item):
    call_id: Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Annotated[str, Field(max_length=256)] | None = None
    async_: Asynchronous = None
    caller: Caller = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    arguments: str

    def plain(self, item_id: str) -> Json:
        called = Called(self.name, self.namespace)
        return function_call(item_id, self.call_id, called, self.arguments, "completed")


class CustomCallItem(_CallItem):
    type: Literal["custom_tool_call"]
    input: str

    def plain(self, item_id: str) -> Json:
        called = Called(self.name, self.namespace, is_custom=True)
        return custom_call(item_id, self.call_id, called, self.input, "completed")


class CallOutputItem(_Item):
    """Output of a function or custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: _Text
    caller: Caller = None
    name: NoOp = None
    namespace: NoOp = None

    def plain(self, item_id: str) -> Json:
        return {
            "id": item_id,
            "type": self.type,
            "call_id": self.call_id,
            "output": joined(self.output),
            "status": "completed",
        }


class ReasoningText(StrictModel):
    type: str | None = None
    text: str


class ReasoningItem(_Item):
    """Reasoning of the assistant: its content, or this server's `encrypted_content`.

    Summaries and texts encrypted by other providers are ignored.
    """

    type: Literal["reasoning"]
    summary: Any = None
    encrypted_content: Any = None
    content: Annotated[list[ReasoningText], FAIL_FAST] | None = None

    def plain(self, item_id: str) -> Json:
        text = "".join(part.text for part in self.content or ())
        return reasoning(item_id, text or unhide(self.encrypted_content, HIDDEN), "completed")


class CompactionItem(_Item):
    """A summary that this server wrote."""

    type: Literal["compaction"]
    encrypted_content: str

    @model_validator(mode="after")
    def _own(self) -> CompactionItem:
        if not self.encrypted_content.startswith(HIDDEN):
            raise ParamError(
                "a compaction item must be one of this server's: what another encrypted can't be read here.",
                "input",
            )
        return self

    def plain(self, item_id: str) -> Json:
        return compaction(item_id, unhide(self.encrypted_content, HIDDEN))


class ItemReference(_Item):
    type: Literal["item_reference"] | None = None
    id: Id


def _untyped(item: dict[str, Any]) -> str | None:
    return "message" if "role" in item else "item_reference" if "id" in item else None


InputItem = Annotated[
    MessageItem
    | FunctionCallItem
    | CustomCallItem
    | CallOutputItem
    | ReasoningItem
    | CompactionItem
    | ConfigurationItem
    | ProviderItem
    | ItemReference,
    ByType(
        "an item of the input",
        lambda kind, known: f"items of type {kind!r} are not supported: this server knows {known}.",
        untyped=_untyped,
    ),
]


# ---------------------------------------------------------------------- plain forms


def output_text(text: str, logprobs: list[Json] | None = None) -> Json:
    """Make a text part of the assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def message(item_id: str, content: list[Json], status: str) -> Json:
    """Make a message of the assistant."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning(item_id: str, text: str, status: str) -> Json:
    """Make a reasoning item."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def function_call(item_id: str, call_id: str, called: Called, arguments: str, status: str) -> Json:
    """Make a function call."""
    return _call("function_call", item_id, call_id, called, {"arguments": arguments}, status)


def custom_call(item_id: str, call_id: str, called: Called, text: str, status: str) -> Json:
    """Make a call of a custom tool."""
    return _call("custom_tool_call", item_id, call_id, called, {"input": text}, status)


def _call(kind: str, item_id: str, call_id: str, called: Called, given: Json, status: str) -> Json:
    call = {"id": item_id, "type": kind, "call_id": call_id, "name": called.name, **given, "status": status}
    return call if called.namespace is None else {**call, "namespace": called.namespace}


def compaction(item_id: str, summary: str) -> Json:
    """Make the item that replaces a part of a conversation by its summary."""
    return {"id": item_id, "type": "compaction", "encrypted_content": hide(summary, HIDDEN)}


_SCREENSHOT = "computer_screenshot"
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def item_id(owner_id: str, kind: str, number: int) -> str:
    """Return the id of an item of a response or a conversation; it names its owner."""
    return f"{PREFIXES.get(kind, 'item')}_{owner_id.partition('_')[2]}_{number}"


def owner_of(item: str, prefix: str) -> str:
    """Return the id of the response (`resp_`) or conversation (`conv_`) in an id made by `item_id`."""
    return prefix + item.partition("_")[2].partition("_")[0]


def comparable_item(item: Json) -> Json:
    """Return an item without the fields that change between an answer and its repetition by a client."""
    plain = {name: value for name, value in item.items() if name not in ("id", "status")}
    if isinstance(plain.get("content"), list):
        plain["content"] = [{"type": part["type"], "text": part["text"]} for part in plain["content"]]
    return plain


def summaries_in(items: Iterable[Json]) -> list[Json]:
    """Return the items that replace a part of the conversation."""
    return [item for item in items if item["type"] == "compaction"]


# ---------------------------------------------------------------------- messages


def with_images(item: Json, sources: Mapping[str, ImageSource]) -> Json:
    """Return a plain item with a part of its own for each image whose mark its text has."""
    output = item.get("output")
    if isinstance(output, dict):  # a screenshot
        (screenshot,) = with_parts([output], sources, _input_text, _screenshot)
        return item if screenshot is output else {**item, "output": screenshot}
    if has_marks(item.get("result")):  # a generated image: its data alone
        ((key, _),) = split_text(item["result"])
        return {**item, "result": sources[key].data}
    for name, image_part in (("content", _input_image), ("output", _input_image), ("outputs", _output_image)):
        content = with_parts(item.get(name), sources, _input_text, image_part)
        if content is not item.get(name):
            item = {**item, name: content}
    return item


def _input_text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def _input_image(source: ImageSource) -> Json:
    return {"type": "input_image", "image_url": source.data, "detail": source.detail}


def _output_image(source: ImageSource) -> Json:
    return {"type": "image", "url": source.data}


def _screenshot(source: ImageSource) -> Json:
    return {**_input_image(source), "type": _SCREENSHOT}


def with_marks(item: Json, sources: dict[str, ImageSource]) -> Json:
    """Return a plain item with marks in place of its images, which `sources` gets by their keys."""
    output = item.get("output")
    if isinstance(output, dict):
        return {**item, "output": _marked(output, sources)}
    if item["type"] == "image_generation_call" and not str(item.get("result") or "[").startswith("["):
        return {**item, "result": _marked({"type": "image", "data": item["result"]}, sources)["text"]}
    for name in ("content", "output", "outputs"):
        parts = item.get(name)
        if isinstance(parts, list) and any(map(_is_image, parts)):
            item = {**item, name: [_marked(part, sources) for part in parts]}
    return item


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS


def _marked(part: Any, sources: dict[str, ImageSource]) -> Any:
    found = image_data(part) if _is_image(part) else None
    if found is None:
        return part
    source = ImageSource(found.data, cast(Detail, found.detail), "input")
    return _input_text(sources.setdefault(source.key, source).mark)


def _text_of(content: str | Iterable[Json]) -> str:
    """Return the text of a message or an output: its parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def messages_of(
    instructions: str | None, items: Iterable[Json], tools: Toolbox, recall: Recall
) -> tuple[list[Json], list[int]]:
    """Return a conversation as messages for chat templates, and the message index of each item.

    Reasoning, text and calls of one turn of the assistant become one message.

    Args:
        tools: names of called tools in the prompt.
        recall: finds the arguments of custom tools as the model wrote them.

    Raises:
        ApiError: 400; the arguments of a function call are not JSON.
    """
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    places: list[int] = []
    turn: Json | None = None  # of the assistant, as long as it goes on
    for item in items:
        kind = item["type"]
        if kind in ("function_call_output", "custom_tool_call_output"):
            turn = None
            output = {"role": "tool", "content": _text_of(item["output"]), "tool_call_id": item["call_id"]}
            messages.append(output)
        elif kind == UPDATE:
            pass  # see `configuration`
        elif is_provider_item(item):
            call, result = call_of(item), result_of(item)
            if call is not None:
                if turn is None:
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                turn.setdefault("tool_calls", []).append(call)
            if result is not None:
                turn = None
                messages.append(result)
        elif kind == "compaction":
            turn = None
            messages.append({"role": "assistant", "content": unhide(item["encrypted_content"], HIDDEN)})
        elif kind == "message" and item["role"] != "assistant":
            turn = None
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text_of(item["content"])})
        else:
            if turn is None or not _continues(turn, kind):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item, tools, recall)
        places.append(len(messages) - 1)
    return messages, places


def _continues(turn: Json, kind: str) -> bool:
    """Return whether an item continues the assistant's message: reasoning, then text, then calls."""
    if kind in ("function_call", "custom_tool_call"):
        return True
    return "tool_calls" not in turn and not turn["content"] and (kind == "message" or len(turn) == 2)


def _add_to_turn(turn: Json, item: Json, tools: Toolbox, recall: Recall) -> None:
    if item["type"] == "message":
        turn["content"] = "".join(part["text"] for part in item["content"])
    elif item["type"] == "reasoning":
        turn["reasoning_content"] = "".join(part["text"] for part in item["content"])
    else:
        called = {"name": tools.name(item["name"], item.get("namespace")), "arguments": _given(item, recall)}
        call = {"id": item["call_id"], "type": "function", "function": called}
        turn.setdefault("tool_calls", []).append(call)


def _given(item: Json, recall: Recall) -> Any:
    """Return the arguments of a call."""
    if item["type"] == "custom_tool_call":
        return recall(item["call_id"], {"input": item["input"]})
    try:
        return read_json_text(item["arguments"] or "{}", may_be_cut=True)
    except (ValueError, RecursionError):
        text = f"The arguments of the function call {item['name'][:64]!r} are not JSON."
        raise bad_request(text, param="input") from None
