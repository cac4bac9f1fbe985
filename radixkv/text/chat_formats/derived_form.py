# SPDX-License-Identifier: Apache-2.0
"""The form of calls of a family that is not declared, read off what its chat template renders.

A template that writes earlier calls shows the marks around names and arguments. Two calls tell what belongs
to each call and what stands around all of them:

    <calls>  <call name="FIRST">{...}</call>  \\n  <call name="SECOND">{...}</call>  </calls>
    begin    head                    tail     between                                end

A form is kept only where its reader reads the rendered calls and its writer writes them to the last
character; a template with no marks of its own, or with a plan between its calls, gets none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import ID, NAME, CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.format_parser import Section
from radixkv.text.chat_formats.literals import PYTHON, gemma_literals
from radixkv.text.chat_formats.member_arguments import MemberArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, TaggedArguments
from radixkv.text.chat_formats.template_probes import (
    ARGUMENTS,
    IDS,
    NAMES,
    RESULT,
    SAID,
    THOUGHT,
    USER,
    call_history,
    probe_tools,
    reads_as,
    shown_calls,
)
from radixkv.text.chat_formats.template_traits import RenderText, TemplateTraits, shown_text

DERIVED = "derived"
#: Shorter marks than this tell no call from text.
_TELLING = 3
#: A mark begins or ends at one of these, never within a word.
_EDGES = frozenset("|`:,;/=-# \n\t")
_STARTS, _ENDS = _EDGES | frozenset("<[{("), _EDGES | frozenset(">])}\"'")
#: A mark at the end of a text.
_LAST_MARK = re.compile(r"[<\[][^<>\[\]\s]{1,64}[>\]]\s*\Z")


class _NoForm(Exception):
    """The template writes calls in no way that can be told from text."""


def with_derived_form(chat_format: ChatFormat, render: RenderText, traits: TemplateTraits) -> ChatFormat:
    """Return the format with a form read off the template, where none of its own reads what that renders.

    Costs about four small renderings.
    """
    if not traits.calls:
        return chat_format
    tools = probe_tools()
    num_calls = 1 if traits.one_call else 2
    text = shown_calls(render, call_history(chat_format, traits, num_calls), tools)
    region = _region(chat_format, render, traits, text, num_calls, tools)
    if not region or reads_as(chat_format, region, num_calls):
        return chat_format
    try:
        form = _form(region, num_calls)
    except (_NoForm, ValueError):
        return chat_format
    reasoning = _reasoning(chat_format, render, traits, form, tools)
    known = replace(chat_format, forms=(form, *chat_format.forms), reasoning=reasoning)
    if not chat_format.is_known:
        known = replace(known, name=DERIVED, families="", tokens=(), signs=())
    written = form.write([(NAMES[i], json.dumps(ARGUMENTS[i])) for i in range(num_calls)])
    is_same = (
        "".join(written.split()) in "".join(region.replace(IDS[0], "").split()) or ID in form.head + form.tail
    )
    return known if is_same and reads_as(known, region, num_calls) else chat_format


def _region(
    chat_format: ChatFormat,
    render: RenderText,
    traits: TemplateTraits,
    text: str,
    num_calls: int,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Return the part of a rendered text that a model would write: the calls with their marks."""
    messages = call_history(chat_format, traits, num_calls)
    said = [messages[0], {"role": "assistant", "content": SAID}]
    plain, alone = shown_text(render, said, tools), shown_text(render, messages, tools)
    at = plain.rfind(SAID)
    name = text.find(NAMES[0], max(0, text.rfind(USER)))
    if name < 0 or at < 0:
        return ""
    start = at if text.startswith(plain[:at]) else _shared(plain[:at], text[:name])
    ending = plain[at + len(SAID) :]
    if not alone.startswith(text[:name]):
        alone = text
        followed = shown_text(render, [*said, messages[0]], tools).rpartition(SAID)[2]
        turn_end = next(iter(followed.split()), "")  # stands before the results, too
        last = text.rfind(NAMES[num_calls - 1], 0, text.find(RESULT, name))
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


# ---------------------------------------------------------------------- the form


