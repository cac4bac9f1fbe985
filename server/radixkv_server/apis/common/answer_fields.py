# SPDX-License-Identifier: Apache-2.0
"""Fields by which clients of chat and text completions shape an answer: its format, and its reasoning.

`response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older names;
`regex`, `ebnf` and `json_schema` are SGLang's, `json_schema` and `grammar` llama.cpp's.

`reasoning_effort` is OpenAI's, `reasoning` and `include_reasoning` OpenRouter's (vLLM takes these, too),
`thinking` Anthropic's, DeepSeek's and LiteLLM's, `enable_thinking` and `thinking_budget` Qwen's,
`separate_reasoning` SGLang's.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.template_input import Thinking
from radixkv_server.chats.chat import ReasoningPlace
from radixkv_server.chats.structured import format_grammar, grammar_of
from radixkv_server.errors import bad_request
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import EmptyCounts, WithoutEffect, asks_for_nothing

Budget = Annotated[int, Field(ge=0)]


class ThinkingSetting(StrictModel):
    """Anthropic's form: on, off, or the template's default."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningSetting(StrictModel):
    """OpenRouter's form."""

    effort: str | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: Annotated[Any, WithoutEffect("reasoning is given in full", usual=("auto",))] = None


class ReasoningFields(StrictModel):
    """Fields of reasoning: effort, budget, and the place of its text."""

    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: (
        Annotated[
            Annotated[bool, Tag("[switch]")] | Annotated[ThinkingSetting, Tag("[setting]")],
            Discriminator(lambda value: "[switch]" if isinstance(value, bool) else "[setting]"),
        ]
        | None
    ) = None
    thinking_budget: Budget | None = None
    reasoning: Annotated[ReasoningSetting, EmptyCounts] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _one_wish(self) -> ReasoningFields:
        effort = self._effort
        effort_of_reasoning = None if self.reasoning is None else self.reasoning.effort
        for name, values in (
            ("enable_thinking", {value for _, value in self._switches}),
            ("reasoning_effort", {self.reasoning_effort, effort_of_reasoning} - {None}),
        ):
            if len(values) > 1:
                raise ParamError(f"{name}: the fields about thinking contradict each other.", name)
        if effort is not None and any(value is (effort == "none") for _, value in self._switches):
            raise ParamError(
                f"reasoning_effort {effort[:40]!r} and {self._switches[0][0]} contradict each other.",
                "reasoning_effort",
            )
        if self.separate_reasoning is False and self.reasoning_place == "hidden":
            raise ParamError(
                "separate_reasoning false keeps the reasoning in the content, and include_reasoning false "
                "leaves it out: give one of them.",
                "separate_reasoning",
            )
        return self

    @property
    def _effort(self) -> str | None:
        return self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort)

    @property
    def _switches(self) -> list[tuple[str, bool]]:
        """Fields that turn thinking on or off, and their values."""
        setting = self.thinking
        if isinstance(setting, ThinkingSetting):
            setting = {"enabled": True, "disabled": False}.get(setting.type)
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": setting,
            "reasoning": None if self.reasoning is None else self.reasoning.enabled,
        }
        return [(name, value) for name, value in given.items() if value is not None]

    @property
    def wanted_thinking(self) -> Thinking:
        """Settings of thinking, independent of APIs."""
        setting, budget = self.thinking, self.thinking_budget
        if budget is None and isinstance(setting, ThinkingSetting):
            budget = setting.budget_tokens
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        enabled = self._switches[0][1] if self._switches else None
        return Thinking(enabled, self._effort, budget)

    @property
    def reasoning_place(self) -> ReasoningPlace:
        """Place of the reasoning in the answer."""
        if self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude):
            return "hidden"
        return "in_content" if self.separate_reasoning is False else "apart"


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
