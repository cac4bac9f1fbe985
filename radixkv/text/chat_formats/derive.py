# SPDX-License-Identifier: Apache-2.0
r"""derive: a chat template's ways with tools, calls and thoughts, read off its renderings of probe turns.

    rendered:   ...assistant\n<think>\nTHOUGHT\n</think>\n\n<use>\n{"name": "FIRST", "args": {...}}\n</use>
    traits:     calls; reasoning_field = "reasoning_content"
    form:       opens = ["<use>"], head = '<use>\n{"name": "NAME", "args": ', tail = "}\n</use>"
    thinking:   "<think>\n", "\n</think>", "\n\n"

1. Traits: the parts of a conversation that the template shows, and the form in which it takes them.
2. A form of calls, where the format has none that reads the rendered calls. Two calls tell what belongs to
   each call and what stands around all of them. The form is kept only where its reader reads the rendered
   calls and its writer writes them; a template without marks of its own, or with a plan between its calls,
   gets none.
3. The written form to the last line break, so that the prompt of the next turn continues the tokens of a
   forced call. Templates of a family differ in white space, in ids and in quotes; all else is the family's
   declaration, which stays where the template shows no calls or does something that can't be followed.
4. The text between a prompt's end and a call, with thoughts and without.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.arguments import Arguments, JsonArguments
from radixkv.text.chat_formats.calls import ID, INDEX, NAME, CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.literals import PYTHON, LiteralArguments, gemma_literals
from radixkv.text.chat_formats.member_arguments import MemberArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, ElementArguments, TaggedArguments

Message = dict[str, Any]
#: Where a template shows the tools: before the system prompt; after it, but before a second message of the
#: system; or in no place that messages could change.
ToolsPlace = Literal["first", "movable", "fixed"]
#: Renders messages, tools and further arguments of the template to text; raises InvalidRequestError.
RenderText = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], str]

#: Name of a format whose form of calls is read off the template.
DERIVED = "derived"
#: Names under which templates look for reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


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
        images_in_results: it shows images in these as in messages of the user, or none at all.
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
    images_in_results: bool = True
    reasoning_field: str | None = None
    drops_reasoning: bool = False
    late_system: bool = True
    tools_place: ToolsPlace = "fixed"


def derive(
    chat_format: ChatFormat, render: RenderText, *, is_given: bool = False
) -> tuple[ChatFormat, TemplateTraits]:
    """Return the format with calls, and the text before them, as the template writes them, and its traits.

    Costs about thirty small renderings.

    Args:
        chat_format: the format by the signs of a family, or a declared one.
        is_given: a user has named it: no other form is read off the template.
    """
    traits = _traits(render, chat_format.tools_option)
    probes = _Probes(render, traits, chat_format.numbers_ids)
    found = chat_format if is_given or not traits.calls else _with_derived_form(chat_format, probes)
    if found.form is None:
        return found, traits
    if not traits.calls:
        return (found if found.frames_content else _with_lead_of_text(found, render)), traits
    texts = {size: probes.calls(size) for size in ((1,) if traits.one_call else (2, 1))}
    fitted = (_with_form(found, form, texts, probes.prompt) for form in found.forms)
    found = next((known for known in fitted if known is not None), found)
    return _with_lead(_with_numbers(_with_constants(found, probes), probes), probes), traits


# ---------------------------------------------------------------------- probes

#: Names of the functions that probes call, ids of the calls, and their arguments.
NAMES = ("probe_alpha", "probe_beta")
IDS = ("abcdefgh1", "abcdefgh2")
ARGUMENTS = (
    {"probe_key": "probe first", "probe_more": "probe second"},
    {"probe_key": "x", "probe_more": "y z"},
)
#: The calls as `ChatFormat.write_calls` takes them.
CALLS = tuple((name, json.dumps(given)) for name, given in zip(NAMES, ARGUMENTS, strict=True))
_QUESTION, _THOUGHT, _SAID, _RESULT = ("probe question", "probe thought", "probe said", "probe result")
_USER = {"role": "user", "content": _QUESTION}
_LATE = {"role": "system", "content": _RESULT}
_LATE_SYSTEM: Sequence[Sequence[Message]] = (
    (_USER, _LATE),
    (_USER, _LATE, {"role": "assistant", "content": "x"}, _USER),
    (_USER, {"role": "assistant", "content": "x"}, _LATE, _USER),
)


def probe_tools() -> list[Mapping[str, Any]]:
    """Return the tools that probes call, in OpenAI's form. All arguments are texts."""
    properties = {name: {"type": "string", "description": "x"} for name in ARGUMENTS[0]}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return [
        {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": parameters}}
        for name in NAMES
    ]


def reads_as(chat_format: ChatFormat, text: str, num_calls: int) -> bool:
    """Return whether a format reads the first probed calls in a text and no others."""
    schema = {"properties": {key: {"type": "string"} for key in ARGUMENTS[0]}}
    parser = chat_format.parser(tools=dict.fromkeys(NAMES, schema))
    read = Answer.of([*parser.push(text), *parser.finish()])
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
    except ValueError:
        return False
    return calls == list(zip(NAMES, ARGUMENTS, strict=True))[:num_calls]


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


def render_probe(render: RenderText) -> str:
    """Return the rendering of a conversation with tools and a call; empty: the template refuses it."""
    texts = (
        shown_text(render, _with_results(_turn(arguments=[given])), probe_tools())
        for given in (ARGUMENTS[0], json.dumps(ARGUMENTS[0]))
    )
    return next(filter(None, texts), "")


def _turn(
    *, arguments: Sequence[Any] = (), ids: Sequence[str] = IDS, content: str = "", **fields: str
) -> list[Message]:
    """Return a question, and an answer with a call for each of the arguments.

    Args:
        fields: further fields of the answer.
    """
    answer: Message = {"role": "assistant", "content": content, **fields}
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        for name, call_id, given in zip(NAMES, ids, arguments, strict=False)
    ]
    return [_USER, {**answer, "tool_calls": calls} if calls else answer]


