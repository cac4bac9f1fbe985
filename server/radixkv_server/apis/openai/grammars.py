"""The fields by which clients of chat and text completions say what an answer must look like.

`response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older names.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from radixkv.structured import StructuredOutputs
from radixkv_server.chat.structured import format_grammar, grammar_of
from radixkv_server.errors import bad_request
from radixkv_server.http.body import StrictModel

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str

    def grammar(self) -> StructuredOutputs | None:
        extra = self.model_extra or {}
        return format_grammar({"type": self.type}, extra.get("json_schema"), "response_format")


class GrammarFields(StrictModel):
    """At most one of the grammars."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def grammar(self) -> tuple[StructuredOutputs, str] | None:
        """What the answer must look like, and the name of the field that says so; None: anything.

        Raises:
            ApiError: a bad grammar, or several.
        """
        found: list[tuple[StructuredOutputs, str]] = []
        if self.response_format is not None and (wanted := self.response_format.grammar()) is not None:
            found.append((wanted, "response_format"))
        if self.structured_outputs is not None:
            found.append((grammar_of(self.structured_outputs, "structured_outputs"), "structured_outputs"))
        more = {"whitespace_pattern": self.guided_whitespace_pattern}
        for name, kind in _GUIDED.items():
            if getattr(self, name) is not None:
                found.append((grammar_of({kind: getattr(self, name), **more}, name), name))
        if len(found) > 1:
            names = " and ".join(name for _, name in found)
            raise bad_request(f"{names} exclude each other: an answer has one grammar.", param=found[1][1])
        return found[0] if found else None
