# SPDX-License-Identifier: Apache-2.0
"""Input of a chat template: messages and tools in the form that it knows, and the variables of thinking.

Nothing of tools, calls and results may vanish. Where the template shows them, it gets them in the form that
it takes; where it does not, they are written into the texts of the messages as the model's family does.

Requests turn thinking on or off, name an effort, or give a budget of tokens. Templates know some of these,
under names and values of their own: `enable_thinking`, `thinking_mode="disabled"`,
`reasoning_effort="no_think"`, ... Rendering probes once finds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.template_traits import REASONING_FIELDS, Message, TemplateTraits
from radixkv.text.json_text import JsonText

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: Variables that turn thinking off and on, with their values for it.
_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_option": ("off", "on"),
}
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_BUDGET = "thinking_budget"
#: Values that mean `none`, the most usual first.
_NO_EFFORTS = ("none", "no_think", "minimal", "low")
#: Levels of templates that print any value.
_USUAL = ("low", "medium", "high")
_PROBE = "probe_level"


@dataclass(frozen=True, slots=True)
class Thinking:
    """A request's wishes about thinking.

    Args:
        enabled: turn it on or off; None: as the effort says, or as the template has it.
        effort: one of `LEVELS`, or a level of the template's own.
        budget: most tokens of thought.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """The variables by which a template is told how to think.

    Attributes:
        switch: a variable with its values for off and on; None: the template has none.
        is_off: the template does not think unless it is told to.
        effort: a variable for the effort; None: the template knows no levels.
        levels: level -> the template's value for it; levels that it does not know have the nearest one.
        has_budget: it reads `thinking_budget`.
    """

    switch: tuple[str, Any, Any] | None = None
    is_off: bool = False
    effort: str | None = None
    levels: Mapping[str, str] = field(default_factory=dict)
    has_budget: bool = False

    @property
    def can_think(self) -> bool:
        """Return True if a request can change how the model thinks."""
        return self.switch is not None or self.effort is not None or self.has_budget

    def variables(self, wanted: Thinking) -> dict[str, Any]:
        """Return the variables that tell the template these wishes."""
        told: dict[str, Any] = {}
        enabled, level = wanted.enabled, wanted.effort
        if enabled is None and level is not None:
            # A template that thinks by itself need not be told to.
            enabled = False if level == "none" else self.is_off or None
        if self.switch is not None and enabled is not None:
            name, off, on = self.switch
            told[name] = on if enabled else off
        if enabled is False:
            level = "none" if self.switch is None else None
        elif enabled and level is None and self.is_off and self.switch is None:
            level = "medium"
        if self.effort is not None and level is not None and (value := self.levels.get(level, level)):
            told[self.effort] = value
        if self.has_budget and (enabled is False or wanted.budget is not None):
            told[_BUDGET] = 0 if enabled is False else wanted.budget
        return told

    def unheeded(self, wanted: Thinking) -> list[str]:
        """Return the wishes that change nothing with this template, in words."""
        told = self.variables(wanted)
        lost = []
        if wanted.enabled is not None and not told and not (wanted.enabled and self.can_think):
            lost.append("thinking (the chat template can't switch it)")
        if wanted.effort is not None and self.effort is None and not (wanted.effort == "none" and told):
            lost.append("effort of thinking (the chat template knows no levels)")
        if wanted.budget is not None and _BUDGET not in told:
            lost.append("budget of thinking (the chat template reads none)")
        return lost


def find_switch(render: Callable[[Mapping[str, Any]], str], source: str | None) -> ThinkingSwitch:
    """Probe a template by small renderings.

    Args:
        render: a short chat with these variables, as text; raises InvalidRequestError.
        source: the template, whose words say which variables need no probe; None: all are tried.
    """

    def shown(**variables: Any) -> str | None:
        try:
            return render(variables)
        except InvalidRequestError:
            return None

    def is_named(name: str) -> bool:
        return source is None or re.search(rf"\b{name}\b", source) is not None

    default = shown()
    if default is None:
        return ThinkingSwitch()
    switch, off_text = None, None
    for name, (off, on) in _SWITCHES.items():
        texts = [shown(**{name: off}), shown(**{name: on})] if is_named(name) else [None, None]
        if None not in texts and texts[0] != texts[1]:
            switch, off_text = (name, off, on), texts[0]
            break
    on = {} if switch is None else {switch[0]: switch[2]}
    effort, levels = None, {}
    for name in filter(is_named, _EFFORTS):
        found = {level: shown(**on, **{name: level}) for level in (*LEVELS, *_NO_EFFORTS, _PROBE)}
        if len({text for text in found.values() if text is not None}) > 1:
            effort, levels = name, _levels(found)
            break
    if switch is None and effort is not None and (lowest := levels.get("none")):
        off_text = shown(**{effort: lowest})
    budget_texts = [shown(**{_BUDGET: budget}) for budget in (0, 1024)] if is_named(_BUDGET) else []
    return ThinkingSwitch(switch, default == off_text, effort, levels, len(set(budget_texts)) > 1)