def _with_results(turn: Sequence[Message]) -> list[Message]:
    """Return a turn with the results of its calls."""
    return [*turn, *map(_result, turn[-1]["tool_calls"])]


def _result(call: Mapping[str, Any]) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _RESULT}


# ---------------------------------------------------------------------- 1. traits


def shows_images_in_results(render: RenderText) -> bool:
    """Return False if a template shows images of the user's, and none in results of tools.

    Costs about twenty small renderings.
    """
    return _traits(render, None).images_in_results


def _traits(render: RenderText, tools_option: str | None) -> TemplateTraits:
    """Return the traits of a template.

    Args:
        tools_option: an argument that the template may take tools by.
    """
    shown, offered, first = functools.partial(shown_text, render), probe_tools(), ARGUMENTS[0]

    if not shown([_USER]):
        # The template refuses: the request shall have its words.
        return TemplateTraits(tools_place=_tools_place(shown, None))
    tools, option = NAMES[0] in shown([_USER], offered), None
    if not tools and tools_option is not None and NAMES[0] in shown([_USER], **{tools_option: offered}):
        tools, option = True, tools_option

    def shown_calls(given: Sequence[Any], content: str = "", **fields: str) -> str:
        return shown(_with_results(_turn(arguments=given, content=content, **fields)), offered)

    value, other, as_json = first["probe_key"], ARGUMENTS[1]["probe_more"], json.dumps(first)
    history, as_text = shown_calls([first]), False
    if value not in history or str(first) in history:  # lost, or printed as Python
        text = shown_calls([as_json])
        as_text = as_json in text or (value not in history and value in text)
        history = text if as_text else history
    given: list[Any] = [*map(json.dumps, ARGUMENTS)] if as_text else [*ARGUMENTS]
    calls = NAMES[0] in history and value in history
    field = next(
        (
            field
            for field in REASONING_FIELDS
            if _THOUGHT in shown_calls(given[:1], **{field: _THOUGHT})
            or _THOUGHT in shown([*_turn(content="x", **{field: _THOUGHT}), _USER], offered)
        ),
        None,
    )
    earlier = shown([*_turn(content="x", **({} if field is None else {field: _THOUGHT})), _USER])
    late_result = [*_turn(content="x"), _result(_turn(arguments=[first])[1]["tool_calls"][0])]
    return TemplateTraits(
        tools=tools,
        tools_option=option,
        calls=calls,
        arguments_as_text=as_text,
        one_call=calls and shown_calls(given).count(other) <= history.count(other),
        drops_content=calls and _SAID not in shown_calls(given[:1], _SAID),
        system=_SAID in shown([{"role": "system", "content": _SAID}, _USER]),
        results=_RESULT in (history or shown(late_result)),
        images_in_results=_shows_images_in_results(shown, given),
        reasoning_field=field,
        drops_reasoning=_THOUGHT not in earlier,
        late_system=all(_RESULT in shown(messages) for messages in _LATE_SYSTEM),
        tools_place=_tools_place(shown, option) if tools else "fixed",
    )


