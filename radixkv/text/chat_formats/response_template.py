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

#: Stands for white space until a text is whole.
_BLANK = "\0"

_Table = dict[str, Any]


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
    known_opens = map(str.strip, own.opens) if own is not None else ()
    is_same = reasoning is None or reasoning["opens"][0] in known_opens
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
            opens, closes = _marks(field, "open"), _marks(field, "close")
            if opens:
                table["spoken"] = {"opens": opens, "closes": closes}
            elif closes:
                table["dropped"] = closes
    return table


def _reasoning(fields: Mapping[str, Any]) -> _Table | None:
    """Return the declaration of reasoning; None: its beginning has no mark."""
    for name, field in fields.items():
        opens = _marks(field, "open") if name in _REASONING else []
        if opens:
            return {"opens": opens, "closes": _marks(field, "close")}
    return None


def _reads_calls(given: Mapping[str, Any], chat_format: ChatFormat) -> bool:
    """Return whether transformers reads by a template the calls that a format writes."""
    from transformers.utils.chat_parsing import parse_response  # heavy

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
    closes = _marks(field, "close")
    if arguments == ["content"] and len(name) == 1:
        groups, identity = {name[0]: NAME}, _placeholder(transform.get("id"))
        if len(identity) == 1:
            groups[identity[0]] = ID
        return _headed(_text(field.get("open_pattern", ""), groups).strip(), closes, _notation(field))
    if field.get("content") != "json":
        raise ValueError(f"calls in the notation {field.get('content', 'text')!r} need a group for the name")
    opens = _marks(field, "open")
    if not opens:
        raise ValueError("calls have no mark that opens them")
    return _objects(opens, closes, name[-1:], arguments[-1:], in_list=field.get("transform_each", False))


def _headed(opening: str, closes: list[str], arguments: _Table) -> _Table:
    """Return a form whose name stands in the text that opens a call."""
    head = " ".join(part for part in opening.split(" ") if not part.endswith("?")).strip()
    if NAME not in head:
        raise ValueError(f"the mark {head!r} of calls does not hold the name")
    opens = (chunk.partition(NAME)[0].partition(ID)[0] for chunk in _first(opening))
    form = {"head": head, "arguments": arguments, "tail": closes[0] if closes else ""}
    form["opens"] = list(dict.fromkeys(filter(None, opens)))
    if head != opening:
        form["reads"] = opening
    if len(closes) > 1:
        form["reads_tail"] = " ".join(f"{mark}?" for mark in closes)
    return form


def _first(text: str) -> Iterator[str]:
    """Yield the parts of a head that it may begin with."""
    for chunk in text.split():
        yield chunk.removesuffix("?")
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


def _marks(field: Mapping[str, Any], side: str) -> list[str]:
    """Return the marks at a side of a field, `open` or `close`, without white space around them."""
    given = field.get(side, [])
    texts = [given] if isinstance(given, str) else list(given)
    pattern = field.get(f"{side}_pattern")
    if pattern is not None:
        texts = [_text(pattern)]
    return list(filter(None, (text.strip() for text in texts)))


def _text(pattern: str, groups: Mapping[str, str] | None = None) -> str:
    """Return the text that a regular expression means. Any white space is a line break in it.

    Args:
        groups: name of a group -> the word that stands for it; None: the text is one mark, without groups,
            white space and parts that may be missing.

    Raises:
        ValueError: it means more than that.
    """
    around = _AT_ENDS.fullmatch(pattern)
    inner = around[1] if around is not None and (pattern[3:5] == "^|" or pattern[-3:] == "|$)") else pattern
    pieces, at = [], 0
    while at < len(inner):
        found = _PART.match(inner, at)
        group = None if found is None else found["group"] or found["again"]
        is_mark = found is not None and not (group or found["maybe"] or found["attributes"])
        if found is None or (not is_mark and groups is None) or (group and group not in (groups or {})):
            raise ValueError(f"the pattern {pattern!r} is more than a text with names in it")
        at = found.end()
        if group and groups is not None:
            pieces.append(groups[group])
        elif found["maybe"]:
            pieces.append(f" {_text(found['maybe'], groups)}? ")
        elif found["blank"]:
            pieces.append(_BLANK)
        elif found["attributes"]:
            pieces.append(" ")
        else:
            pieces.append(found["escaped"] or found["plain"] or "")
    text = "".join(pieces)
    if groups is None and _BLANK in text.strip(_BLANK):
        raise ValueError(f"the pattern {pattern!r} has white space within a mark")
    return text.replace(_BLANK, "\n")
