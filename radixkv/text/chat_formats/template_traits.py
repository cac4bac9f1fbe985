"""What a chat template does with tools, calls, results and reasoning, found by rendering probes once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequestError

#: Names under which templates look for what an assistant has thought.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]
#: Renders messages, tools and further arguments of the template to text; raises InvalidRequestError.
RenderText = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], str]

_NAME, _VALUE, _RESULT, _THOUGHT, _ID = (
    "probe_function",
    "probe_value",
    "probe_result",
    "probe_thought",
    "probe1234",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "x"}}},
    },
}
_USER = {"role": "user", "content": "hello"}
_LATE = {"role": "system", "content": _RESULT}
_LATE_SYSTEM: Sequence[Sequence[Message]] = (
    (_USER, _LATE),
    (_USER, _LATE, {"role": "assistant", "content": "x"}, _USER),
    (_USER, {"role": "assistant", "content": "x"}, _LATE, _USER),
)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template shows to the model.

    Attributes:
        tools: it shows tools. `tools_option` is the argument that they must be given by; None: `tools`.
        calls: it shows the tool calls of earlier turns.
        arguments_as_text: it takes the arguments of calls as JSON text, not as objects.
        results: it shows messages of the role `tool`.
        reasoning_field: the field of a message that it shows as reasoning, in some turn; None: in none.
        late_system: it shows messages of the system after others.
    """

    tools: bool = True
    tools_option: str | None = None
    calls: bool = True
    arguments_as_text: bool = False
    results: bool = True
    reasoning_field: str | None = None
    late_system: bool = True


def find_traits(render: RenderText, tools_option: str | None) -> TemplateTraits:
    """Probe a template: about ten small renderings.

    Args:
        tools_option: an argument that the template may take tools by.
    """

    def shown(
        messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        try:
            return render(messages, tools, options)
        except InvalidRequestError:
            return ""

    if not shown([_USER]):
        return TemplateTraits()  # what the template says against it, it shall say to the request
    tools = _NAME in shown([_USER], [_TOOL])
    option = None
    if not tools and tools_option is not None and _NAME in shown([_USER], [_TOOL], **{tools_option: [_TOOL]}):
        tools, option = True, tools_option
    arguments: Any = {"probe_key": _VALUE}
    history = shown(_history(arguments), [_TOOL])
    as_text = _VALUE not in history and _VALUE in shown(_history('{"probe_key": "probe_value"}'), [_TOOL])
    if as_text:
        arguments = '{"probe_key": "probe_value"}'
        history = shown(_history(arguments), [_TOOL])
    return TemplateTraits(
        tools=tools,
        tools_option=option,
        calls=_NAME in history and _VALUE in history,
        arguments_as_text=as_text,
        results=_RESULT in (history or shown([_USER, {"role": "assistant", "content": "x"}, _result()])),
        reasoning_field=next(
            (
                field
                for field in REASONING_FIELDS
                for content, calls in (("", arguments), ("x", None))
                if _THOUGHT in shown(_history(calls, content, **{field: _THOUGHT}), [_TOOL])
            ),
            None,
        ),
        late_system=all(_RESULT in shown(messages) for messages in _LATE_SYSTEM),
    )


def render_probe(render: RenderText) -> str:
    """Return what a template makes of a conversation with a tool and a call; empty: it refuses them."""
    for arguments in ({"probe_key": _VALUE}, '{"probe_key": "probe_value"}'):
        try:
            return render(_history(arguments), [_TOOL], {})
        except InvalidRequestError:
            continue
    return ""


def _history(arguments: Any, content: str = "", **fields: Any) -> list[Message]:
    """A turn with a call and its result; without arguments, one with an answer."""
    answer: Message = {"role": "assistant", "content": content, **fields}
    if arguments is None:
        return [_USER, answer, _USER]
    function = {"name": _NAME, "arguments": arguments}
    answer["tool_calls"] = [{"id": _ID, "type": "function", "function": function}]
    return [_USER, answer, _result()]


def _result() -> Message:
    return {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT}
