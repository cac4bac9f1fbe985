# SPDX-License-Identifier: Apache-2.0
"""The form of calls as a chat template renders it, to the last line break.

Forced calls are written in this form, so that the prompt of the next turn continues the generated tokens. A
family's templates differ in white space, in ids and in quotes; all else is the family's declaration, which
stays where the template shows no calls or does something that can't be followed.

    rendered:  ...assistant\\n<think>\\nTHOUGHT\\n</think>\\n\\n<tool_call>\\n{"name": "FIRST", ...
    found:     thinking "<think>\\n" "\\n</think>" "\\n\\n", head '<tool_call>\\n{"name": "NAME", ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import ID, INDEX, NAME, CallForm
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.literals import LiteralArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, ElementArguments, TaggedArguments
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


class _Unlike(Exception):
    """The template writes something that can't be followed."""


def fit_to_template(chat_format: ChatFormat, render: RenderText, traits: TemplateTraits) -> ChatFormat:
    """Return a format whose calls, and what stands before them, are written as the template does.

    Costs about four small renderings.
    """
    if chat_format.form is None:
        return chat_format
    if not traits.calls:
        return chat_format if chat_format.frames_content else _with_lead_of_text(chat_format, render)
    tools = probe_tools()
    prompt = shown_text(render, [{"role": "user", "content": USER}], tools)
    texts = {
        num_calls: shown_calls(render, call_history(chat_format, traits, num_calls), tools)
        for num_calls in ((1,) if traits.one_call else (2, 1))
    }
    fitted = (_with_form(chat_format, form, texts, prompt) for form in chat_format.forms)
    found = next((known for known in fitted if known is not None), chat_format)
    found = _with_numbers(_with_constants(found, render, traits, tools), render, traits, tools)
    return _with_lead(found, render, traits, prompt, tools)


def _with_form(
    chat_format: ChatFormat, form: CallForm, texts: Mapping[int, str], prompt: str
) -> ChatFormat | None:
    """Return the format with a form as rendered calls have it in front; None: they have another."""
    for num_calls, text in texts.items():
        start = _lead_start(chat_format, text, prompt)
        try:
            written = _fitted(form, text, start, num_calls)
        except (_Unlike, ValueError):
            continue
        others = (other for other in chat_format.forms if other is not form)
        candidate = replace(chat_format, forms=(written, *others))
        if _is_read(candidate, text, num_calls):
            return candidate
    return None


def _is_read(chat_format: ChatFormat, text: str, num_calls: int) -> bool:
    """Return whether the template renders the calls of a form, and the reader reads them."""
    form = chat_format.form
    assert form is not None
    calls = [(NAMES[i], json.dumps(ARGUMENTS[i])) for i in range(num_calls)]
    patterns = [re.escape(piece) for piece in re.split(r"abcdefgh\d|\d+", form.write(calls))]
    if not re.search(r"(?:abcdefgh\d|\d+)".join(patterns), text):
        return False
    return reads_as(chat_format, form.write(calls), num_calls)


# ------------------------------------------------------------------ around calls


def _lead_start(chat_format: ChatFormat, text: str, prompt: str) -> int:
    """Return the place from which on a rendered text is the model's."""
    if not text.startswith(prompt):
        return text.rfind(USER) + len(USER)
    opened = chat_format.opened_by(prompt)
    return len(prompt) - (0 if chat_format.thinks(opened) else len(opened))


