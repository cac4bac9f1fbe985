# SPDX-License-Identifier: Apache-2.0
"""StructuredOutputs: constraints on an answer, as plain data; `radixkv.grammar` enforces them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from radixkv.errors import InvalidRequestError

#: The kinds of grammar, each a field of `StructuredOutputs`; a request has one of them.
KINDS = ("json", "regex", "choice", "grammar", "json_object")
#: The same names in a body or in `structured={...}`, with what changes how JSON is written.
FIELDS = (*KINDS, "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "prefix")


def given_fields(value: Any) -> str:
    """Return the `repr` of a dataclass with those of its fields that are not the default."""
    given = ((field, repr(getattr(value, field.name))) for field in fields(value))
    shown = (f"{field.name}={text}" for field, text in given if text != repr(field.default))
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class StructuredOutputs:
    """The grammar of an answer: exactly one of the first five. Hashable; two with the same content are equal.

    Args:
        json: a JSON Schema, as JSON text or as data; kept as text. The answer has the properties in the
            order of the schema.
        regex: a regular expression that the whole answer must match (Rust's syntax: no look-around).
        choice: the allowed texts.
        grammar: a context-free grammar in llguidance's variant of Lark.
        json_object: any JSON object.
        whitespace_pattern: a regular expression for the whitespace between the tokens of JSON; None: none is
            allowed, which is what models are quickest at.
        disable_any_whitespace: False: any whitespace is allowed between the tokens of JSON.
        disable_additional_properties: objects of the JSON Schema have the properties that are listed, and no
            others, unless it says something of others (see `radixkv.text.closed_objects`). None: as where
            it is used has it; by itself, False.
        prefix: the beginning of the answer, which the prompt ends with: the grammar goes on after it.

    Raises:
        InvalidRequestError: none or several of the five, or a value of the wrong type; names the field.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = True
    disable_additional_properties: bool | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if self._has(name)]
        if len(given) != 1:
            names = ", ".join(KINDS)
            found = " and ".join(given) if given else "none of them"
            raise _refused(f"a grammar is exactly one of {names}, not {found}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _refused(f"{name} must be a text that is not empty, not {value!r:.80}")
        if not isinstance(self.prefix, str):
            raise _refused(f"prefix must be a text, not {self.prefix!r:.80}")
        if not isinstance(self.disable_additional_properties, bool | None):
            raise _refused("disable_additional_properties must be true, false or null")
        if self.json is not None:
            object.__setattr__(self, "json", _as_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    __repr__ = given_fields

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and (value is not False or name == "json")  # `false` is a JSON Schema

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """Make the constraint of `{"json": schema}`, `{"regex": ...}` and so on.

        Raises:
            InvalidRequestError: an unknown name, or a value that the constructor refuses.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _refused(
                f'a grammar is given like {{"json": schema}} or {{"regex": "..."}}, not {value!r:.80}'
            )
        unknown = [name for name in value if name not in FIELDS]
        if unknown:
            raise _refused(f"{unknown[0]!r:.80} is not known; known are {', '.join(FIELDS)}")
        return cls(**value)

    @property
    def kind(self) -> str:
        """The name of the one given constraint."""
        return next(name for name in KINDS if self._has(name))


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured")


def _as_text(schema: object) -> str:
    """Return a JSON Schema as text; a text stays as it is, and is checked where it is compiled."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        raise _refused(f"json must be a JSON Schema, an object or its text, not {schema!r:.80}")
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"json must be a JSON Schema, but it is no JSON: {error}") from None


def _choices(choice: object) -> tuple[str, ...]:
    texts = tuple(choice) if isinstance(choice, Sequence) and not isinstance(choice, str) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _refused(f"choice must be a list of texts that are not empty, not {choice!r:.80}")
    return texts