def _form(region: str, num_calls: int) -> CallForm:
    """Return the form of the calls in a region.

    Raises:
        _NoForm: it has none that is certain.
    """
    found = _json_form(region, num_calls)
    return found if found is not None else _call_form(region, num_calls)


def _shared_end(text: str, other: str) -> str:
    """Return the longest end of a text that another ends with, too, and that begins where a mark may."""
    size = next((n for n in range(len(text), 0, -1) if other.endswith(text[-n:])), 0)
    while size and text[len(text) - size] not in _STARTS:
        size -= 1
    return text[len(text) - size :]


def _around(before: str, middle: str | None, after: str) -> tuple[str, str, str, str, str]:
    """Divide the texts around calls into begin, head, tail, between and end.

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
    raise _NoForm


def _json_form(region: str, num_calls: int) -> CallForm | None:
    """Return calls that are JSON objects with the name inside; None: they are none."""
    places = [_object(region, i) for i in range(num_calls)]
    if any(place is None for place in places):
        return None
    (start, end, name_key, key), *others = [place for place in places if place is not None]
    text = region[start:end]
    name = text.find(json.dumps(NAMES[0])) + 1
    given, size = json.JSONDecoder().raw_decode(text, text.index("{", text.index(f'"{key}"')))
    if given != ARGUMENTS[0] or name > text.index(f'"{key}"'):
        raise _NoForm  # read as JSON, but written in another order
    at = text.index("{", text.index(f'"{key}"'))
    head, tail = text[:name] + NAME + text[name + len(NAMES[0]) : at], text[size:]
    middle = region[end : others[0][0]] if others else None
    last = others[-1][1] if others else end
    begin, before, after, between, closing = _around(region[:start], middle, region[last:])
    lead = (begin + before).rstrip().removesuffix("[")
    opening = _mark(lead)
    closes = tuple(dict.fromkeys(filter(None, (mark.strip().lstrip("] \n") for mark in (after, closing)))))
    tail = tail.replace(IDS[0], ID)
    if ID in head.replace(IDS[0], ID):
        raise _NoForm
    keys = frozenset({name_key, "name"}), frozenset({key, "arguments"})
    return CallForm(
        before + head,
        MemberArguments(*keys),
        tail + after,
        (opening,),
        begin,
        between,
        closing.rstrip() if closing.strip() else "",
        closes=closes,
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
            keys = {
                part: next((key for key, member in value.items() if member == part_value), None)
                for part, part_value in (("name", NAMES[index]), ("arguments", ARGUMENTS[index]))
            }
            if keys["name"] is not None and keys["arguments"] is not None:
                return at, end, keys["name"], keys["arguments"]
    return None


def _call_form(region: str, num_calls: int) -> CallForm:
    """Return calls with the name before the arguments."""
    spans = [_span(region, i) for i in range(num_calls)]
    (start, head_end, end, arguments), *others = spans
    inner = region[start + len(NAMES[0]) : head_end].replace(IDS[0], ID)
    middle = None
    if others:
        other = others[0]
        second = region[other[0] + len(NAMES[1]) : other[1]].replace(IDS[1], ID)
        if second != inner or other[3] != arguments:
            raise _NoForm
        middle = region[end : other[0]].replace(IDS[0], ID).replace(IDS[1], ID)
    last = others[-1][2] if others else end
    begin, before, tail, between, closing = _around(
        region[:start].replace(IDS[0], ID), middle, region[last:].replace(IDS[1], ID)
    )
    head = before + NAME + inner
    if isinstance(arguments, TaggedArguments):
        # White space before the tail belongs to it, or to the values: the reader takes either.
        tail = tail or closing
    chunks = begin.split()
    if any("?" in text or NAME in text for text in (*chunks, before, inner, tail)):
        raise _NoForm
    opens = [_mark(chunks[0] if chunks else "", before.partition(ID)[0])]
    if chunks and len(before.strip()) >= _TELLING and ID not in before:
        opens.append(before.strip())
    closes = tuple(closing.split()) if tail != closing else ()
    return CallForm(
        head,
        arguments,
        tail,
        tuple(opens),
        begin,
        between,
        closing if tail != closing else "",
        reads=" ".join([*(f"{chunk}?" for chunk in chunks), head]),
        reads_next=head,
        separators=tuple(filter(None, (between.strip(),))),
        closes=closes,
    )


def _span(region: str, index: int) -> tuple[int, int, int, Any]:
    """Return where a call's name and its arguments begin and where these end, and their notation."""
    name, given = NAMES[index], ARGUMENTS[index]
    start = region.find(name)
    if start < 0:
        raise _NoForm
    at = start + len(name)
    brace = region.find("{", at)
    if brace >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(region, brace)
        except ValueError:
            value, end = None, 0
        if value == given:
            return start, brace, end, JsonArguments()
    places = []
    for word in (word for pair in given.items() for word in pair):
        found = region.find(word, at)
        if found < 0:
            raise _NoForm
        at = found + len(word)
        places.append((found, at))
    (key, key_end), (value_at, value_end), (second, second_end), (last, end) = places
    opening = region[start + len(name) : key]
    assigns = region[key_end:value_at]
    if region[second_end:last] != assigns:
        raise _NoForm
    if opening.strip() == "(" and assigns.strip()[:1] == "=":
        quote = assigns.strip()[1:]
        closing = region.find(")", end)
        if closing < 0 or quote not in ("'", '"') or region[end:closing].strip() != quote:
            raise _NoForm
        return start, start + len(name), closing + 1, replace(PYTHON, quote=quote)
    if opening.strip() == "{" and assigns[:1] == ":" and len(assigns) > 1:
        closing = region.find("}", end)
        if closing < 0 or region[end:closing] != assigns[1:]:
            raise _NoForm
        return start, start + len(name), closing + 1, gemma_literals(assigns[1:])
    return _tagged_span(region, start, len(name), opening, assigns, region[value_end:second], end)


