# SPDX-License-Identifier: Apache-2.0
"""Context management: edits, requested by the client, that shorten a conversation before it is rendered.

clear_thinking_20251015     leave out thinking of all but the last turns that have any
clear_tool_uses_20250919    replace old tool results by a placeholder and, on request, inputs by `{}`

The client goes on sending the whole conversation, so that the edits apply to every request. Nothing here
renders or counts: `ContextEdits` calls a function of its caller for a conversation's token count, and only
where an edit depends on the count or changes something.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from radixkv_server.apis.anthropic.blocks import (
    InputMessage,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from radixkv_server.apis.common.fields import ByType
from radixkv_server.dialect import Json
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel

#: Content of a cleared tool result.
PLACEHOLDER = "[cleared]"

MAX_EDITS = 16
# Anthropic's defaults.
TRIGGER_TOKENS = 100_000
KEPT_TOOL_USES = 3
KEPT_THINKING_TURNS = 1

_THINKING = "clear_thinking_20251015"

#: How many tokens of prompt a conversation makes.
Count = Callable[[Sequence[InputMessage]], Awaitable[int]]


class _InputTokens(StrictModel):
    type: Literal["input_tokens"]
    value: Annotated[int, Field(ge=0)]


class _ToolUses(StrictModel):
    type: Literal["tool_uses"]
    value: Annotated[int, Field(ge=0)]


class _ThinkingTurns(StrictModel):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class _All(StrictModel):
    type: Literal["all"]


def _text_or_type(value: Any) -> str:
    if isinstance(value, str):
        return "[text]"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]"


class ClearThinking(StrictModel):
    """Leave the thinking of older turns out.

    A turn is all that the assistant says after one message of the user's, calls of tools and what follows
    their results included.
    """

    type: Literal["clear_thinking_20251015"]
    keep: (
        Annotated[
            Annotated[Literal["all"], Tag("[text]")]
            | Annotated[_All, Tag("[all]")]
            | Annotated[_ThinkingTurns, Tag("[thinking_turns]")],
            Discriminator(_text_or_type),
        ]
        | None
    ) = None

    @property
    def kept_turns(self) -> int | None:
        """Number of turns that keep their thinking; None: all."""
        if self.keep is None:
            return KEPT_THINKING_TURNS
        return self.keep.value if isinstance(self.keep, _ThinkingTurns) else None

    def edit(self, messages: Sequence[InputMessage]) -> tuple[list[InputMessage], int]:
        """Return the messages, and the number of turns without their thinking. O(blocks)."""
        turns: list[list[int]] = []
        is_new = True
        for index, message in enumerate(messages):
            if message.role == "user":
                is_new = is_new or not any(isinstance(block, ToolResultBlock) for block in message.blocks)
            elif message.role == "assistant":
                if is_new:
                    turns.append([])
                is_new = False
                if any(_is_thinking(block) for block in message.blocks):
                    turns[-1].append(index)
        thinking = [turn for turn in turns if turn]
        kept = self.kept_turns
        cleared = [] if kept is None else thinking[: max(0, len(thinking) - kept)]
        edited = list(messages)
        for index in (index for turn in cleared for index in turn):
            edited[index] = _with_blocks(
                messages[index], [block for block in messages[index].blocks if not _is_thinking(block)]
            )
        return edited, len(cleared)

    async def apply(
        self, messages: Sequence[InputMessage], count: Count
    ) -> tuple[Sequence[InputMessage], Json | None]:
        """Return the messages after this edit, and a report on it; None: it changed nothing."""
        edited, turns = self.edit(messages)
        if not turns:
            return messages, None
        tokens = max(0, await count(messages) - await count(edited))
        return edited, {"type": self.type, "cleared_thinking_turns": turns, "cleared_input_tokens": tokens}


_TRIGGER = ByType("trigger", lambda kind, known: f"trigger: there is no type {kind!r}, only {known}.")


class ClearToolUses(StrictModel):
    """Clear the results of older tool calls.

    Args:
        trigger: limit beyond which the edit applies.
        keep: number of latest results that stay.
        clear_at_least: fewest tokens to clear; the edit is skipped if it would clear fewer.
        exclude_tools: tools whose results stay.
        clear_tool_inputs: also clear the inputs of calls, of all tools or of these.
    """

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[_InputTokens | _ToolUses, _TRIGGER] | None = None
    keep: _ToolUses | None = None
    clear_at_least: _InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: (
        Annotated[
            Annotated[bool, Tag("[bool]")] | Annotated[list[str], Tag("[names]")],
            Discriminator(lambda value: "[names]" if isinstance(value, list) else "[bool]"),
        ]
        | None
    ) = None

    def edit(self, messages: Sequence[InputMessage]) -> tuple[list[InputMessage], int]:
        """Return the messages, and the number of cleared results, ignoring the trigger. O(blocks)."""
        names = {block.id: block.name for block in _calls(messages)}
        results = [
            block.tool_use_id
            for message in messages
            for block in message.blocks
            if isinstance(block, ToolResultBlock)
        ]
        kept = KEPT_TOOL_USES if self.keep is None else self.keep.value
        excluded = set(self.exclude_tools or ())
        cleared = {
            call_id
            for call_id in results[: max(0, len(results) - kept)]
            if names.get(call_id) not in excluded
        }

        def clear(block: Any) -> Any:
            if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
                return block.model_copy(update={"content": PLACEHOLDER})
            if isinstance(block, ToolUseBlock) and block.id in cleared and self._clears_input(block.name):
                return block.model_copy(update={"input": {}})
            return block

        edited = [
            _with_blocks(message, [clear(block) for block in message.blocks])
            if any(_call_id(block) in cleared for block in message.blocks)
            else message
            for message in messages
        ]
        return edited, len(cleared)

    async def apply(
        self, messages: Sequence[InputMessage], count: Count
    ) -> tuple[Sequence[InputMessage], Json | None]:
        """Return the messages after this edit, and a report on it; None: it changed nothing."""
        if isinstance(self.trigger, _ToolUses) and len(_calls(messages)) <= self.trigger.value:
            return messages, None
        edited, uses = self.edit(messages)
        if not uses:
            return messages, None
        before = await count(messages)
        if before <= self._trigger_tokens:
            return messages, None
        tokens = max(0, before - await count(edited))
        if self.clear_at_least is not None and tokens < self.clear_at_least.value:
            return messages, None
        return edited, {"type": self.type, "cleared_tool_uses": uses, "cleared_input_tokens": tokens}

    @property
    def _trigger_tokens(self) -> int:
        """Largest prompt, in tokens, that the edit leaves unchanged."""
        if self.trigger is None:
            return TRIGGER_TOKENS
        return self.trigger.value if isinstance(self.trigger, _InputTokens) else 0

    def _clears_input(self, name: str) -> bool:
        wanted = self.clear_tool_inputs
        return name in wanted if isinstance(wanted, list) else bool(wanted)


_EDIT = ByType(
    "an edit of context_management",
    lambda kind, known: (
        f"context_management.edits: {kind!r} is not supported by this server, which knows {known}."
    ),
)


class ContextEdits(StrictModel):
    """`context_management` of a body: edits, which are applied in order."""

    edits: (
        Annotated[
            list[Annotated[ClearThinking | ClearToolUses, _EDIT]], Field(max_length=MAX_EDITS), FAIL_FAST
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _thinking_first(self) -> ContextEdits:
        kinds = [edit.type for edit in self.edits or ()]
        if _THINKING in kinds[1:]:
            message = f"context_management.edits: {_THINKING} must be the first edit, and given once."
            raise ParamError(message, "context_management")
        return self

    async def apply(
        self, messages: Sequence[InputMessage], count: Count
    ) -> tuple[Sequence[InputMessage], list[Json]]:
        """Return the messages after all edits, and reports of the edits that changed something.

        Args:
            count: counts a conversation's tokens; called at most twice per edit.
        """
        applied = []
        for edit in self.edits or ():
            messages, edited = await edit.apply(messages, count)
            if edited is not None:
                applied.append(edited)
        return messages, applied


def _is_thinking(block: Any) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)


def _calls(messages: Sequence[InputMessage]) -> list[ToolUseBlock]:
    return [block for message in messages for block in message.blocks if isinstance(block, ToolUseBlock)]


def _call_id(block: Any) -> str | None:
    """Return the id of the call that a block makes or answers."""
    if isinstance(block, ToolUseBlock):
        return block.id
    return block.tool_use_id if isinstance(block, ToolResultBlock) else None


def _with_blocks(message: InputMessage, blocks: list[Any]) -> InputMessage:
    return message.model_copy(update={"content": blocks})
