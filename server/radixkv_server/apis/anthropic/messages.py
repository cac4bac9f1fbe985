# SPDX-License-Identifier: Apache-2.0
"""Conversion of content blocks to the plain messages of chat templates, with places of breakpoints.

system (string or blocks)           one system message
texts of a user                     one user message, joined by line breaks
documents, search results           texts
tool_result                         a message of the tool's
tool_reference, tool_addition       the definition of a tool, as text
compaction                          a user message, before which all is left out
assistant: text                     content, joined as it is
           thinking                 reasoning_content
           server_tool_use, ...     tool_calls, and its result a message of the tool's
           tool_use                 tool_calls, their arguments as they were written where that is known
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from radixkv_server.apis.anthropic.blocks import (
    CompactionBlock,
    DocumentBlock,
    InputMessage,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from radixkv_server.apis.anthropic.schemas import CountTokensRequest
from radixkv_server.apis.anthropic.tools import AnthropicTool, KnownTool, client_tools, tool_text
from radixkv_server.apis.common.returned_text import hide, unhide
from radixkv_server.chats.breakpoints import Breakpoint, CacheControl
from radixkv_server.chats.call_memory import Recall
from radixkv_server.chats.chat import Message

_HIDDEN = "radixkv-thinking."
_SUMMARY = "What was said before, in short:"
_LOADED = "From now on this function can be called:"
_REMOVED = "From now on this function can't be called:"


def _rendered(messages: Sequence[InputMessage]) -> list[InputMessage]:
    """Return the messages to render: from the latest summary on, without those for an earlier turn."""
    shown = list(messages)
    for index, message in enumerate(messages):
        for at, block in enumerate(message.blocks):
            if isinstance(block, CompactionBlock) and block.content is not None:
                rest = message.model_copy(update={"content": message.blocks[at:]})
                shown = [rest, *messages[index + 1 :]]
    last = max((at for at, message in enumerate(shown) if message.role == "user"), default=0)
    return [
        message for at, message in enumerate(shown) if message.clear_at != "next_user_message" or at > last
    ]


def signature_of(thinking: str, *, hidden: bool) -> str:
    """Return a thinking block's signature: a digest, or the encoded text where the block hides it."""
    if hidden:
        return hide(thinking, _HIDDEN)
    return "radixkv." + hashlib.sha256(thinking.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(slots=True)
class Conversation:
    """A body's system and messages in the form of chat templates, with its breakpoints."""

    messages: list[Message] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)
    _last: Breakpoint | None = None  # after the latest block that can have one
    _names: dict[str, str] = field(default_factory=dict)
    _tools: dict[str, AnthropicTool | KnownTool] = field(default_factory=dict)

    def convert(self, body: CountTokensRequest, recall: Recall) -> list[Message]:
        """Convert a body's messages, replacing all earlier state. O(text)."""
        self.messages, self.breakpoints, self._names = [], [], {}
        self._last = None
        for index, tool in enumerate(body.listed_tools):
            self._last = Breakpoint(0.0, tool=index)
            if tool.cache_control is not None:
                self.breakpoints.append(replace(self._last, ttl=tool.cache_control.seconds))
        self._tools = {tool.name: tool for tool in (*client_tools(body.tools or ()), *body.added_tools)}
        if isinstance(body.system, str):
            if body.system:
                self._add_text("system", body.system, None)
        else:
            for block in body.system or ():
                self._add_text("system", block.text, block.cache_control)
        for message in _rendered(body.messages):
            self._add(message, recall)
        if body.cache_control is not None and self._last is not None:
            automatic = replace(self._last, ttl=body.cache_control.seconds)
            if automatic not in self.breakpoints:
                self.breakpoints.append(automatic)
        return self.messages

    def _add(self, message: InputMessage, recall: Recall) -> None:
        for block in message.blocks:
            if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
                self._add_text(message.role, block.text, block.cache_control)
            elif isinstance(block, ThinkingBlock):
                self._think(block.thinking or unhide(block.signature, _HIDDEN))
            elif isinstance(block, RedactedThinkingBlock):
                self._think(unhide(block.data, _HIDDEN))
            elif isinstance(block, ToolUseBlock | ServerToolUseBlock):
                self._call(block, recall)
            elif isinstance(block, ServerToolResultBlock):
                self.messages.append(self._result_message(block.tool_use_id, block.text))
                self._keep(block.cache_control)
            elif isinstance(block, ToolResultBlock):
                self._result(block)
            elif isinstance(block, CompactionBlock) and block.content is not None:
                self._add_text("user", f"{_SUMMARY}\n{block.content}", block.cache_control)
            elif isinstance(block, ToolAdditionBlock | ToolRemovalBlock) and (text := self._change(block)):
                self._add_text(message.role, text, block.cache_control)

    def _last_of(self, role: str) -> Message | None:
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == role else None

    def _assistant(self) -> Message:
        message = self._last_of("assistant")
        if message is None:
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
        return message

    def _add_text(self, role: str, text: str, control: CacheControl | None) -> None:
        if role == "assistant":
            self._assistant()["content"] += text
        else:
            before = self._last_of(role)
            if before is None:
                self.messages.append({"role": role, "content": text})
            else:
                before["content"] += "\n" + text
        if text:
            self._keep(control)

    def _think(self, text: str) -> None:
        if text:
            message = self._assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _result_message(self, call_id: str, text: str) -> Message:
        message = {"role": "tool", "tool_call_id": call_id}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        return {**message, "content": text}

    def _call(self, block: ToolUseBlock | ServerToolUseBlock, recall: Recall) -> None:
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": recall(block.id, block.input)}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": block.id, "type": "function", "function": function})
        self._keep(block.cache_control, in_call=True)

    def _result(self, block: ToolResultBlock) -> None:
        parts = block.content or ""
        breakpoints = []
        texts = [parts] if isinstance(parts, str) else [self._text_of(part) for part in parts]
        lead = "Error: " if block.is_error else ""
        self.messages.append(self._result_message(block.tool_use_id, lead + "\n".join(texts)))
        if not isinstance(parts, str):
            end = len(lead) - 1
            for part, text in zip(parts, texts, strict=True):
                end += 1 + len(text)
                if part.cache_control is not None:
                    breakpoints.append(
                        Breakpoint(part.cache_control.seconds, message=len(self.messages) - 1, chars=end)
                    )
        self.breakpoints += breakpoints
        self._keep(block.cache_control)

    def _text_of(self, part: Any) -> str:
        """Return the model's text for a part of a tool result."""
        return self._loaded(part.tool_name) if isinstance(part, ToolReferenceBlock) else str(part.text)

    def _loaded(self, name: str) -> str:
        tool = self._tools.get(name)
        return f"There is no tool {name}." if tool is None else f"{_LOADED}\n{tool_text(tool)}"

    def _change(self, block: ToolAdditionBlock | ToolRemovalBlock) -> str:
        changed = block.tool
        if isinstance(changed, ToolDefinition):
            tools = client_tools([changed.definition])
            return f"{_LOADED}\n{tool_text(tools[0])}" if tools else ""
        return (
            self._loaded(changed.name)
            if isinstance(block, ToolAdditionBlock)
            else f"{_REMOVED} {changed.name}"
        )

    def _keep(self, control: CacheControl | None, *, in_call: bool = False) -> None:
        """Add a breakpoint, if requested, after the last added block, which must be cacheable."""
        at = len(self.messages) - 1
        message = self.messages[at]
        if in_call:
            self._last = Breakpoint(0.0, message=at, call=len(message["tool_calls"]) - 1)
        else:
            self._last = Breakpoint(0.0, message=at, chars=len(message["content"]))
        if control is not None:
            self.breakpoints.append(replace(self._last, ttl=control.seconds))
