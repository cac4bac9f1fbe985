# SPDX-License-Identifier: Apache-2.0
"""Removal of keys from bodies, before they are inspected, stored or shown.

Headers and queries, where keys belong, are never shown. Here keys are removed elsewhere: from fields of
bodies that hold some, from URLs, and from texts that repeat the request's own key, however it is spelled,
also where a stream tells it in pieces.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.exchange import Exchange
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.response_bodies import answer_of_events, events_in

REMOVED = "(key removed)"
#: Names of fields that hold keys, of an API or of servers of tools: in lower case, letters and digits
#: alone. Counts and lists of a model's tokens are none.
_KEY_NAME = re.compile(
    r".*(?:password|passwd|passphrase|secret|cookie|credential"
    r"|(?:api|access|secret|private|subscription|encryption|signing|auth)key)s?"
    r"|.*(?:token|authorization|accesskeyid)"
    r"|(?:api|auth|access|refresh|bearer|session)tokens|(?:basic|o)?auth|pass|pwd"
)
_MAX_NAME = 100
#: What an object under such a name has as its `type` if it is the schema of a field, and holds no key itself.
_SCHEMA_TYPES = frozenset({"string", "object", "array", "number", "integer", "boolean", "null"})
_SCHEMA_FIELDS = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"default", "const", "enum", "example", "examples", "value"})
_SECRET_QUERY = "password|passwd|pwd|secret|sig|signature|credential|auth|authorization|[a-z]*key|[a-z]*token"
_IN_URLS = re.compile(
    r"(:\\*/\\*/)(?:([^\s/?#:@\"'\\]*):[^\s/?#\"'\\]+|[^\s/?#:@\"'\\]{20,})(?=@)"
    rf"|(?<=[?&#;])((?:[\w.-]*[-_.])?(?:{_SECRET_QUERY}))=[^\s&#\"'\\]+",
    re.IGNORECASE,
)
_ESCAPED = re.compile(r"\\+(?:u00([2-7][0-9a-fA-F])|([/\"]))")


def record_without_keys(
    exchange: Exchange, secrets: tuple[str, ...], limits: BodyLimits
) -> tuple[Exchange, Record]:
    """Return a request with its answer, and the record of them, without any key. O(size).

    Args:
        secrets: the keys that it came with, longest first.

    Raises:
        NoRequest: it is no request to a model, or above the limits.
    """
    hide = _hiding(secrets)
    kind = exchange.request_headers.get("content-encoding", "")
    answer_kind = exchange.response_headers.get("content-encoding", "")
    exchange = replace(
        exchange,
        request=_cleaned(limits.unpacked(exchange.request, kind), hide, limits),
        response=_cleaned_answer(exchange.response, answer_kind, hide, limits),
        request_headers={},
        response_headers={},
    )
    record = exchange.record(limits=limits)
    if any(hide(text) != text for block in record.answer for text in (block.text, block.name)):
        events = list(events_in(exchange.response.decode("utf-8", "replace")))  # told in pieces
        whole = json.dumps(answer_of_events(events, record.dialect)).encode()
        exchange = replace(exchange, response=_cleaned(whole, hide, limits))
        record = exchange.record(limits=limits)
    return exchange, record


def _cleaned_answer(data: bytes, kind: str, hide: Callable[[str], str], limits: BodyLimits) -> bytes:
    try:
        data = limits.unpacked(data, kind)
        if data.lstrip()[:1] in (b"{", b"["):
            return _cleaned(data, hide, limits)
        return hide(data.decode("utf-8", "replace")).encode()
    except NoRequest:
        return b""  # it can't be read


def _cleaned(data: bytes, hide: Callable[[str], str], limits: BodyLimits) -> bytes:
    """Return JSON without keys; JSON that has none stays unchanged byte for byte."""
    value = limits.parsed(data)
    cleaned = _without_keys(value, hide)
    return data if cleaned == value else json.dumps(cleaned).encode()


def _hiding(secrets: tuple[str, ...]) -> Callable[[str], str]:
    """Return a function that removes these secrets from a text, and keys from its URLs.

    A text may be JSON in JSON, so that any character of a key may be escaped, several times over.
    """
    spellings = [(secret, re.compile("".join(map(_spelling, secret)))) for secret in secrets]

    def hide(text: str) -> str:
        plain = _ESCAPED.sub(_character, text) if "\\" in text else text
        for secret, spelling in spellings:
            if secret in plain or secret in text:
                text = spelling.sub(REMOVED, text)
        return _IN_URLS.sub(_without_value, text) if "://" in text or ":\\" in text else text

    return hide


def _spelling(character: str) -> str:
    plain = re.escape(character)
    if character in '/"\\':
        plain = rf"\\*{plain}"
    return rf"(?:{plain}|\\+u{ord(character):04x}|\\+u{ord(character):04X})"


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else found[2]


def _without_value(found: re.Match[str]) -> str:
    start, user, parameter = found.groups()
    if parameter:
        return f"{parameter}={REMOVED}"
    return f"{start}{REMOVED}" if user is None else f"{start}{user}:{REMOVED}"


def _without_keys(value: Any, hide: Callable[[str], str], *, names_fields: bool = False) -> Any:
    """Return JSON data without keys.

    Args:
        names_fields: the names of this object are those of fields, and its values their schemas.
    """
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list):
        return [_without_keys(item, hide) for item in value]
    if not isinstance(value, dict):
        return value
    is_pair = isinstance(value.get("name"), str) and _is_key_name(value["name"])
    cleaned = {}
    for name, item in value.items():
        holds_key = _is_key_name(name) or (is_pair and name == "value")
        if holds_key and isinstance(item, dict) and (names_fields or _is_schema(item)):
            inner = {key: _removed(part) if key in _VALUES else part for key, part in item.items()}
            cleaned[hide(name)] = _without_keys(inner, hide)
        elif (holds_key and not _is_token(item, value)) or (name == "headers" and "server_url" in value):
            cleaned[hide(name)] = _removed(item)
        else:
            cleaned[hide(name)] = _without_keys(item, hide, names_fields=name in _OF_SCHEMAS)
    return cleaned


@functools.lru_cache(4096)
def _is_key_name(name: str) -> bool:
    if len(name) > _MAX_NAME:
        return False
    return _KEY_NAME.fullmatch(re.sub("[^a-z0-9]", "", name.lower())) is not None


def _is_schema(value: Mapping[str, Any]) -> bool:
    kind = value.get("type")
    is_type = kind in _SCHEMA_TYPES if isinstance(kind, str) else isinstance(kind, list)
    return is_type or not _SCHEMA_FIELDS.isdisjoint(value)


def _is_token(value: Any, holder: Mapping[str, Any]) -> bool:
    """Return whether a field called `token` is a piece of text with its log probability."""
    return "logprob" in (value if isinstance(value, dict) else holder)


def _removed(value: Any) -> Any:
    """Return a field's value without any text or number in it."""
    if isinstance(value, list):
        return [_removed(item) for item in value]
    if isinstance(value, dict):
        return {name: _removed(item) for name, item in value.items()}
    return value if value is None or isinstance(value, bool) else REMOVED
