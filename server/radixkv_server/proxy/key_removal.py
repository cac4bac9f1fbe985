# SPDX-License-Identifier: Apache-2.0
"""Removal of keys from bodies, before they are inspected, stored or shown.

Headers and queries, where keys belong, are never shown. Here keys are removed elsewhere: from fields of
bodies that hold some, from URLs, and from texts that repeat the request's own key, however it is spelled,
also where a stream tells it in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.exchange import SECRET_PARAMETERS, Exchange
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.response_bodies import answer_of_events, events_in

REMOVED = "(key removed)"
#: Fields of bodies that hold keys, of the model's API or of servers of tools: in lower case, without - and _.
_KEY_FIELDS = frozenset(
    {"apikey", "xapikey", "xgoogapikey", "apitoken", "authorization"}
    | {"proxyauthorization", "authorizationtoken", "authtoken", "xauthtoken", "accesstoken"}
    | {"refreshtoken", "idtoken", "bearertoken", "sessiontoken", "token"}
    | {"password", "passwd", "passphrase", "cookie", "setcookie"}
    | {"secret", "clientsecret", "secretkey", "secretaccesskey", "accesskey"}
    | {"accesskeyid", "privatekey", "credentials", "subscriptionkey", "awssecretaccesskey"}
    | {"awsaccesskeyid", "awssessiontoken", "ocpapimsubscriptionkey"}
)
#: An object of one of these is the schema of a field, and holds no key.
_SCHEMA_FIELDS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "description"})
_IN_URLS = re.compile(
    r"(?<=://)([^\s/?#:@\"'\\]*):[^\s/?#@\"'\\]+(?=@)"
    rf"|(?<=[?&])({'|'.join((*SECRET_PARAMETERS, 'password', 'secret', 'sig'))})=[^\s&#\"'\\]+",
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
        return _IN_URLS.sub(_without_value, text) if "://" in text else text

    return hide


def _spelling(character: str) -> str:
    plain = re.escape(character)
    if character in '/"\\':
        plain = rf"\\*{plain}"
    return rf"(?:{plain}|\\+u{ord(character):04x}|\\+u{ord(character):04X})"


def _character(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else found[2]


def _without_value(found: re.Match[str]) -> str:
    return f"{found[2]}={REMOVED}" if found[2] else f"{found[1]}:{REMOVED}"


def _without_keys(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list):
        return [_without_keys(item, hide) for item in value]
    if isinstance(value, dict):
        return {
            hide(name): _removed(item) if _is_key_field(name, value) else _without_keys(item, hide)
            for name, item in value.items()
        }
    return value


def _is_key_field(name: str, holder: Mapping[str, Any]) -> bool:
    """Return whether a field holds a key; the `token` of a log probability is a piece of text."""
    if name.lower().replace("-", "").replace("_", "") not in _KEY_FIELDS:
        return False
    value = holder[name]
    if isinstance(value, dict):
        return not _SCHEMA_FIELDS & value.keys() and "logprob" not in value
    return "logprob" not in holder


def _removed(value: Any) -> Any:
    """Return a field's value without any text or number in it."""
    if isinstance(value, list):
        return [_removed(item) for item in value]
    if isinstance(value, dict):
        return {name: _removed(item) for name, item in value.items()}
    return value if value is None or isinstance(value, bool) else REMOVED