def _levels(found: Mapping[str, str | None]) -> dict[str, str]:
    """Return the value that a template takes for each level.

    Args:
        found: value -> the template's rendering; None: it refuses the value.
    """
    printed = found[_PROBE]
    prints_any = printed is not None and _PROBE in printed
    known: Sequence[str] = (
        _USUAL if prints_any else [level for level in LEVELS[1:] if found[level] is not None]
    )
    if not known:
        return {}
    highest = found[max(known, key=LEVELS.index)]
    lowest = [level for level in _NO_EFFORTS if found[level] is not None and found[level] != highest]
    none = "low" if prints_any else next(iter(lowest), "")

    def nearest(level: str) -> str:
        rank = LEVELS.index(level)
        return min(known, key=lambda other: (abs(LEVELS.index(other) - rank), -LEVELS.index(other)))

    return {"none": none, **{level: nearest(level) for level in LEVELS[1:]}}


_NUMBERED = re.compile(r"functions\.[\w.\-]+:\d+")


def template_tools(
    tools: Sequence[Mapping[str, Any]], chat_format: ChatFormat, traits: TemplateTraits
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the tools that the template is given as such, and further arguments for it."""
    if not tools or (chat_format.forms and not traits.tools):
        return (), {}
    return (tools, {}) if traits.tools_option is None else ((), {traits.tools_option: list(tools)})


def template_messages(
    messages: Iterable[Message],
    tools: Sequence[Mapping[str, Any]],
    chat_format: ChatFormat,
    traits: TemplateTraits,
    *,
    tools_first: bool = False,
) -> list[Message]:
    """Return messages in OpenAI's form, arguments of calls as objects, as the template must get them.

    Args:
        tools: the tools on offer.
        tools_first: show them before the system prompt, where that can be (`can_show_tools_first`).
    """
    if not traits.late_system:
        messages = _with_one_system(messages)
    if tools and tools_first and traits.tools_place == "movable":
        messages = _with_empty_system(list(messages))
    if not chat_format.forms:
        return list(messages)
    if traits.calls and traits.one_call:
        messages = _with_one_call_each(messages)
    if chat_format.numbers_ids:
        messages = _with_numbered_ids(messages)
    prepared = [_prepared(message, chat_format, traits) for message in messages]
    if tools and not traits.tools:
        prepared = _with_preamble(prepared, chat_format.write_preamble(tools), first=tools_first)
        if not traits.system:
            prepared = _without_system(prepared)
    return prepared


def can_show_tools_first(chat_format: ChatFormat, traits: TemplateTraits) -> bool:
    """Return whether tools that would be shown after the system prompt can be shown before it."""
    return traits.tools_place == "movable" if traits.tools else bool(chat_format.forms)


def _with_one_call_each(messages: Iterable[Message]) -> list[Message]:
    """Each call in a message of its own, with its result after it.

    Templates that show one call of a message refuse the others, or drop them.
    """
    divided: list[Message] = []
    waiting: list[Message] = []  # messages of calls, and their results so far
    results: list[Message] = []

    def pair_results() -> None:
        for message in waiting:
            at = next((i for i, result in enumerate(results) if _calls_for(message, result)), None)
            divided.extend([message] if at is None else [message, results.pop(at)])
        divided.extend(results)
        waiting.clear()
        results.clear()

    for message in messages:
        if message.get("role") == "tool" and waiting:
            results.append(message)
            continue
        pair_results()
        calls = list(message.get("tool_calls") or ())
        if message.get("role") == "assistant" and len(calls) > 1:
            waiting.append({**message, "tool_calls": [calls[0]]})
            others = {"role": "assistant", "content": ""}
            waiting.extend({**others, "tool_calls": [call]} for call in calls[1:])
        else:
            divided.append(message)
    pair_results()
    return divided


def _calls_for(message: Message, result: Message) -> bool:
    """Return whether a message's only call is the one that a result belongs to."""
    return message["tool_calls"][0].get("id") == result.get("tool_call_id")


def _with_numbered_ids(messages: Iterable[Message]) -> list[Message]:
    """Ids of calls as Kimi K2 has them, `functions.NAME:N`, counted through the conversation."""
    known: dict[Any, str] = {}
    numbered: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            given, name = call.get("id"), call["function"]["name"]
            is_own = isinstance(given, str) and _NUMBERED.fullmatch(given) is not None
            known[given] = given if is_own else f"functions.{name}:{len(known)}"
            calls.append({**call, "id": known[given]})
        if calls:
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and message.get("tool_call_id") in known:
            message = {**message, "tool_call_id": known[message["tool_call_id"]]}
        numbered.append(message)
    return numbered


def _without_system(messages: list[Message]) -> list[Message]:
    """The system's text in front of the user's first; the user's messages in a row as one."""
    merged: list[Message] = []
    for message in messages:
        role = "user" if message.get("role") == "system" else message.get("role")
        before = merged[-1] if merged else {}
        texts = (before.get("content"), message.get("content"))
        if role == before.get("role") == "user" and all(isinstance(text, str) for text in texts):
            merged[-1] = {**before, "content": "\n\n".join(map(str, texts))}
        else:
            merged.append({**message, "role": role})
    return merged


def _with_one_system(messages: Iterable[Message]) -> list[Message]:
    """Messages of the system after others become the user's, as parts of those before or after them.

    Templates that refuse them, or drop them, mostly want the roles to take turns, too.
    """
    merged: list[Message] = []
    is_late = False
    for message in messages:
        role = message.get("role")
        before = merged[-1] if merged else {}
        late = role == "system" and any(other.get("role") != "system" for other in merged[:1] + merged[-1:])
        if late:
            message = {**message, "role": "user"}
        joins = message.get("role") == before.get("role") == "user" and (late or is_late)
        if joins and all(isinstance(part.get("content"), str) for part in (before, message)):
            merged[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
            is_late = True
        else:
            merged.append(message)
            is_late = late
    return merged


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return an assistant message's reasoning, by any of the names in use."""
    found = (message.get(name) for name in REASONING_FIELDS)
    return next((text for text in found if isinstance(text, str) and text), "")


def _prepared(message: Message, chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    role = message.get("role")
    if role == "tool":
        return _result(message, chat_format, traits)
    if role != "assistant":
        return message
    message = dict(message)
    if reasoning := reasoning_of(message):
        for name in REASONING_FIELDS:
            message.pop(name, None)
        message[traits.reasoning_field or REASONING_FIELDS[0]] = reasoning
    calls = message.get("tool_calls")
    if not calls:
        return message
    if traits.calls:
        message["tool_calls"] = [_call(call, chat_format, traits) for call in calls]
        return message
    del message["tool_calls"]
    content = message.get("content") or ""
    message["content"] = chat_format.write_calls_after(
        f"{content}\n" if content else "",
        [_written(call["function"]) for call in calls],
        [int(call["id"].rpartition(":")[2]) for call in calls] if chat_format.numbers_ids else (),
    )
    return message


def _call(call: Mapping[str, Any], chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    call = dict(call)
    if isinstance(call.get("id"), str):
        call["id"] = chat_format.call_id(call["id"])
    if traits.arguments_as_text:
        function = call["function"]
        call["function"] = {**function, "arguments": _written(function)[1]}
    return call


def _written(function: Mapping[str, Any]) -> tuple[str, str]:
    """Name and JSON text of the arguments."""
    arguments = function.get("arguments")
    if isinstance(arguments, JsonText):
        return function["name"], arguments.text
    return function["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _result(message: Message, chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    if not traits.results:
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    if isinstance(message.get("tool_call_id"), str):
        return {**message, "tool_call_id": chat_format.call_id(message["tool_call_id"])}
    return message


def _with_empty_system(messages: list[Message]) -> list[Message]:
    """An empty system message, in which the template shows the tools, before the one that has a text."""
    first = messages[0] if messages else {}
    if first.get("role") != "system" or not first.get("content"):
        return messages
    return [{"role": "system", "content": ""}, *messages]


def _with_preamble(messages: list[Message], preamble: str, *, first: bool) -> list[Message]:
    """The preamble at the beginning or end of the first system message, or in one of its own."""
    system = messages[0] if messages else {}
    if system.get("role") != "system":
        return [{"role": "system", "content": preamble}, *messages]
    content = system.get("content") or ""
    texts = (preamble, content) if first else (content, preamble)
    return [{**system, "content": "\n\n".join(filter(None, texts))}, *messages[1:]]
