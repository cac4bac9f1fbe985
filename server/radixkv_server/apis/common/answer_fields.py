# SPDX-License-Identifier: Apache-2.0
"""Constraints on answers in the notations of several APIs, and the fields that shape a completion's answer.

`response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older names;
`regex`, `ebnf` and `json_schema` are SGLang's, `json_schema` and `grammar` llama.cpp's.

`reasoning_effort` is OpenAI's, `reasoning` and `include_reasoning` OpenRouter's (vLLM takes these, too),
`thinking` Anthropic's, DeepSeek's and LiteLLM's, `enable_thinking` and `thinking_budget` Qwen's,
`separate_reasoning` SGLang's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from radixkv.errors import InvalidRequestError
from radixkv.grammar.ebnf import is_ebnf, lark_of_ebnf
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.chats.chat import ReasoningPlace
from radixkv_server.errors import bad_request
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import EmptyCounts, WithoutEffect, asks_for_nothing

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
    """Fields of grammars: a client may give one of them."""

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
