# SPDX-License-Identifier: Apache-2.0
"""Fields by which clients of chat and text completions constrain an answer's format.

`response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older names;
`regex`, `ebnf` and `json_schema` are SGLang's, `json_schema` and `grammar` llama.cpp's.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

from pydantic import Field

from radixkv.sampling.structured import StructuredOutputs
from radixkv_server.chats.structured import format_grammar, grammar_of
from radixkv_server.errors import bad_request
from radixkv_server.http.body import StrictModel
from radixkv_server.http.fields import WithoutEffect, asks_for_nothing

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_PLAIN = {"regex": "regex", "json_schema": "json", "ebnf": "ebnf", "grammar": "ebnf"}


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


class ResponseFormat(StrictModel):
    type: str
    json_schema: SchemaFields | None = None

    def grammar(self) -> StructuredOutputs | None:
        schema = None if self.json_schema is None else self.json_schema.given()
        return format_grammar({"type": self.type}, schema, "response_format")


class GrammarFields(StrictModel):
    """Fields of grammars, of which a client may give one."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Annotated[Any, WithoutEffect("there is one")] = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None

    @functools.cached_property
    def wanted_grammar(self) -> tuple[StructuredOutputs, str] | None:
        """Return the constraint on the answer and the name of its field, or None without one.

        Raises:
            ApiError: a bad grammar, or several.
        """
        found: list[tuple[StructuredOutputs, str]] = []
        if self.response_format is not None and (wanted := self.response_format.grammar()) is not None:
            found.append((wanted, "response_format"))
        if not asks_for_nothing(self.structured_outputs):
            assert self.structured_outputs is not None
            found.append((grammar_of(self.structured_outputs, "structured_outputs"), "structured_outputs"))
        more = {"whitespace_pattern": self.guided_whitespace_pattern}
        for name, kind in _GUIDED.items():
            if getattr(self, name) is not None:
                found.append((grammar_of({kind: getattr(self, name), **more}, name), name))
        plain = {"regex": self.regex, "json_schema": self.json_schema, "ebnf": self.ebnf}
        # llama.cpp's own page sends an empty grammar where it wants none.
        for name, value in {**plain, "grammar": self.grammar_ or None}.items():
            if value is not None:
                found.append((grammar_of({_PLAIN[name]: value}, name), name))
        if len(found) > 1:
            names = " and ".join(name for _, name in found)
            raise bad_request(f"{names} exclude each other: an answer has one grammar.", param=found[1][1])
        return found[0] if found else None
