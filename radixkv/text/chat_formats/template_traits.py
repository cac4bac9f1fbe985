# SPDX-License-Identifier: Apache-2.0
"""Traits of a chat template: its ways with tools, calls, results and reasoning, found by probes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.errors import InvalidRequestError

#: Names under which templates look for reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]
#: Where a template shows the tools: before the system prompt; after it, but before a second message of the
#: system; or in no place that messages could change.
ToolsPlace = Literal["first", "movable", "fixed"]
#: Renders messages, tools and further arguments of the template to text; raises InvalidRequestError.
RenderText = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], str]

_NAME, _VALUE, _RESULT, _THOUGHT, _SAID, _ID = (
    "probe_function",
    "probe_value",
    "probe_result",
    "probe_thought",
    "probe_said",
    "probe1234",
)


def probe_tool(name: str, names: Iterable[str]) -> Mapping[str, Any]:
    """Return a tool with arguments of these names, all of them text."""
    properties = {argument: {"type": "string", "description": "x"} for argument in names}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {
        "type": "function",
        "function": {"name": name, "description": "A probe.", "parameters": parameters},
    }


_TOOL = probe_tool(_NAME, ["probe_key"])
_OTHER = "probe_other"
_NO_FIELDS: Mapping[str, Any] = {}
_USER = {"role": "user", "content": "hello"}
_LATE = {"role": "system", "content": _RESULT}
_LATE_SYSTEM: Sequence[Sequence[Message]] = (
    (_USER, _LATE),
    (_USER, _LATE, {"role": "assistant", "content": "x"}, _USER),
    (_USER, {"role": "assistant", "content": "x"}, _LATE, _USER),
)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Parts of a conversation that a template shows to the model.

    Attributes:
        tools: it shows tools. `tools_option` is the argument that it takes them by; None: `tools`.
        calls: it shows the tool calls of earlier turns.
        arguments_as_text: it takes the arguments of calls as JSON text, not as objects.
        one_call: it takes a single call per message, and refuses or drops others.
        drops_content: it drops the content of a message with calls.
        system: it takes system messages.
        results: it shows messages of the role `tool`.
        reasoning_field: field of a message that it shows as reasoning in some turn; None: there is none.
        drops_reasoning: it leaves reasoning out of turns before the user's last message.
        late_system: it shows system messages after others.
        tools_place: where it shows the tools.
    """

    tools: bool = True
    tools_option: str | None = None
    calls: bool = True
    arguments_as_text: bool = False
    one_call: bool = False
    system: bool = True
    drops_content: bool = False
    results: bool = True
    reasoning_field: str | None = None
    drops_reasoning: bool = False
    late_system: bool = True
    tools_place: ToolsPlace = "fixed"


def find_traits(render: RenderText, tools_option: str | None) -> TemplateTraits:
    """Probe a template: about fifteen small renderings.

    Args:
        tools_option: an argument that the template may take tools by.
    """

    shown = functools.partial(shown_text, render)

    if not shown([_USER]):
        # What the template says against it, it shall say to the request.
        return TemplateTraits(tools_place=_tools_place(shown, None))
    tools = _NAME in shown([_USER], [_TOOL])
    option = None
    if not tools and tools_option is not None and _NAME in shown([_USER], [_TOOL], **{tools_option: [_TOOL]}):
        tools, option = True, tools_option
    arguments: Any = {"probe_key": _VALUE}
    history = shown(_history(arguments), [_TOOL])
    as_text = False
    if _VALUE not in history or str(arguments) in history:  # lost, or printed as Python
        as_json = json.dumps(arguments)
        text = shown(_history(as_json), [_TOOL])
        as_text = as_json in text or (_VALUE not in history and _VALUE in text)
        if as_text:
            arguments, history = as_json, text
    shows_calls = _NAME in history and _VALUE in history
    two = shown(_history(arguments, other=True), [_TOOL, probe_tool(_OTHER, ["probe_key"])])
    field = next(
        (
            field
            for field in REASONING_FIELDS
            for content, calls in (("", arguments), ("x", None))
            if _THOUGHT in shown(_history(calls, content, fields={field: _THOUGHT}), [_TOOL])
        ),
        None,
    )
    earlier = shown(_history(None, "x", fields={} if field is None else {field: _THOUGHT}))
    return TemplateTraits(
        tools=tools,
        tools_option=option,
        calls=shows_calls,
        arguments_as_text=as_text,
        one_call=shows_calls and two.count(_VALUE) < 2 * history.count(_VALUE),
        drops_content=shows_calls and _SAID not in shown(_history(arguments, _SAID), [_TOOL]),
        system=_SAID in shown([{"role": "system", "content": _SAID}, _USER]),
        results=_RESULT in (history or shown([_USER, {"role": "assistant", "content": "x"}, _result()])),
        reasoning_field=field,
        drops_reasoning=_THOUGHT not in earlier,
        late_system=all(_RESULT in shown(messages) for messages in _LATE_SYSTEM),
        tools_place=_tools_place(shown, option) if tools else "fixed",
    )


def _tools_place(shown: Callable[..., str], option: str | None) -> ToolsPlace:
    """Find the place of the tools beside one message of the system, and beside an empty one and another."""

    def with_tools(*texts: str) -> str:
        messages = [*map(_system, texts), _USER]
        return shown(messages, [_TOOL]) if option is None else shown(messages, **{option: [_TOOL]})

    usual = with_tools(_SAID)
    if usual.count(_SAID) != 1:
        return "fixed"
    if usual.rfind(_NAME) < usual.find(_SAID):
        return "first"
    before, said, after = with_tools("", _SAID).partition(_SAID)
    plain = shown([_system(_SAID), _system(_RESULT), _USER])
    to_system = plain.partition(_SAID)[2].partition(_RESULT)[0]
    to_user = plain.partition(_RESULT)[2].partition(_USER["content"])[0]
    is_own = bool(to_system) and to_system != to_user and before.endswith(to_system)
    return "movable" if said and is_own and _NAME in before and _NAME not in after else "fixed"


def render_probe(render: RenderText) -> str:
    """Return the rendering of a conversation with a tool and a call; empty: the template refuses it."""
    texts = (
        shown_text(render, _history(arguments), [_TOOL])
        for arguments in ({"probe_key": _VALUE}, '{"probe_key": "probe_value"}')
    )
    return next(filter(None, texts), "")


def shown_text(
    render: RenderText,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Return a rendering; empty: the template refuses the messages."""
    try:
        return render(messages, tools, options)
    except InvalidRequestError:
        return ""


def _history(
    arguments: Any, content: str = "", *, other: bool = False, fields: Mapping[str, Any] = _NO_FIELDS
) -> list[Message]:
    """A turn with a call, or with two, and its result; without arguments, one with an answer."""
    answer: Message = {"role": "assistant", "content": content, **fields}
    if arguments is None:
        return [_USER, answer, _USER]
    function = {"name": _NAME, "arguments": arguments}
    answer["tool_calls"] = [{"id": _ID, "type": "function", "function": function}]
    if other:
        second = {"id": "probe5678", "type": "function", "function": {**function, "name": _OTHER}}
        answer["tool_calls"].append(second)
    return [_USER, answer, _result()]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT}
