"""Keys removed from bodies before anything of them is looked at, kept or shown.

Headers and queries, where keys belong, are never shown. This removes keys elsewhere: from fields of bodies
that hold some, and from texts that repeat the request's own key, also where a stream tells it in pieces.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from radixkv.observe.audit.exchange import Exchange, read_json, unpacked
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.observe.audit.response_bodies import answer_of_events, events_in

REMOVED = "(key removed)"
#: Fields of bodies that hold keys, of the model's API or of servers of tools.
_FIELDS = (
    *("api_key", "apikey", "api-key", "x-api-key", "authorization", "authorization_token", "access_token"),
    *("password", "client_secret", "secret_key", "aws_secret_access_key", "aws_session_token"),
)
_KEY_FIELDS = frozenset(_FIELDS)
_HOLDS_FIELD = re.compile(b'"(?:%b)"' % b"|".join(name.encode() for name in _FIELDS), re.IGNORECASE)


def record_without_keys(exchange: Exchange, secrets: tuple[str, ...]) -> tuple[Exchange, Record]:
    """A request and its answer, and the record of them, that tell no key. O(size).

    Args:
        secrets: the keys that it came with, longest first.

    Raises:
        NoRequest: it is no request to a model.
    """
    kind = exchange.request_headers.get("content-encoding", "")
    answer_kind = exchange.response_headers.get("content-encoding", "")
    exchange = replace(
        exchange,
        request=_cleaned(unpacked(exchange.request, kind), secrets),
        response=_cleaned_answer(exchange.response, answer_kind, secrets),
        request_headers={},
        response_headers={},
    )
    record = exchange.record()
    if any(secret in block.text for block in record.answer for secret in secrets):  # told in pieces
        events = list(events_in(exchange.response.decode("utf-8", "replace")))
        whole = json.dumps(answer_of_events(events, record.dialect)).encode()
        exchange = replace(exchange, response=_cleaned(whole, secrets))
        record = exchange.record()
    return exchange, record


def _cleaned_answer(data: bytes, kind: str, secrets: tuple[str, ...]) -> bytes:
    try:
        data = unpacked(data, kind)
        return _cleaned(data, secrets) if data.lstrip()[:1] in (b"{", b"[") else _without(data, secrets)
    except NoRequest:
        return b""  # it can't be read


def _cleaned(data: bytes, secrets: tuple[str, ...]) -> bytes:
    """JSON without keys, as it was where it has none."""
    if not _HOLDS_FIELD.search(data) and not any(form in data for one in secrets for form in _forms(one)):
        return data
    return json.dumps(_without_keys(read_json(data), secrets)).encode()


def _without(text: bytes, secrets: tuple[str, ...]) -> bytes:
    for secret in secrets:
        for form in _forms(secret):
            text = text.replace(form, REMOVED.encode())
    return text


def _forms(secret: str) -> tuple[bytes, ...]:
    """How a key may stand in JSON."""
    spellings = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return tuple(form.encode() for form in spellings)


def _without_keys(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REMOVED)
        return value
    if isinstance(value, list):
        return [_without_keys(item, secrets) for item in value]
    if isinstance(value, dict):
        return {
            _without_keys(name, secrets): REMOVED
            if name.lower() in _KEY_FIELDS and isinstance(item, str)
            else _without_keys(item, secrets)
            for name, item in value.items()
        }
    return value