def _fitted(form: CallForm, text: str, start: int, num_calls: int) -> CallForm:
    """Return a form with the marks that a rendered text has, from a place on."""
    name = text.find(NAMES[0], start)
    if name < 0:
        raise _Unlike
    opens = [at for mark in form.opens if (at := text.rfind(mark, start, name)) >= 0]
    lead_at = min(opens) if opens else _bare_start(form.begin + form.head, text, start, name)
    args_at, args_end, arguments = _arguments(form, text, name + len(NAMES[0]), ARGUMENTS[0])
    lead, middle = text[lead_at:name], text[name + len(NAMES[0]) : args_at]
    first_chunk = _first_chunk(form.head)
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
        next_args, next_end, _ = _arguments(form, text, second + len(NAMES[1]), ARGUMENTS[1])
        if second < 0:
            raise _Unlike
        until = text[args_end:second]
        next_at = until.rfind(first_chunk) if first_chunk else len(until)
        if _declared(form, until[next_at:] + NAME + text[second + len(NAMES[1]) : next_args]) != head:
            raise _Unlike
        tail_size = _end_of(_last_chunk(form.tail), until[:next_at])
        between, rest = until[tail_size:next_at], text[next_end:]
        tail = until[:tail_size]
    else:
        tail = rest[: _end_of(_last_chunk(form.tail), rest, first=True)]
    tail, rest = _declared(form, tail), rest[len(tail) :]
    end = rest[: _end_of(_last_chunk(form.end), rest, first=True)]
    return replace(form, head=head, arguments=arguments, tail=tail, begin=begin, between=between, end=end)


def _bare_start(written: str, text: str, start: int, name: int) -> int:
    """Return the place where calls begin that no mark opens."""
    found = text.rfind(_first_chunk(written), start, name + 1)
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


def _first_chunk(text: str) -> str:
    """The first text of a declaration that no white space or placeholder interrupts."""
    chunks = re.split(rf"\s+|{NAME}|{ID}|{INDEX}", text.strip())
    return next(iter(chunks), "")


def _last_chunk(text: str) -> str:
    chunks = re.split(rf"\s+|{NAME}|{ID}|{INDEX}", text.strip())
    return chunks[-1]


def _end_of(chunk: str, text: str, *, first: bool = False) -> int:
    """Return the end of a chunk's last or first place in a text; 0: the chunk is empty."""
    if not chunk:
        return 0
    at = text.find(chunk) if first else text.rfind(chunk)
    if at < 0:
        raise _Unlike
    return at + len(chunk)


# ------------------------------------------------------------------ arguments


def _arguments(form: CallForm, text: str, at: int, given: Mapping[str, str]) -> tuple[int, int, Any]:
    """Return the place of a call's arguments, and their notation as the template writes it."""
    notation = form.arguments
    if isinstance(notation, JsonArguments):
        begin = text.find("{", at)
        value, end = json.JSONDecoder().raw_decode(text, begin) if begin >= 0 else (None, 0)
        if value != given:
            raise _Unlike
        return begin, end, notation
    places = []
    for word in (word for pair in given.items() for word in pair):
        begin = text.find(word, at)
        if begin < 0:
            raise _Unlike
        at = begin + len(word)
        places.append((begin, at))
    if isinstance(notation, TaggedArguments):
        return _tagged(notation, text, places)
    (key, _), (value, value_end), (second, _), (_, end) = places
    if isinstance(notation, ElementArguments):
        closing = f"{notation.mark}</{text[second : second + len('probe_more')]}>"
        return key - len(notation.mark) - 1, end + len(closing), notation
    assert isinstance(notation, LiteralArguments)
    quote = text[value - 1] if not notation.mark else ""
    if quote and quote not in "'\"":
        raise _Unlike
    size = len(notation.mark) or 1
    separator = text[value_end + size : second]
    fitted = replace(notation, quote=quote or notation.quote, separator=separator)
    return key - len(notation.opens), end + size + len(notation.closes), fitted


def _tagged(
    notation: TaggedArguments, text: str, places: list[tuple[int, int]]
) -> tuple[int, int, TaggedArguments]:
    (key, key_end), (value, value_end), (second, _), (_, end) = places
    opening, closing = _first_chunk(notation.key.partition(KEY)[0]), notation.end.strip()
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


