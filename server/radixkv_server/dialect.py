# SPDX-License-Identifier: Apache-2.0
"""Dialect: an API's form of errors and framing of streams, and the paths that it applies to.

Nothing below the APIs knows a shape of errors or events: the middlewares, the protocol and the streams ask
the dialect of the request's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import APIRouter
from pydantic import BaseModel
from pydantic_core import to_json

from radixkv.text.safe_text import without_surrogates
from radixkv_server.errors import ApiError
from radixkv_server.tenants.registry import LimitState

Json = dict[str, Any]

# Where the long lists of an answer are: of token logprobs, in its choices.
LEVELS_IN_PIECES = 4
ITEMS_IN_A_PIECE = 64


class Dialect(Protocol):
    """Differences between APIs outside of their routes."""

    @property
    def ping(self) -> bytes:
        """Return the frame that keeps an idle stream from timing out."""

    def error_body(self, error: ApiError, request_id: str | None) -> Json:
        """Return the body of an error's answer; `request_id` is None if the request could not be read."""

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        """Return the framed error that ends a begun stream."""

    def limit_headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        """Return headers that tell a caller the remainders of its limits."""


def dump(value: Any) -> bytes:
    """Return compact JSON as UTF-8, by pydantic's encoder: a quarter of the time of the standard library's.

    Values may contain text of any origin: lone surrogates, which have no UTF-8, are replaced by U+FFFD.
    """
    try:
        return to_json(value)
    except ValueError:
        return to_json(without_surrogates(value))


def dump_in_pieces(value: Json) -> bytes:
    """Yield the result of `dump` in pieces, so that other threads run in between. Keys must be strings."""
    return b"".join(_pieces(value, LEVELS_IN_PIECES))


def _pieces(value: Any, levels: int) -> Iterator[bytes]:
    if levels and isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if number else b"{", dump(key))
            yield from _pieces(item, levels - 1)
        yield b"}" if value else b"{}"
    elif levels and isinstance(value, list):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(item, levels - 1)
        yield b"]" if value else b"[]"
    elif isinstance(value, list) and value:
        for start in range(0, len(value), ITEMS_IN_A_PIECE):
            yield b"," if start else b"["
            yield dump(value[start : start + ITEMS_IN_A_PIECE])[1:-1]
        yield b"]"
    else:
        yield dump(value)


@dataclass(frozen=True, slots=True)
class Api:
    """API of the server: its routes, and the dialect of paths below a prefix.

    Args:
        dialects: path prefix -> dialect, as `{"/v1/messages": ...}`. The longest prefix that ends where a
            segment of the path does applies; `/` is the dialect of everything else.
        bodies: operation (`POST /v1/messages`) -> the model of its body, for the OpenAPI document.
        queries: operation -> names of its query parameters, likewise.
        open_paths: paths that need no key, as they reveal nothing of anybody's requests.
        generating: paths, without parameters, whose POSTs generate: refused while the queue is full.
    """

    router: APIRouter
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    bodies: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    queries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    open_paths: frozenset[str] = frozenset()
    generating: frozenset[str] = frozenset()


class Dialects:
    """Dialects by path.

    Args:
        by_prefix: as `Api.dialects`; `/` must be among them.
    """

    def __init__(self, by_prefix: Mapping[str, Dialect]) -> None:
        assert "/" in by_prefix, "some dialect must answer for unknown paths"
        longest_first = sorted(by_prefix, key=len, reverse=True)
        self._by_prefix = [(prefix.rstrip("/"), by_prefix[prefix]) for prefix in longest_first]

    def of(self, path: str) -> Dialect:
        """Return the dialect of a path, known or not. O(prefixes)."""
        return next(
            dialect
            for prefix, dialect in self._by_prefix
            if path == prefix or path.startswith(prefix + "/") or not prefix
        )
