# SPDX-License-Identifier: Apache-2.0
"""Unions with simple discriminators: the `type` of objects, and texts or lists of parts.

A plain union would report the errors of the branch that the client did not mean. The branches' tags are in
brackets: those are left out of the field names in error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from radixkv_server.http.body import ParamError


@dataclass(frozen=True, slots=True)
class ByType:
    """Marker of a model or a union of models, each with one or more literal values of `type`.

    Args:
        what: noun for the object in the message about a missing type.
        refusal: makes the message about an unknown type from it and the known types.
        code: error code for an unknown type.
        untyped: finds the type of an object without one; None: the type is required.
    """

    what: str
    refusal: Callable[[str, str], str]
    code: str = "unsupported_content"
    untyped: Callable[[dict[str, Any]], str | None] = lambda value: None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [source] if isinstance(source, type) else list(get_args(source))
        choices = {
            f"[{kind}]": handler.generate_schema(model) for model in members for kind in kinds_of(model)
        }
        known = ", ".join(tag[1:-1] for tag in choices)

        def check(value: Any) -> Any:
            kind = self._kind(value)
            if not isinstance(kind, str):
                raise ParamError(f"{self.what} must be an object with a type.", code="invalid_type")
            if f"[{kind}]" not in choices:
                raise ParamError(self.refusal(kind[:40], known), code=self.code)
            return value

        union = core_schema.tagged_union_schema(choices, lambda value: f"[{self._kind(value)}]")
        return core_schema.no_info_before_validator_function(check, union)

    def _kind(self, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return self.untyped(value) if kind is None and isinstance(value, dict) else kind


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the types of a model's objects: its `KINDS`, or the literals of its `type`."""
    known: tuple[str, ...] | None = getattr(model, "KINDS", None)
    return known or tuple(_literals(model.model_fields["type"].annotation))


def _literals(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _literals(part)


class _TextOrList:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (parts,) = (kind for kind in get_args(source) if kind is not str)
        choices = {"[text]": handler.generate_schema(str), "[parts]": handler.generate_schema(parts)}
        return core_schema.tagged_union_schema(
            choices, lambda value: "[text]" if isinstance(value, str) else "[parts]"
        )


#: Marks `str | list[...]`.
TEXT_OR_LIST = _TextOrList()