def _with_constants(
    chat_format: ChatFormat, render: RenderText, traits: TemplateTraits, tools: list[Mapping[str, Any]]
) -> ChatFormat:
    """Return the format with the words for true, false and null that the template writes into arguments."""
    form = chat_format.form
    if form is None or not isinstance(form.arguments, TaggedArguments | LiteralArguments):
        return chat_format
    notation, keys = form.arguments, [*ARGUMENTS[0]]
    if isinstance(notation, TaggedArguments) and notation.kinds:
        return chat_format
    given = dict(zip(keys, (True, False), strict=True))
    text = shown_calls(render, call_history(chat_format, traits, 1, arguments=[given]), tools)
    for words in (("true", "false", "null"), ("True", "False", "None")):
        if isinstance(notation, TaggedArguments):
            written = [notation.key.replace(KEY, key) + word for key, word in zip(keys, words, strict=False)]
        else:
            written = [key + notation.assigns + word for key, word in zip(keys, words, strict=False)]
        if all(part in text for part in written):
            fitted = replace(form, arguments=replace(notation, constants=words))
            return replace(chat_format, forms=(fitted, *chat_format.forms[1:]))
    return chat_format


def _with_numbers(
    chat_format: ChatFormat, render: RenderText, traits: TemplateTraits, tools: list[Mapping[str, Any]]
) -> ChatFormat:
    """Return the format with the numbers of calls that the template writes, where it keeps no ids."""
    form = chat_format.form
    if form is None or not (chat_format.numbers_ids or INDEX in form.head):
        return chat_format
    own = 70  # no template would come to it by counting
    asked, answer = call_history(chat_format, traits, 1)
    turns = []
    for name in NAMES:
        (call,) = answer["tool_calls"]
        given = f"functions.{name}:{own}" if chat_format.numbers_ids else IDS[NAMES.index(name)]
        named = {**call, "id": given, "function": {**call["function"], "name": name}}
        result = {"role": "tool", "name": name, "tool_call_id": named["id"], "content": RESULT}
        turns += [{**answer, "tool_calls": [named]}, result]
    text = shown_calls(render, [asked, *turns[:-1]], tools)
    head = re.escape(form.head).replace(INDEX, r"(\d+)")
    found = [re.search(head.replace(NAME, name), text[text.rfind(USER) :]) for name in NAMES]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) < len(NAMES) or numbers[0] == own:
        return chat_format
    forms = (replace(form, first_index=numbers[0]), *chat_format.forms[1:])
    return replace(chat_format, forms=forms, counts_calls=numbers[1] > numbers[0])


# ------------------------------------------------------------------ before calls


def _with_lead_of_text(chat_format: ChatFormat, render: RenderText) -> ChatFormat:
    """Return the format with the text between the prompt's end and an answer, as which calls are shown."""
    asked = {"role": "user", "content": USER}
    prompt = shown_text(render, [asked])
    text = shown_text(render, [asked, {"role": "assistant", "content": SAID}, asked])
    at = text.find(SAID, len(prompt))
    if at < 0 or not text.startswith(prompt):
        return chat_format
    return replace(chat_format, lead=text[len(prompt) : at])


def _with_lead(
    chat_format: ChatFormat,
    render: RenderText,
    traits: TemplateTraits,
    prompt: str,
    tools: list[Mapping[str, Any]],
) -> ChatFormat:
    """Return the format with the text between the prompt's end and a call, thinking and not."""
    form, section = chat_format.form, chat_format.reasoning
    assert form is not None
    plain = shown_calls(render, call_history(chat_format, traits, 1), tools)
    head = (form.begin + form.head).partition(NAME)[0].partition(ID)[0].partition(INDEX)[0]
    at = plain.find(head, plain.rfind(USER)) if head.strip() else -1
    lead = plain[len(prompt) : at] if at >= len(prompt) and plain.startswith(prompt) else None
    fitted = replace(chat_format, lead=lead)
    if section is None or traits.reasoning_field is None:
        return fitted
    text = shown_calls(render, call_history(chat_format, traits, 1, THOUGHT), tools)
    thought = text.rfind(THOUGHT)
    parts = (i for i, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1])
    before = text[: next(parts, min(len(prompt), len(text)))]
    at = text.find(head, thought) if head.strip() else -1
    if thought < len(before) or at < 0 or not prompt.startswith(before):
        return fitted
    between = text[thought + len(THOUGHT) : at]
    closing = next((mark for mark in section.closes if mark in between), None)
    opening = text[len(before) : thought]
    if closing is None or (prompt != before and not chat_format.opened_by(prompt)):
        return fitted
    size = between.index(closing) + len(closing)
    return replace(fitted, thinking=(opening, between[:size], between[size:]))
