# SPDX-License-Identifier: Apache-2.0
"""Removal of keys from bodies, before they are inspected, stored or shown.

Headers and queries, where keys belong, are never shown. Here keys are removed elsewhere: from fields of
bodies that hold some, from URLs, and from texts that repeat the request's own key, however it is spelled,
also where a stream tells it in pieces. Definitions of tools and their servers lose all their headers and
environment variables, and keys in their command lines.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

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
#: Values of `type` by which an object under such a name is the schema of a field, and holds no key itself.
_SCHEMA_TYPES = frozenset({"string", "object", "array", "number", "integer", "boolean", "null"})
_SCHEMA_FIELDS = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"default", "const", "enum", "example", "examples", "value"})
_SECRET_QUERY = "password|passwd|pwd|secret|sig|signature|credential|auth|authorization|[a-z]*key|[a-z]*token"
_IN_URLS = re.compile(
    r"(:\\*/\\*/)(?:([^\s/?#:@\"'\\]*):[^\s/?#\"'\\]+|[^\s/?#:@\"'\\]{8,})(?=@)"
    rf"|(?<=[?&#;])((?:[\w.-]*[-_.])?(?:{_SECRET_QUERY}))=[^\s&#\"'\\]+",
    re.IGNORECASE,
)
#: Further names in the definition of a server of tools.
_KEY_OF_SERVER = re.compile(r"(?!.*cachekey).*key|.*auth|bearer|jwt|pat|session(?:id)?")
#: Fields that hold definitions of tools and their servers; fields of these with headers and variables.
_DEFINITIONS = frozenset({"tools", "functions", "mcp_servers", "mcpServers", "toolsets"})
_HEADERS_OR_VARIABLES = re.compile(r"[a-z]*headers?|env(?:ironment)?(?:variables|vars)?")
_PROSE = frozenset({"description", "title"})
#: Words of a command line: an option or a variable with its value, and a header.
_IN_COMMANDS = re.compile(
    r"(?<![\w./?&#-])(--?)?([a-z_][\w.-]{0,60})([ \"']*[=:][ \"']*|\s+)(?!\(key)"
    r"((?:(?:bearer|basic|token)\s+)?[^\s,;\"']+)",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"\b(bearer|basic)\s+(?=[^\s]*[0-9+/=_.-])[\w.~+/=-]{12,}", re.IGNORECASE)
_MIN_ENCODED = 12  # characters of base64 that stand for a key
_ESCAPED = re.compile(r"(?:\\+u00|%)([2-7][0-9a-fA-F])|\\+([/\"])")
#: Fields that say which of an answer's texts an event goes on with.
_PLACES = ("index", "output_index", "content_index", "type")


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
    told = _ToldTexts()
    exchange = replace(
        exchange,
        request=_cleaned(limits.unpacked(exchange.request, kind), hide, limits),
        response=_cleaned_answer(exchange.response, answer_kind, hide, limits, told),
        request_headers={},
        response_headers={},
    )
    record = exchange.record(limits=limits)
    if told.any_holds_key(hide):
        events = list(events_in(exchange.response.decode("utf-8", "replace")))
        whole = json.dumps(answer_of_events(events, record.dialect)).encode()
        exchange = replace(exchange, response=_cleaned(whole, hide, limits))
        record = exchange.record(limits=limits)
    return exchange, record


class _ToldTexts:
    """Texts that come in pieces, event by event of a stream; together the pieces may be a key."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Any, ...], list[str]] = {}

    def add(self, value: Any, place: tuple[Any, ...] = ()) -> None:
        """Add the strings of an event's data, each to the text of its place in an answer. O(size)."""
        if isinstance(value, str):
            self._pieces.setdefault(place, []).append(value)
        elif isinstance(value, list):
            for item in value:
                self.add(item, place)
        elif isinstance(value, dict):
            place += tuple(part for name in _PLACES if isinstance(part := value.get(name), str | int))
            for name, item in value.items():
                self.add(item, (*place, name))

    def any_holds_key(self, hide: Callable[[str], str]) -> bool:
        """Tell whether one of the texts, put together, holds a key."""
        texts = ("".join(pieces) for pieces in self._pieces.values() if len(pieces) > 1)
        return any(hide(text) != text for text in texts)


def _cleaned_answer(
    data: bytes, kind: str, hide: Callable[[str], str], limits: BodyLimits, told: _ToldTexts
) -> bytes:
    try:
        data = limits.unpacked(data, kind)
        if data.lstrip()[:1] in (b"{", b"["):
            return _cleaned(data, hide, limits)
        lines = data.decode("utf-8", "replace").split("\n")
        return "\n".join(_cleaned_line(line, hide, limits, told) for line in lines).encode()
    except NoRequest:
        return b""  # it can't be read


def _cleaned_line(line: str, hide: Callable[[str], str], limits: BodyLimits, told: _ToldTexts) -> str:
    """Return a line of an event stream without keys: its data is JSON, or text."""
    head, space, data = line.partition(" ")
    if head == "data:" and data[:1] == "{":
        try:
            return head + space + _cleaned(data.encode(), hide, limits, told).decode()
        except NoRequest:
            pass
    return hide(line)


def _cleaned(
    data: bytes, hide: Callable[[str], str], limits: BodyLimits, told: _ToldTexts | None = None
) -> bytes:
    """Return JSON without keys; JSON that has none stays unchanged byte for byte."""
    value = limits.parsed(data)
    if told is not None:
        told.add(value)
    cleaned = _without_keys(value, hide)
    return data if cleaned == value else json.dumps(cleaned).encode()


