# SPDX-License-Identifier: Apache-2.0
"""Redaction: texts of requests and answers replaced by hashes that preserve common beginnings.

    "Find the port of Bergen."       ->   "kQ3x 0fT mZ1p 9s b7Tq2aL0"

Each word becomes a hash of as many characters under a key that is stored nowhere, so that texts stay equal up
to their first difference, and nothing can be read or guessed. Values with a meaning in the API (roles, types,
models, counts, times) stay.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import Any

_WORD = re.compile(r"\S{1,16}")  # of longer ones each sixteen characters
#: Fields whose strings are an API's own words.
_PLAIN = frozenset(
    {"role", "type", "model", "object", "finish_reason", "stop_reason", "status", "mode", "ttl", "effort"}
    | {"service_tier", "truncation", "prompt_cache_retention", "verbosity", "reasoning_effort"}
)
_MAX_PLAIN = 64
#: Fields with schemas by name: fields of the schemas are an API's.
_SCHEMAS = frozenset({"properties", "$defs", "patternProperties", "definitions"})
#: Fields of objects whose own fields are the client's words: properties of a schema, and arguments.
_NAMES_ARE_TEXT = _SCHEMAS | {"input", "arguments", "metadata", "logit_bias"}
#: Numbers of a schema that are the client's.
_NUMBERS_ARE_TEXT = frozenset({"default", "const", "minimum", "maximum", "multipleOf"})
_FIELD = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$-]{0,63}")


class Redaction:
    """Replacement of texts by hashes under a key of its own.

    Args:
        key: gives the same hashes as another object with this key; None: a random one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def text(self, text: str) -> str:
        """Replace each word of a text by its hash. O(n)."""
        return _WORD.sub(self._word, text)

    def _word(self, found: re.Match[str]) -> str:
        word = found[0].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(word, key=self._key, digest_size=12).digest()
        return base64.urlsafe_b64encode(digest).decode()[: len(found[0])]

    def value(self, value: Any, name: str = "", *, is_text: bool = False) -> Any:
        """Replace the texts of JSON data; names of fields stay if they belong to an API. O(n).

        Args:
            is_text: all of it is the client's, even names of fields, numbers and an API's words.
        """
        if isinstance(value, str):
            is_plain = name in _PLAIN and len(value) <= _MAX_PLAIN and " " not in value and not is_text
            return value if is_plain else self.text(value)
        if isinstance(value, list):  # items of Responses are its `input`: objects of an API's fields
            inner = "" if name == "input" else name
            return [self._item(item, inner, is_text=is_text) for item in value]
        if isinstance(value, dict):
            hides = name in _NAMES_ARE_TEXT or is_text
            below = is_text or (hides and name not in _SCHEMAS)
            return {
                self.text(key) if hides or not _FIELD.fullmatch(key) else key: self.value(
                    item, key, is_text=below
                )
                for key, item in value.items()
            }
        is_number = isinstance(value, int | float)
        return self.text(str(value)) if is_number and (is_text or name in _NUMBERS_ARE_TEXT) else value

    def _item(self, item: Any, name: str, *, is_text: bool) -> Any:
        """Redact an item of a list, where numbers are parts of a text: tokens or bytes."""
        if isinstance(item, int | float) and not isinstance(item, bool) and not is_text:
            digest = hashlib.blake2b(str(item).encode(), key=self._key, digest_size=4).digest()
            return int.from_bytes(digest, "little")
        return self.value(item, name, is_text=is_text)