def _tagged_span(
    region: str, start: int, name_size: int, opening: str, assigns: str, following: str, end: int
) -> tuple[int, int, int, TaggedArguments]:
    """Return the same for arguments whose names and values stand between marks."""
    key = _shared_end(opening, following)
    value_end = following.removesuffix(key)
    closing = value_end.strip()
    if not key.strip() or len(closing) < _TELLING or not region.startswith(closing, _skip(region, end)):
        raise _NoForm
    stop = region.index(closing, end) + len(closing)
    written = value_end[: value_end.index(closing) + len(closing)]
    between = value_end[len(written) :]
    if region.startswith(between, stop):
        written, stop, between = written + between, stop + len(between), ""
    padded = assigns.endswith("\n") and value_end.startswith("\n")
    notation = TaggedArguments(key + KEY + assigns, written, between, padded=padded)
    return start, start + name_size + len(opening) - len(key), stop, notation


def _skip(text: str, at: int) -> int:
    """Return the place of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# ---------------------------------------------------------------------- reasoning


def _reasoning(
    chat_format: ChatFormat,
    render: RenderText,
    traits: TemplateTraits,
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
) -> Section | None:
    """Return the section that the template writes a message's thoughts in; the format's, if it shows none."""
    if traits.reasoning_field is None:
        return chat_format.reasoning
    text = shown_calls(render, call_history(chat_format, traits, 1, THOUGHT), tools)
    bare = shown_calls(render, call_history(chat_format, traits, 1), tools)
    at = text.rfind(THOUGHT)
    head = (form.begin + form.head).partition(NAME)[0].partition(ID)[0].strip()
    after = text.find(head, at) if head else -1
    start = _shared(bare, text[:at]) if at >= 0 else 0
    if at < 0 or after < 0:
        return chat_format.reasoning
    opening, closing = text[start:at].strip(), text[at + len(THOUGHT) : after].strip()
    if not opening and closing and bare[start:].lstrip().startswith(closing):
        found = _LAST_MARK.search(text[:at])  # without thoughts the marks are there, too
        opening = found[0].strip() if found is not None else ""
    if len(opening) < _TELLING or len(closing) < _TELLING:
        return chat_format.reasoning
    own = chat_format.reasoning
    if own is not None and opening in own.opens and closing in own.closes:
        return own
    more = (own.opens, own.closes) if own is not None else ((), ())
    return Section((opening, *more[0]), (closing, *more[1]))