def _hiding(secrets: tuple[str, ...]) -> Callable[[str], str]:
    """Return a function that removes these secrets from a text, and keys from its URLs.

    A text may be JSON in JSON, so that any character of a key may be escaped, several times over.
    """
    known = tuple(form for secret in secrets for form in (secret, *_encoded_forms(secret)))

    def hide(text: str) -> str:
        plain = _ESCAPED.sub(_character, text) if "\\" in text or "%" in text else text
        for secret in known:
            if secret in plain or secret in text:
                text = re.sub("".join(map(_spelling, secret)), REMOVED, text)
        return _IN_URLS.sub(_without_value, text) if "://" in text or ":\\" in text else text

    return hide


def _encoded_forms(secret: str) -> set[str]:
    """Return how a key shows in a URL, and in base64 of a longer text at each of three offsets."""
    data, forms = secret.encode("utf-8", "surrogateescape"), {quote(secret, safe="", errors="replace")}
    for offset in range(3):
        whole = base64.b64encode(bytes(offset) + data).decode().rstrip("=")
        inner = whole[-(-offset * 4 // 3) : (offset + len(data)) * 8 // 6]  # of the key's bits alone
        forms.update((inner, inner.replace("+", "-").replace("/", "_")))
    return {form for form in forms if len(form) >= _MIN_ENCODED}


def _spelling(character: str) -> str:
    plain = re.escape(character)
    if character in '/"\\':
        plain = rf"\\*{plain}"
    code = f"{ord(character):04x}"
    return rf"(?:{plain}|(?i:\\+u{code}|%{code[2:]}))"


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else found[2]


def _without_value(found: re.Match[str]) -> str:
    start, user, parameter = found.groups()
    if parameter:
        return f"{parameter}={REMOVED}"
    return f"{start}{REMOVED}" if user is None else f"{start}{user}:{REMOVED}"


def _without_keys(
    value: Any, hide: Callable[[str], str], *, names_fields: bool = False, defines: bool = False
) -> Any:
    """Return JSON data without keys.

    Args:
        names_fields: the names of this object are those of fields, and its values their schemas.
        defines: it is in the definition of a tool or of a server.
    """
    if isinstance(value, str):
        return _without_credentials(hide(value)) if defines else hide(value)
    if isinstance(value, list):
        return _list_without_keys(value, hide, defines=defines)
    if not isinstance(value, dict):
        return value
    named = (value.get(field) for field in ("name", "key", "header"))
    is_pair = any(isinstance(name, str) and _is_key_name(name) for name in named)
    cleaned = {}
    for name, item in value.items():
        below = defines or name in _DEFINITIONS
        holds_key = _is_key_name(name) or (is_pair and name.lower() == "value")
        holds_key = holds_key or (defines and isinstance(item, str) and _is_key_of_server(name))
        is_schema = isinstance(item, dict) and (names_fields or _is_schema(item))
        has_headers = (defines or "server_url" in value or name == "extra_headers") and not is_schema
        if holds_key and is_schema:
            inner = {key: _removed(part) if key in _VALUES else part for key, part in item.items()}
            cleaned[hide(name)] = _without_keys(inner, hide, defines=below)
        elif (holds_key and not _is_token(item, value)) or (has_headers and _holds_headers(name, item)):
            cleaned[hide(name)] = _removed(item)
        elif below and isinstance(item, str) and name in _PROSE:
            cleaned[hide(name)] = hide(_CREDENTIALS.sub(_without_credential, item))
        else:
            cleaned[hide(name)] = _without_keys(item, hide, names_fields=name in _OF_SCHEMAS, defines=below)
    return cleaned


def _list_without_keys(items: list[Any], hide: Callable[[str], str], *, defines: bool) -> list[Any]:
    """Return a list without keys: also of pairs of a name and a value, and of words of a command line."""
    cleaned: list[Any] = []
    after_option = False
    for item in items:
        is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
        if is_pair and isinstance(item[1], str) and _is_key_name(item[0]):
            cleaned.append([hide(item[0]), REMOVED])
        elif after_option and isinstance(item, str) and item[:1] != "-":
            cleaned.append(REMOVED)
        else:
            cleaned.append(_without_keys(item, hide, defines=defines))
        after_option = defines and isinstance(item, str) and item[:1] == "-" and _is_key_name(item)
    return cleaned


def _without_credentials(text: str) -> str:
    """Return a word or a line of a command without the keys that it sets."""
    text = _CREDENTIALS.sub(_without_credential, text)
    if "=" not in text and ":" not in text and "-" not in text:
        return text
    at, pieces = 0, []
    while (found := _IN_COMMANDS.search(text, at)) is not None:
        dashes, name, sign, _ = found.groups()
        if _is_key_name(name) and (dashes or not sign.isspace()):
            pieces += [text[at : found.end(3)], REMOVED]
            at = found.end()
        else:
            pieces.append(text[at : found.end(2)])
            at = found.end(2)
    return "".join((*pieces, text[at:])) if pieces else text


def _without_credential(found: re.Match[str]) -> str:
    return f"{found[1]} {REMOVED}"


def _holds_headers(name: str, item: Any) -> bool:
    """Return whether a field of a definition has headers or variables; environments of a kind have others."""
    if isinstance(item, dict) and isinstance(item.get("type"), str):
        return False
    return len(name) <= _MAX_NAME and bool(_HEADERS_OR_VARIABLES.fullmatch(_letters(name)))


@functools.lru_cache(4096)
def _is_key_name(name: str) -> bool:
    if len(name) > _MAX_NAME:
        return False
    return _KEY_NAME.fullmatch(_letters(name)) is not None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _is_key_of_server(name: str) -> bool:
    return len(name) <= _MAX_NAME and bool(_KEY_OF_SERVER.fullmatch(_letters(name)))


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
