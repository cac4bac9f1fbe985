# SPDX-License-Identifier: Apache-2.0
"""Formats of answers in the notations of several APIs: grammars, and the choice of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from radixkv.errors import InvalidRequestError
from radixkv.grammar.ebnf import is_ebnf, lark_of_ebnf
from radixkv.sampling.structured import StructuredOutputs
from radixkv_server.errors import bad_request
from radixkv_server.http.body import StrictModel

#: Fields allowed beside a JSON Schema; only the schema itself is enforced.
_FIELDS = frozenset({"name", "description", "schema", "strict"})
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def json_schema_grammar(given: object, param: str) -> StructuredOutputs:
    """Read OpenAI's `{"name", "description", "schema", "strict"}`; the schema is enforced, strict or not.

    Args:
        param: name of the field in the body, for errors.

    Raises:
        ApiError: it is not of that form.
    """
    if not isinstance(given, Mapping):
        raise bad_request(f"{param} must be an object with a name and a schema.", param=param)
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        raise bad_request(f"{param}: {unknown[0][:64]!r} is not known.", param=param)
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"{param}.name must be 1 to 64 letters, digits, _, . or -.", param=param)
    if not isinstance(given.get("strict"), bool | None):
        raise bad_request(f"{param}.strict must be true, false or null.", param=param)
    if given.get("schema") is None:
        message = f"{param}.schema is missing; for any object take the type json_object."
        raise bad_request(message, param=param, code="missing_required_parameter")
    schema = given["schema"]
    if not isinstance(schema, dict):
        raise bad_request(f"{param}.schema must be a JSON Schema, an object.", param=param)
    closed = True if given.get("strict") else None
    return grammar_of({"json": schema, "disable_additional_properties": closed}, param)


def format_grammar(given: Mapping[str, Any], schema: object, param: str) -> StructuredOutputs | None:
    """Read a response format: `text` (None), `json_object`, or `json_schema`.

    Args:
        given: the format, with its `type`.
        schema: what belongs to `json_schema`.

    Raises:
        ApiError: another type, a bad schema, or a schema with a type that has none.
    """
    kind = given["type"]
    if kind in ("text", "json_object") and isinstance(schema, Mapping):
        for name, value in schema.items():
            if value is not None:
                message = f"{param}: {name} belongs to the type json_schema, not to {kind}."
                raise bad_request(message, param=param)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema":
        return json_schema_grammar(schema, param)
    raise bad_request(
        f"{param}: type {kind[:64]!r} is not supported; text, json_object and json_schema are.",
        param=param,
        code="unsupported_parameter",
    )


def grammar_of(given: Mapping[str, Any], param: str) -> StructuredOutputs:
    """Read `{"json": schema}` and its variants, with errors that name the client's field.

    `grammar` may be in Lark or in EBNF, `ebnf` is in EBNF.

    Raises:
        ApiError: not exactly one grammar, or one of the wrong type.
    """
    given = dict(given)
    try:
        if isinstance(given.get("grammar"), str) and is_ebnf(given["grammar"]):
            given["ebnf"] = given.pop("grammar")
        if isinstance(given.get("ebnf"), str) and given.get("grammar") is None:
            given["grammar"] = lark_of_ebnf(given.pop("ebnf"))
        return StructuredOutputs.of({name: value for name, value in given.items() if value is not None})
    except InvalidRequestError as error:
        raise bad_request(f"{param}: {error}.", param=param) from None


def tool_choice(given: str | Mapping[str, Any] | None) -> tuple[str, frozenset[str] | None]:
    """Read OpenAI's `tool_choice`, of chats or of responses.

    Returns:
        `auto`, `none`, `required` or a function's name; and the names of the only functions that may be
        called, None: all may.

    Raises:
        ApiError: it is none of these.
    """
    if given is None:
        return "auto", None
    if isinstance(given, str):
        if given in ("auto", "none", "required"):
            return given, None
    elif given.get("type") == "function":
        name = _function_name(given)
        if name is not None:
            return name, None
    elif given.get("type") == "allowed_tools":
        return _allowed_tools(given.get("allowed_tools", given))
    raise bad_request(
        "tool_choice must be 'auto', 'none', 'required', a function by its name "
        '({"type": "function", "function": {"name": "..."}}), or "allowed_tools".',
        param="tool_choice",
    )


def _allowed_tools(given: object) -> tuple[str, frozenset[str]]:
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    known = frozenset(name for name in names if name is not None)
    if mode not in ("auto", "required") or not names or None in names:
        raise bad_request(
            "tool_choice: allowed_tools has a mode, 'auto' or 'required', and tools, a list of functions by "
            "their names, at least one.",
            param="tool_choice",
        )
    return mode, known


def _function_name(given: object) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or beside the type."""
    if not isinstance(given, Mapping) or given.get("type") != "function":
        return None
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


class SchemaFields(StrictModel):
    """JSON Schema with its name and options; the schema is checked when its grammar is compiled."""

    name: Any = None
    description: Any = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: Any = None

    def given(self) -> dict[str, Any]:
        """Return the given fields, by their names in the API."""
        return {name.rstrip("_"): getattr(self, name) for name in self.model_fields_set if name in _SCHEMA}


_SCHEMA = frozenset(SchemaFields.model_fields)
