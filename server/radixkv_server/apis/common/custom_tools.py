# SPDX-License-Identifier: Apache-2.0
"""Custom tools, which take text: their functions for chat templates, and the text of their calls.

The model calls a function with one argument, `input`. A grammar of the input is enforced; the model writes
the input inside of a JSON string, so the grammar is rewritten for that (`radixkv.grammar.escaped_lark`).
"""

from __future__ import annotations

import json
import re
from typing import Literal

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic_core import from_json

from radixkv.grammar.escaped_lark import escape_lark
from radixkv.grammar.limits import check_lark
from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError, StrictModel

#: Characters before the value, white space and all.
MAX_BEGIN = 256
#: Of two surrogates.
LONGEST_ESCAPE = 12
# The first of two surrogates counts only with the second.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|'
    r"u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_CHARACTERS = re.compile(rf'(?:[^"\\\x00-\x1f]+|{_ESCAPE})*')


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


class StringMember:
    """Reader of the first member of a streamed object, if that is a string of this name.

    Attributes:
        is_found: its value has begun.
    """

    def __init__(self, name: str) -> None:
        self.is_found = False
        self._begin = re.compile(rf"\s*\{{\s*{re.escape(json.dumps(name))}\s*:\s*\"")
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> str:
        """Return the text that a further piece adds to the value. O(len(text)), once the value has begun."""
        if self._is_over:
            return ""
        self._held += text
        if not self.is_found:
            begun = self._begin.match(self._held)
            if begun is None:
                self._is_over = len(self._held) > MAX_BEGIN
                return ""
            self.is_found = True
            self._held = self._held[begun.end() :]
        found = _CHARACTERS.match(self._held)
        assert found is not None  # nothing at all fits, too
        self._held = self._held[found.end() :]
        # Of an escape, only the beginning can be here; all else ends the string.
        self._is_over = bool(self._held) and (self._held[0] != "\\" or len(self._held) > LONGEST_ESCAPE)
        value = json.loads(f'"{found[0]}"')
        assert isinstance(value, str)
        return value


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