def _shows_images_in_results(shown: Callable[..., str], given: Sequence[Any]) -> bool:
    """Return False if a template writes a mark for an image of the user's, but none for one in a result."""
    image: Mapping[str, str] = {"type": "image"}
    before = shown([_USER]).partition(_QUESTION)[0]
    seen = shown([{"role": "user", "content": [image, {"type": "text", "text": _QUESTION}]}])
    seen, asked, _ = seen.partition(_QUESTION)
    both = zip(before, seen, strict=False)
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    written = seen[num_same:].strip()
    turn = _with_results(_turn(arguments=given[:1]))
    if not asked or not written or str(image) in written or _RESULT not in shown(turn, probe_tools()):
        return True
    turn[-1] = {**turn[-1], "content": [image, {"type": "text", "text": _RESULT}]}
    return written in shown(turn, probe_tools())


def _tools_place(shown: Callable[..., str], option: str | None) -> ToolsPlace:
    """Find the place of the tools beside one message of the system, and beside an empty one and another."""

    def system(*texts: str) -> list[Message]:
        return [*({"role": "system", "content": text} for text in texts), _USER]

    def with_tools(*texts: str) -> str:
        tools = probe_tools()
        return shown(system(*texts), tools) if option is None else shown(system(*texts), **{option: tools})

    usual = with_tools(_SAID)
    if usual.count(_SAID) != 1:
        return "fixed"
    if usual.rfind(NAMES[0]) < usual.find(_SAID):
        return "first"
    before, said, after = with_tools("", _SAID).partition(_SAID)
    plain = shown(system(_SAID, _RESULT))
    to_system = plain.partition(_SAID)[2].partition(_RESULT)[0]
    to_user = plain.partition(_RESULT)[2].partition(_QUESTION)[0]
    is_own = bool(to_system) and to_system != to_user and before.endswith(to_system)
    return "movable" if said and is_own and NAMES[0] in before and NAMES[0] not in after else "fixed"


class _Probes:
    """Renderings of probe turns with calls, by one template.

    Args:
        numbers_ids: ids of calls are `functions.NAME:N`.

    Attributes:
        prompt: the rendering of the question.
    """

    def __init__(self, render: RenderText, traits: TemplateTraits, numbers_ids: bool) -> None:
        self.traits = traits
        self.ids = [f"functions.{name}:{i}" for i, name in enumerate(NAMES)] if numbers_ids else IDS
        self._render = render
        self._tools = probe_tools()
        self.prompt = self.shown([_USER])

    def shown(self, messages: Sequence[Message]) -> str:
        """Return the rendering of messages with tools; empty: the template refuses them."""
        return shown_text(self._render, messages, self._tools)

    def turn(
        self,
        num_calls: int,
        thought: str = "",
        arguments: Sequence[Mapping[str, Any]] = ARGUMENTS,
        ids: Sequence[str] = (),
    ) -> list[Message]:
        """Return a question and an answer of one or two calls.

        Args:
            thought: the reasoning before the calls, where the template shows any.
        """
        as_text, field = self.traits.arguments_as_text, self.traits.reasoning_field
        given = [json.dumps(each) if as_text else each for each in arguments[:num_calls]]
        fields = {field: thought} if thought and field is not None else {}
        return _turn(arguments=given, ids=ids or self.ids, **fields)

    def calls(
        self, num_calls: int, thought: str = "", arguments: Sequence[Mapping[str, Any]] = ARGUMENTS
    ) -> str:
        """Return the rendering of such a turn with results, or without, where it then shows the calls."""
        return self.shown_calls(self.turn(num_calls, thought, arguments))

    def shown_calls(self, messages: Sequence[Message]) -> str:
        """Return the rendering of messages that end with calls; see `calls`."""
        text = self.shown(_with_results(messages))
        return text if NAMES[0] in text[text.rfind(_QUESTION) :] else self.shown(messages)


class _Unlike(Exception):
    """The template writes something that can't be followed, or told from text."""


# ---------------------------------------------------------------------- 2. another form

#: Shorter marks than this tell no call from text.
_TELLING = 3
#: A mark begins or ends at one of these, never within a word.
_EDGES = frozenset("|`:,;/=-# \n\t")
_STARTS, _ENDS = _EDGES | frozenset("<[{("), _EDGES | frozenset(">])}\"'")
#: A mark at the end of a text.
_LAST_MARK = re.compile(r"[<\[][^<>\[\]\s]{1,64}[>\]]\s*\Z")


