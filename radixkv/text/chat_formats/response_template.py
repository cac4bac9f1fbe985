# SPDX-License-Identifier: Apache-2.0
r"""A tokenizer's own response template (transformers), as the declaration of a chat format that it is.

A response template names fields of a message, each with the marks around its text and a parser for it:

    thinking:    open "<musing>"                        reasoning = {opens = ["<musing>"],
                 close "</musing>"                                   closes = ["</musing>"]}
    tool_calls:  open_pattern "<use (?P<name>\w+)>\s*"  head = "<use NAME>", opens = ["<use"]
                 close "</use>"                         tail = "</use>"
                 content json                           arguments = {notation = "json"}

Its patterns are read as the texts that they mean. One that means more than a text with names in it, and a
parser that no notation is like, can't be declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from radixkv.text.chat_formats.calls import ID, NAME
from radixkv.text.chat_formats.declaration import declared_format
from radixkv.text.chat_formats.derive import ARGUMENTS, CALLS, NAMES, reads_as
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.tagged_arguments import KEY

RESPONSE_TEMPLATE = "response-template"
_REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
_CALLS_FIELD = "tool_calls"
#: Stands for a value in the text of a pattern.
_VALUE = "VALUE"
#: Parts of a pattern, the first that fits: a group with a name, the same text once more, a text that may be
#: missing, any attributes of a tag, white space, an escaped character, and a character that means itself.
_PART = re.compile(
    r"\(\?P<(?P<group>\w+)>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\\])*\)|\(\?P=(?P<again>\w+)\)"
    r"|\(\?:(?P<maybe>(?:\\.|[^()|\\])*)\)\?|(?P<attributes>\\b\[\^>\]\*\??\\b)|\[\^>\]\*\??"
    r"|(?P<blank>\\[sn][*+?]?\??|\n)|\\(?P<escaped>\W)|(?P<plain>[^\\.^$*+?{}\[\]|()])"
)
#: A pattern that matches a text's beginning, or its end, too.
_AT_ENDS = re.compile(r"\(\?:(?:\^\|)?(.*?)(?:\|\$)?\)", re.DOTALL)

_Table = dict[str, Any]
_NO_GROUPS: Mapping[str, str] = {}


def with_response_template(chat_format: ChatFormat, given: Mapping[str, Any]) -> ChatFormat:
    """Return the format with the marks and calls of a response template, unless it reads the same anyway.

    Args:
        given: the template's data in a `tokenizer_config.json`.

    Raises:
        ValueError: it is not a response template of this version, or can't be declared.
    """
    # transformers takes seconds to import.
    from transformers.utils.chat_parsing.response_templates import load_response_template

    load_response_template(dict(given))
    reasoning, own = _reasoning(given["fields"]), chat_format.reasoning
    is_same = reasoning is None or (own is not None and reasoning["opens"][0] in own.opens)
    if is_same and chat_format.is_known and _reads_calls(given, chat_format):
        return chat_format
    try:
        declared = declared_format(declaration_of(given))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"an option of a parser has another form than is known: {error!r}") from error
    known = replace(
        chat_format,
        forms=(*declared.forms, *chat_format.forms),
        reasoning=declared.reasoning if reasoning is not None else own,
        spoken=declared.spoken or chat_format.spoken,
        dropped=tuple(dict.fromkeys((*chat_format.dropped, *declared.dropped))),
        is_known=True,
    )
    if declared.forms and not reads_as(known, declared.write_calls(CALLS), len(CALLS)):
        raise ValueError(f"calls written as {declared.write_calls(CALLS)!r} are not read as such")
    return known if chat_format.is_known else replace(known, name=RESPONSE_TEMPLATE)


def declaration_of(given: Mapping[str, Any]) -> _Table:
    """Return the declaration of a chat format that a response template amounts to, as TOML would give it.

    Raises:
        ValueError: a pattern or a parser can't be declared; the message names it.
    """
    table: _Table = {"name": RESPONSE_TEMPLATE}
    reasoning = _reasoning(given["fields"])
    if reasoning is not None:
        table["reasoning"] = reasoning
    for name, field in given["fields"].items():
        if name == _CALLS_FIELD:
            table["forms"] = [_form(field)]
        elif name not in _REASONING:  # it is content
            opens, closes = _texts(field, "open"), _texts(field, "close")
            if opens:
                table["spoken"] = {"opens": opens, "closes": closes}
            elif closes:
                table["dropped"] = closes
    return table


def _reasoning(fields: Mapping[str, Any]) -> _Table | None:
    """Return the declaration of reasoning; None: its beginning has no mark."""
    for name, field in fields.items():
        opens = _texts(field, "open") if name in _REASONING else []
        if opens:
            return {"opens": opens, "closes": _texts(field, "close")}
    return None


def _reads_calls(given: Mapping[str, Any], chat_format: ChatFormat) -> bool:
    """Return whether transformers reads by a template the calls that a format writes."""
    from transformers.utils.chat_parsing import parse_response

    if _CALLS_FIELD not in given["fields"]:
        return True
    if chat_format.form is None:
        return False
    try:
        found = parse_response(chat_format.write_calls(CALLS), dict(given), prefix="").get(_CALLS_FIELD) or []
        functions = [call.get("function", call) for call in found]
        calls = [(function["name"], function["arguments"]) for function in functions]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return calls == list(zip(NAMES, ARGUMENTS, strict=True))


# ---------------------------------------------------------------------- calls


def _form(field: Mapping[str, Any]) -> _Table:
    """Return the form of calls that a field declares."""
    transform = field["transform"] if isinstance(field.get("transform"), dict) else {}
    function = transform.get("function", transform)
    names = function if isinstance(function, dict) else {}
    name, arguments = (_placeholder(names.get(part)) for part in ("name", "arguments"))
    is_captured = arguments == ["content"] and len(name) == 1
    groups = {name[0]: NAME} if is_captured else {}
    identity = _placeholder(transform.get("id"))
    if len(identity) == 1:
        groups[identity[0]] = ID
    opens, closes = _texts(field, "open", groups), _texts(field, "close")
    if not opens:
        raise ValueError("calls have no mark that opens them")
    if is_captured:
        return _headed(opens, closes, _notation(field))
    if field.get("content") != "json":
        raise ValueError(f"calls in the notation {field.get('content', 'text')!r} need a group for the name")
    return _objects(opens, closes, name[-1:], arguments[-1:], in_list=field.get("transform_each", False))


def _headed(opens: list[str], closes: list[str], arguments: _Table) -> _Table:
    """Return a form whose name stands in the opening mark."""
    written = [" ".join(part for part in text.split(" ") if not part.endswith("?")) for text in opens]
    head = written[0].strip()
    if NAME not in head:
        raise ValueError(f"the mark {head!r} of calls does not hold the name")
    chunks = [chunk.partition(NAME)[0].partition(ID)[0] for text in opens for chunk in _first(text)]
    form = {"head": head, "arguments": arguments, "tail": closes[0] if closes else ""}
    form["opens"] = list(dict.fromkeys(filter(None, chunks)))
    if head != opens[0]:
        form["reads"] = opens[0]
    if len(closes) > 1:
        form["reads_tail"] = " ".join(f"{mark}?" for mark in closes)
    return form


def _first(text: str) -> Iterator[str]:
    """Yield the parts of a head that it may begin with."""
    for chunk in text.split():
        yield chunk.removesuffix("?") if chunk != "?" else chunk
        if not chunk.endswith("?"):
            return


def _objects(
    opens: list[str], closes: list[str], name: list[str], arguments: list[str], *, in_list: bool
) -> _Table:
    """Return a form whose calls are JSON objects, alone or in a list."""
    keys = [*(name or ["name"]), *(arguments or ["arguments"])]
    head, tail = f'{{"{keys[0]}": "{NAME}", "{keys[1]}": ', "}"
    opening, closing = opens[0], closes[0] if closes else ""
    form: _Table = {"opens": opens, "closes": closes}
    form["arguments"] = {
        "notation": "member",
        "name_keys": list(dict.fromkeys([keys[0], "name"])),
        "arguments_keys": list(dict.fromkeys([keys[1], "arguments", "parameters"])),
    }
    if in_list:
        around = {"begin": f"{opening}[", "between": ", ", "end": f"]{closing}"}
        return {**form, **around, "head": head, "tail": tail}
    return {**form, "head": opening + head, "tail": tail + closing}


def _placeholder(value: Any) -> list[str]:
    """Return the path in a placeholder `{content.name}`; empty: it is none."""
    found = re.fullmatch(r"\{(\w+(?:\.\w+)*)\}", value) if isinstance(value, str) else None
    return found[1].split(".") if found is not None else []


def _notation(field: Mapping[str, Any]) -> _Table:
    """Return the notation of arguments between the marks of a field."""
    options = field.get("content_args") or {}
    kind, marks = field.get("content", "text"), options.get("string_delims") or []
    if kind == "json" and not marks and not options.get("unquoted_keys"):
        return {"notation": "json"}
    if kind == "json" and len(marks) == 1 and marks[0][0] == marks[0][1]:
        around = {"opens": "{", "closes": "}", "assigns": ":", "separator": ","}
        words = ["true", "false", "null"]
        return {"notation": "literals", "mark": marks[0][0], "constants": words, **around}
    if kind == "xml-inline":
        text = _text(options.get("tag_pattern", ""), {"key": KEY, "value": _VALUE})
        if text.endswith(f"<{KEY}>{_VALUE}</{KEY}>"):
            return {"notation": "elements", "mark": text.removesuffix(f"<{KEY}>{_VALUE}</{KEY}>")}
        key, value, end = text.partition(_VALUE)
        if KEY in key and value and end.strip():
            padded = key.endswith("\n") and end.startswith("\n")
            end = f"{end.rstrip()}\n"
            return {"notation": "tags", "key": key, "end": end, "between": "", "padded": padded}
    raise ValueError(f"no notation of arguments is like its parser {kind!r} with {options}")


# ---------------------------------------------------------------------- marks


def _texts(field: Mapping[str, Any], side: str, groups: Mapping[str, str] = _NO_GROUPS) -> list[str]:
    """Return the marks at a side of a field, `open` or `close`."""
    given = field.get(side, [])
    texts = [given] if isinstance(given, str) else list(given)
    pattern = field.get(f"{side}_pattern")
    if pattern is not None:
        texts = [_text(pattern, groups)]
    return list(filter(None, (text.strip() for text in texts)))


def _text(pattern: str, groups: Mapping[str, str]) -> str:
    """Return the text that a regular expression means, with words for its groups and line breaks for blanks.

    Raises:
        ValueError: it means more than that.
    """
    around = _AT_ENDS.fullmatch(pattern)
    if around is not None and (pattern.startswith("(?:^|") or pattern.endswith("|$)")):
        pattern = around[1]
    pieces, at = [], 0
    while at < len(pattern):
        found = _PART.match(pattern, at)
        if found is None:
            raise ValueError(f"the pattern {pattern!r} is more than a text with names in it")
        at = found.end()
        group = found["group"] or found["again"]
        if group:
            pieces.append(groups.get(group, "WORD"))
        elif found["maybe"]:
            pieces.append(f" {_text(found['maybe'], groups)}? ")
        elif found["blank"]:
            pieces.append("\n")
        elif found["attributes"]:
            pieces.append(" ")
        else:
            pieces.append(found["escaped"] or found["plain"] or "")
    return "".join(pieces)
