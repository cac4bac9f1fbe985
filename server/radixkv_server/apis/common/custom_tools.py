# SPDX-License-Identifier: Apache-2.0
"""Custom tools, which take text: their functions for chat templates, and the text of their calls.

The model calls a function with one argument, `input`. A grammar of the input is enforced; the model writes
the input inside of a JSON string, so the grammar is rewritten for that (`radixkv.grammar.escaped_lark`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic_core import from_json

from radixkv.grammar.escaped_lark import escape_lark
from radixkv.grammar.limits import check_lark
from radixkv_server.apis.common.string_member import StringMember
from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError, StrictModel


class CustomFormat(StrictModel):
    """Format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @field_validator("definition")
    @classmethod
    def _usable(cls, definition: str | None, info: ValidationInfo) -> str | None:
        if definition and info.data.get("syntax") == "lark" and info.data.get("type") == "grammar":
            escaped = escape_lark(definition)
            check_lark(definition)
            check_lark(escaped)
        return definition

    @model_validator(mode="after")
    def _whole(self) -> CustomFormat:
        if self.type == "grammar" and (self.syntax is None or not self.definition):
            raise ParamError(
                "a format of type 'grammar' needs its syntax, 'lark' or 'regex', and definition."
            )
        return self

    @property
    def lark(self) -> str | None:
        """Grammar of the input in Lark; None: it has none, or one of another syntax."""
        return self.definition if self.type == "grammar" and self.syntax == "lark" else None


def custom_function(description: str | None, wanted: CustomFormat | None) -> Json:
    """Return a custom tool as a function of chat completions, without its name."""
    text: Json = {"type": "string"}
    words = [description] if description else []
    is_strict = False
    if wanted is not None and wanted.type == "grammar":
        words.append(f"The input is text of this {wanted.syntax} grammar:\n{wanted.definition}")
        if wanted.syntax == "regex":
            text["pattern"], is_strict = f"^(?:{wanted.definition})$", True
    function: Json = {"description": "\n\n".join(words)} if words else {}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    function["parameters"] = {**schema, "additionalProperties": False}
    return {**function, "strict": True} if is_strict else function


class CustomInput:
    """Input of one call, read while the model writes its arguments.

    It is streamed while the model writes it if it is the first argument, else given at the end.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._string = StringMember("input")

    def push(self, text: str) -> str:
        """Return the characters that a further piece of the arguments adds to the input."""
        self._arguments.append(text)
        return self._string.push(text)

    def finish(self) -> str:
        """Return the rest of the input, which `push` could not decide. O(arguments)."""
        if self._string.is_found:
            return ""
        try:
            given = from_json(self.arguments, allow_partial="trailing-strings")
        except ValueError:
            return ""
        text = given.get("input") if isinstance(given, dict) else None
        return text if isinstance(text, str) else ""

    @property
    def arguments(self) -> str:
        """Arguments so far, as the model wrote them."""
        return "".join(self._arguments)


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a whole call."""
    reader = CustomInput()
    return reader.push(arguments) + reader.finish()