def _with_derived_form(chat_format: ChatFormat, probes: _Probes) -> ChatFormat:
    """Return the format with a form read off the template, where none of its own reads what that renders."""
    num_calls = 1 if probes.traits.one_call else 2
    region = _region(probes, num_calls)
    if not region or reads_as(chat_format, region, num_calls):
        return chat_format
    try:
        form = _object_form(region, num_calls) or _headed_form(region, num_calls)
    except (_Unlike, ValueError):
        return chat_format
    reasoning = _reasoning(chat_format, probes, form)
    known = replace(chat_format, forms=(form, *chat_format.forms), reasoning=reasoning)
    if not chat_format.is_known:
        known = replace(known, name=DERIVED, families="", tokens=(), signs=())
    written = form.write(CALLS[:num_calls])
    is_same = (
        "".join(written.split()) in "".join(region.replace(IDS[0], "").split()) or ID in form.head + form.tail
    )
    return known if is_same and reads_as(known, region, num_calls) else chat_format


def _region(probes: _Probes, num_calls: int) -> str:
    """Return the part of a rendered text that a model would write: the calls with their marks."""
    text, messages = probes.calls(num_calls), probes.turn(num_calls)
    said = [messages[0], {"role": "assistant", "content": _SAID}]
    plain, alone = probes.shown(said), probes.shown(messages)
    at = plain.rfind(_SAID)
    name = text.find(NAMES[0], max(0, text.rfind(_QUESTION)))
    if name < 0 or at < 0:
        return ""
    start = at if text.startswith(plain[:at]) else _shared(plain[:at], text[:name])
    ending = plain[at + len(_SAID) :]
    if not alone.startswith(text[:name]):
        alone = text
        followed = probes.shown([*said, messages[0]]).rpartition(_SAID)[2]
        turn_end = next(iter(followed.split()), "")  # stands before the results, too
        last = text.rfind(NAMES[num_calls - 1], 0, text.find(_RESULT, name))
        stop = text.find(turn_end, last) if turn_end else -1
        if stop >= 0:
            return text[start:stop].rstrip()
    size = next((n for n in range(len(ending), 0, -1) if alone.endswith(ending[-n:])), 0)
    return alone[start : len(alone) - size]


def _shared(one: str, other: str) -> int:
    """Return how far two texts are the same, back to the edge of a mark."""
    pairs = zip(one, other, strict=False)
    size = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))
    while size and size < len(other) and other[size - 1] not in ">]\n ":
        size -= 1
    return size


def _shared_end(text: str, other: str) -> str:
    """Return the longest end of a text that another ends with, too, and that begins where a mark may."""
    size = next((n for n in range(len(text), 0, -1) if other.endswith(text[-n:])), 0)
    while size and text[len(text) - size] not in _STARTS:
        size -= 1
    return text[len(text) - size :]


def _around(before: str, middle: str | None, after: str) -> tuple[str, str, str, str, str]:
    """Divide the texts around calls into begin, head, tail, between and end.

        <calls>  <call name="FIRST">{...}</call>  and  <call name="SECOND">{...}</call>  </calls>
        begin    head                    tail  between                                   end

    Args:
        middle: the text between two calls; None: there is one call, whose marks are all its own.
    """
    if middle is None:
        return "", before, after, "\n", ""
    head = _shared_end(before, middle)
    rest = middle.removesuffix(head)
    size = next((n for n in range(len(rest), 0, -1) if after.startswith(rest[:n])), 0)
    while size and rest[size - 1] not in _ENDS:
        size -= 1
    return before[: len(before) - len(head)], head, rest[:size], rest[size:], after[size:]


def _mark(*texts: str) -> str:
    """Return the first of some texts that is long enough to tell a call."""
    for text in texts:
        mark = text.strip()
        if len(mark) >= _TELLING and not mark.isalnum():
            return mark
    raise _Unlike


def _object_form(region: str, num_calls: int) -> CallForm | None:
    """Return the form of calls that are JSON objects with the name inside; None: they are none."""
    places = [_object(region, i) for i in range(num_calls)]
    if any(place is None for place in places):
        return None
    (start, end, name_key, key), *others = [place for place in places if place is not None]
    text = region[start:end]
    name, args_at = text.find(json.dumps(NAMES[0])) + 1, text.index("{", text.index(f'"{key}"'))
    given, size = json.JSONDecoder().raw_decode(text, args_at)
    if given != ARGUMENTS[0] or name > text.index(f'"{key}"'):
        raise _Unlike  # read as JSON, but written in another order
    head, tail = text[:name] + NAME + text[name + len(NAMES[0]) : args_at], text[size:]
    middle = region[end : others[0][0]] if others else None
    begin, before, after, between, closing = _around(
        region[:start], middle, region[others[-1][1] if others else end :]
    )
    if IDS[0] in head:
        raise _Unlike
    return CallForm(
        before + head,
        MemberArguments(frozenset({name_key, "name"}), frozenset({key, "arguments"})),
        tail.replace(IDS[0], ID) + after,
        (_mark((begin + before).rstrip().removesuffix("[")),),
        begin,
        between,
        closing.rstrip(),
        closes=tuple(dict.fromkeys(filter(None, (mark.strip().lstrip("] \n") for mark in (after, closing))))),
    )


def _object(region: str, index: int) -> tuple[int, int, str, str] | None:
    """Return the place of the JSON object that is a call, and its keys of the name and of the arguments."""
    name = region.find(json.dumps(NAMES[index]))
    for at in (found.start() for found in re.finditer(r"\{", region[: max(name, 0)])):
        try:
            value, end = json.JSONDecoder().raw_decode(region, at)
        except ValueError:
            continue
        if end > name and isinstance(value, dict):
            name_key, key = (
                next((key for key, member in value.items() if member == part), None)
                for part in (NAMES[index], ARGUMENTS[index])
            )
            if name_key is not None and key is not None:
                return at, end, name_key, key
    return None


def _headed_form(region: str, num_calls: int) -> CallForm:
    """Return the form of calls with the name before the arguments."""
    spans = []  # of each call: where its name begins, and where its arguments do and end
    notation = _notation(region, max(0, region.find(NAMES[0])))
    for name, given in zip(NAMES[:num_calls], ARGUMENTS, strict=False):
        at = region.find(name)
        if at < 0:
            raise _Unlike
        spans.append((at, *_arguments(notation, region, at + len(name), given)))
    (start, head_end, end, arguments), *others = spans
    inner = region[start + len(NAMES[0]) : head_end].replace(IDS[0], ID)
    middle = None
    if others:
        ((other, other_head_end, _, alike),) = others
        if region[other + len(NAMES[1]) : other_head_end].replace(IDS[1], ID) != inner or alike != arguments:
            raise _Unlike
        middle = region[end:other].replace(IDS[0], ID).replace(IDS[1], ID)
    last = others[-1][2] if others else end
    begin, before, tail, between, closing = _around(
        region[:start].replace(IDS[0], ID), middle, region[last:].replace(IDS[1], ID)
    )
    head = before + NAME + inner
    if isinstance(arguments, TaggedArguments) and not tail:
        # White space before the tail belongs to it, or to the values: the reader takes either.
        tail, closing = closing, ""
    chunks = begin.split()
    if any("?" in text or NAME in text for text in (*chunks, before, inner, tail)):
        raise _Unlike
    opens = [_mark(chunks[0] if chunks else "", before.partition(ID)[0])]
    if chunks and len(before.strip()) >= _TELLING and ID not in before:
        opens.append(before.strip())
    return CallForm(
        head,
        arguments,
        tail,
        tuple(opens),
        begin,
        between,
        closing,
        reads=" ".join([*(f"{chunk}?" for chunk in chunks), head]),
        reads_next=head,
        separators=tuple(filter(None, (between.strip(),))),
        closes=tuple(closing.split()),
    )


def _notation(region: str, name: int) -> Arguments:
    """Return the notation that a call's arguments are like, which begin after its name."""
    at = name + len(NAMES[0])
    brace = region.find("{", at)
    if brace >= 0:
        try:
            if json.JSONDecoder().raw_decode(region, brace)[0] == ARGUMENTS[0]:
                return JsonArguments()
        except ValueError:
            pass
    (key, key_end), (value, value_end), (second, second_end), (last, end) = _words(region, at, ARGUMENTS[0])
    opening, assigns, following = region[at:key], region[key_end:value], region[value_end:second]
    if region[second_end:last] != assigns:
        raise _Unlike
    if opening.strip() == "(" and assigns.strip()[:1] == "=":
        quote = assigns.strip()[1:]
        closing = region.find(")", end)
        if closing < 0 or quote not in ("'", '"') or region[end:closing].strip() != quote:
            raise _Unlike
        return replace(PYTHON, quote=quote)
    if opening.strip() == "{" and assigns[:1] == ":" and len(assigns) > 1:
        closing = region.find("}", end)
        if closing < 0 or region[end:closing] != assigns[1:]:
            raise _Unlike
        return gemma_literals(assigns[1:])
    before = _shared_end(opening, following)
    after = following.removesuffix(before).strip()
    rest = region[end:].lstrip()
    if not before.strip() or len(after) < _TELLING or not rest.startswith(after):
        raise _Unlike
    return TaggedArguments(before + KEY + assigns, after)


def _reasoning(chat_format: ChatFormat, probes: _Probes, form: CallForm) -> Section | None:
    """Return the section that the template writes a message's thoughts in; the format's, if it shows none."""
    own = chat_format.reasoning
    if probes.traits.reasoning_field is None:
        return own
    text, bare = probes.calls(1, _THOUGHT), probes.calls(1)
    at, head = text.rfind(_THOUGHT), _before_names(form).strip()
    after = text.find(head, at) if head else -1
    start = _shared(bare, text[:at]) if at >= 0 else 0
    if at < 0 or after < 0:
        return own
    opening, closing = text[start:at].strip(), text[at + len(_THOUGHT) : after].strip()
    if not opening and closing and bare[start:].lstrip().startswith(closing):
        found = _LAST_MARK.search(text[:at])  # without thoughts the marks are there, too
        opening = found[0].strip() if found is not None else ""
    if len(opening) < _TELLING or len(closing) < _TELLING:
        return own
    if own is not None and opening in own.opens and closing in own.closes:
        return own
    more = own if own is not None else Section(())
    return Section((opening, *more.opens), (closing, *more.closes))


# ---------------------------------------------------------------------- 3. the written form


def _with_form(
    chat_format: ChatFormat, form: CallForm, texts: Mapping[int, str], prompt: str
) -> ChatFormat | None:
    """Return the format with a form as rendered calls have it in front; None: they have another.

    Args:
        texts: number of calls -> their rendering.
    """
    for num_calls, text in texts.items():
        start = _lead_start(chat_format, text, prompt)
        try:
            written = _fitted(form, text, start, num_calls)
        except (_Unlike, ValueError):
            continue
        others = (other for other in chat_format.forms if other is not form)
        candidate = replace(chat_format, forms=(written, *others))
        if _is_read(candidate, written, text, num_calls):
            return candidate
    return None


def _is_read(chat_format: ChatFormat, form: CallForm, text: str, num_calls: int) -> bool:
    """Return whether the template renders the calls of a form, and the reader reads them."""
    written = form.write(CALLS[:num_calls])
    patterns = [re.escape(piece) for piece in re.split(r"abcdefgh\d|\d+", written)]
    if not re.search(r"(?:abcdefgh\d|\d+)".join(patterns), text):
        return False
    return reads_as(chat_format, written, num_calls)


def _lead_start(chat_format: ChatFormat, text: str, prompt: str) -> int:
    """Return the place from which on a rendered text is the model's."""
    if not text.startswith(prompt):
        return text.rfind(_QUESTION) + len(_QUESTION)
    opened = chat_format.opened_by(prompt)
    return len(prompt) - (0 if chat_format.thinks(opened) else len(opened))


def _fitted(form: CallForm, text: str, start: int, num_calls: int) -> CallForm:
    """Return a form with the marks that a rendered text has, from a place on."""
    name = text.find(NAMES[0], start)
    if name < 0:
        raise _Unlike
    opens = [at for mark in form.opens if (at := text.rfind(mark, start, name)) >= 0]
    lead_at = min(opens) if opens else _bare_start(form.begin + form.head, text, start, name)
    args_at, args_end, arguments = _arguments(form.arguments, text, name + len(NAMES[0]), ARGUMENTS[0])
    lead, middle = text[lead_at:name], text[name + len(NAMES[0]) : args_at]
    first_chunk = _chunks(form.head)[0]
    head_at = lead.rfind(first_chunk) if first_chunk else len(lead)
    if head_at < 0:
        if form.begin:
            raise _Unlike
        head_at = 0
    head = _declared(form, lead[head_at:] + NAME + middle)
    begin, between = lead[:head_at], form.between
    rest = text[args_end:]
    if num_calls == 2:
        second = text.find(NAMES[1], args_end)
        next_args, next_end, _ = _arguments(form.arguments, text, second + len(NAMES[1]), ARGUMENTS[1])
        if second < 0:
            raise _Unlike
        until = text[args_end:second]
        next_at = until.rfind(first_chunk) if first_chunk else len(until)
        if _declared(form, until[next_at:] + NAME + text[second + len(NAMES[1]) : next_args]) != head:
            raise _Unlike
        tail_size = _end_of(_chunks(form.tail)[-1], until[:next_at])
        between, rest = until[tail_size:next_at], text[next_end:]
        tail = until[:tail_size]
    else:
        tail = rest[: _end_of(_chunks(form.tail)[-1], rest, first=True)]
    tail, rest = _declared(form, tail), rest[len(tail) :]
    end = rest[: _end_of(_chunks(form.end)[-1], rest, first=True)]
    return replace(form, head=head, arguments=arguments, tail=tail, begin=begin, between=between, end=end)


def _bare_start(written: str, text: str, start: int, name: int) -> int:
    """Return the place where calls begin that no mark opens."""
    found = text.rfind(_chunks(written)[0], start, name + 1)
    if found < 0:
        raise _Unlike
    return found


def _declared(form: CallForm, text: str) -> str:
    """Return a text with placeholders for the names and ids of the probes."""
    for name in NAMES:
        text = text.replace(name, NAME)
    for call_id in IDS:
        text = text.replace(call_id, ID)
    return re.sub(r"\d+", INDEX, text) if INDEX in form.head else text


def _chunks(text: str) -> list[str]:
    """Return the texts of a declaration that no white space or placeholder interrupts, one at least."""
    return re.split(rf"\s+|{NAME}|{ID}|{INDEX}", text.strip())


def _before_names(form: CallForm) -> str:
    """Return the text of a form's first call up to the first placeholder."""
    return re.split(f"{NAME}|{ID}|{INDEX}", form.begin + form.head)[0]


def _end_of(chunk: str, text: str, *, first: bool = False) -> int:
    """Return the end of a chunk's last or first place in a text; 0: the chunk is empty."""
    if not chunk:
        return 0
    at = text.find(chunk) if first else text.rfind(chunk)
    if at < 0:
        raise _Unlike
    return at + len(chunk)


def _arguments(notation: Any, text: str, at: int, given: Mapping[str, str]) -> tuple[int, int, Any]:
    """Return where a call's arguments begin and end, and their notation as the template writes it."""
    if isinstance(notation, JsonArguments):
        begin = text.find("{", at)
        value, end = json.JSONDecoder().raw_decode(text, begin) if begin >= 0 else (None, 0)
        if value != given:
            raise _Unlike
        return begin, end, notation
    places = _words(text, at, given)
    if isinstance(notation, TaggedArguments):
        return _tagged(notation, text, places)
    (key, _), (value, value_end), (second, second_end), (_, end) = places
    if isinstance(notation, ElementArguments):
        closing = f"{notation.mark}</{text[second:second_end]}>"
        return key - len(notation.mark) - 1, end + len(closing), notation
    assert isinstance(notation, LiteralArguments)
    quote = text[value - 1] if not notation.mark else ""
    if quote and quote not in "'\"":
        raise _Unlike
    size = len(notation.mark) or 1
    separator = text[value_end + size : second]
    fitted = replace(notation, quote=quote or notation.quote, separator=separator)
    return key - len(notation.opens), end + size + len(notation.closes), fitted


def _words(text: str, at: int, given: Mapping[str, str]) -> list[tuple[int, int]]:
    """Return the places of the arguments' names and values in a text, in their order."""
    places = []
    for word in (word for pair in given.items() for word in pair):
        begin = text.find(word, at)
        if begin < 0:
            raise _Unlike
        at = begin + len(word)
        places.append((begin, at))
    return places


def _tagged(
    notation: TaggedArguments, text: str, places: list[tuple[int, int]]
) -> tuple[int, int, TaggedArguments]:
    (key, key_end), (value, value_end), (second, _), (_, end) = places
    opening, closing = _chunks(notation.key.partition(KEY)[0])[0], notation.end.strip()
    begin = text.rfind(opening, 0, key)
    until = text[value_end:second]
    next_at = until.rfind(opening)
    closed = until.find(closing) + len(closing)
    last = text.find(closing, end)
    if begin < 0 or next_at < 0 or closed < len(closing) or last < 0:
        raise _Unlike
    value_close, separator = until[:closed], until[closed:next_at]
    end = last + len(closing)
    if text.startswith(separator, end):
        value_close, end, separator = value_close + separator, end + len(separator), ""
    written = notation.key if notation.kinds else text[begin:key] + KEY + text[key_end:value]
    padded = written.endswith("\n") and value_close.startswith("\n")
    fitted = replace(notation, key=written, end=value_close, between=separator, padded=padded)
    return begin, end, fitted


def _with_constants(chat_format: ChatFormat, probes: _Probes) -> ChatFormat:
    """Return the format with the words for true, false and null that the template writes into arguments."""
    form = chat_format.form
    if form is None or not isinstance(form.arguments, TaggedArguments | LiteralArguments):
        return chat_format
    notation, keys = form.arguments, [*ARGUMENTS[0]]
    if isinstance(notation, TaggedArguments) and notation.kinds:
        return chat_format
    text = probes.calls(1, arguments=[dict(zip(keys, (True, False), strict=True))])
    for words in (("true", "false", "null"), ("True", "False", "None")):
        if isinstance(notation, TaggedArguments):
            written = [notation.key.replace(KEY, key) + word for key, word in zip(keys, words, strict=False)]
        else:
            written = [key + notation.assigns + word for key, word in zip(keys, words, strict=False)]
        if all(part in text for part in written):
            fitted = replace(form, arguments=replace(notation, constants=words))
            return replace(chat_format, forms=(fitted, *chat_format.forms[1:]))
    return chat_format


def _with_numbers(chat_format: ChatFormat, probes: _Probes) -> ChatFormat:
    """Return the format with the numbers of calls that the template writes, where it keeps no ids."""
    form = chat_format.form
    if form is None or not (chat_format.numbers_ids or INDEX in form.head):
        return chat_format
    own = 70  # no template would come to it by counting
    messages: list[Message] = [_USER]
    for name, call_id in zip(NAMES, IDS, strict=True):
        given = f"functions.{name}:{own}" if chat_format.numbers_ids else call_id
        _, answer = probes.turn(1, ids=[given])
        (call,) = answer["tool_calls"]
        named = {**call, "function": {**call["function"], "name": name}}
        messages += _with_results([{**answer, "tool_calls": [named]}])
    text = probes.shown_calls(messages[:-1])
    head = re.escape(form.head).replace(INDEX, r"(\d+)")
    found = [re.search(head.replace(NAME, name), text[text.rfind(_QUESTION) :]) for name in NAMES]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) < len(NAMES) or numbers[0] == own:
        return chat_format
    forms = (replace(form, first_index=numbers[0]), *chat_format.forms[1:])
    return replace(chat_format, forms=forms, counts_calls=numbers[1] > numbers[0])


# ---------------------------------------------------------------------- 4. before calls


def _with_lead_of_text(chat_format: ChatFormat, render: RenderText) -> ChatFormat:
    """Return the format with the text between the prompt's end and an answer, as which calls are shown."""
    prompt = shown_text(render, [_USER])
    text = shown_text(render, [_USER, {"role": "assistant", "content": _SAID}, _USER])
    at = text.find(_SAID, len(prompt))
    if at < 0 or not text.startswith(prompt):
        return chat_format
    return replace(chat_format, lead=text[len(prompt) : at])


def _with_lead(chat_format: ChatFormat, probes: _Probes) -> ChatFormat:
    """Return the format with the text between the prompt's end and a call, thinking and not."""
    form, section, prompt = chat_format.form, chat_format.reasoning, probes.prompt
    assert form is not None
    plain, head = probes.calls(1), _before_names(form)
    at = plain.find(head, plain.rfind(_QUESTION)) if head.strip() else -1
    lead = plain[len(prompt) : at] if at >= len(prompt) and plain.startswith(prompt) else None
    fitted = replace(chat_format, lead=lead)
    if section is None or probes.traits.reasoning_field is None:
        return fitted
    text = probes.calls(1, _THOUGHT)
    thought = text.rfind(_THOUGHT)
    parts = (i for i, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1])
    before = text[: next(parts, min(len(prompt), len(text)))]
    at = text.find(head, thought) if head.strip() else -1
    if thought < len(before) or at < 0 or not prompt.startswith(before):
        return fitted
    between = text[thought + len(_THOUGHT) : at]
    closing = next((mark for mark in section.closes if mark in between), None)
    opening = text[len(before) : thought]
    if closing is None or (prompt != before and not chat_format.opened_by(prompt)):
        return fitted
    size = between.index(closing) + len(closing)
    return replace(fitted, thinking=(opening, between[:size], between[size:]))
