# SPDX-License-Identifier: Apache-2.0
"""Tools of the Responses API, and the functions that chat templates see for them.

function                    itself
namespace                   its functions and custom tools, by their own names where these are unique
custom                      a function with one argument, `input`: text
hosted by OpenAI            none: the tool is dropped with a warning
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ValidationInfo, model_validator

from radixkv.grammar.escaped_lark import escape_lark
from radixkv_server.apis.common.custom_tools import CustomFormat, custom_function
from radixkv_server.apis.common.fields import Asynchronous, ByType, ToolName
from radixkv_server.chats.chat import InputGrammar
from radixkv_server.dialect import Json
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import Ignored, Refused, WithoutEffect

#: Types of tools that OpenAI runs, or whose calls have items of their own. A client offers them; no model
#: served here knows how to call them.
HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)


class _CallableTool(StrictModel):
    name: ToolName
    description: str | None = None
    allowed_callers: Annotated[Any, Refused("a caller other than 'direct'", usual=(["direct"],))] = None
    defer_loading: Annotated[Any, WithoutEffect("all tools are in the prompt")] = None
    async_: Asynchronous = None

    @model_validator(mode="before")
    @classmethod
    def _has_a_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("name") in (None, ""):
            raise ParamError(
                "a tool that your program runs needs its name.", code="missing_required_parameter"
            )
        return value

    def plain(self) -> Json:
        """Return the tool as a response lists it."""
        raise NotImplementedError

    def function(self) -> Json:
        """Return the tool as a function of chat completions, without its name."""
        raise NotImplementedError


class FunctionTool(_CallableTool):
    """A function that the client runs."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: Any = None
    output_schema: Annotated[Any, WithoutEffect("templates show no schema of outputs")] = None

    def plain(self) -> Json:
        shown: Json = {"type": self.type, "name": self.name}
        shown |= {"description": self.description, "parameters": self.parameters}
        return shown if "strict" not in self.model_fields_set else {**shown, "strict": self.strict}

    def function(self) -> Json:
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {name: value for name, value in fields.items() if value is not None}


class CustomTool(_CallableTool):
    """A tool of the client's that takes text."""

    type: Literal["custom"]
    format: CustomFormat | None = None

    @property
    def lark(self) -> str | None:
        """Grammar of the input in Lark; None: it has none."""
        return None if self.format is None else self.format.lark

    def plain(self) -> Json:
        shown: Json = {"type": self.type, "name": self.name, "description": self.description}
        wanted = {"type": "text"} if self.format is None else self.format.model_dump(exclude_unset=True)
        return {**shown, "format": wanted}

    def function(self) -> Json:
        return custom_function(self.description, self.format)


_KNOWN_TOOL = ByType(
    "a tool",
    lambda kind, known: (
        f"tools of type {kind!r} are not supported: this server runs no tools itself; give functions, which "
        "your program runs."
    ),
    code="unsupported_parameter",
)


class NamespaceTool(StrictModel):
    """A group of tools of the client's."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[FunctionTool | CustomTool, _KNOWN_TOOL]], FAIL_FAST]

    def plain(self) -> Json:
        """Return the tool as a response lists it."""
        shown = {"type": self.type, "name": self.name, "description": self.description}
        return {**shown, "tools": [tool.plain() for tool in self.tools]}


class HostedTool(BaseModel):
    """A tool hosted by OpenAI; its fields are not checked."""

    KINDS: ClassVar = HOSTED

    type: str

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and isinstance(info.context, Ignored):
            info.context.note_part(f"tools of type {value['type']}")
        return value


AnyTool = Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, _KNOWN_TOOL]


@dataclass(frozen=True, slots=True)
class Called:
    """The client's tool behind a function of the prompt."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Toolbox:
    """The functions of a prompt for the tools of a request, and the way back.

    Args:
        tools: tools of the request.
        loaded: further tools that items of the conversation define.

    Attributes:
        functions: the functions in the form of templates.
        unlisted: loaded tools that the request does not list.
        inputs: name of a custom tool in the prompt -> the Lark grammar of its input.
    """

    def __init__(self, tools: Sequence[Any], loaded: Sequence[Any] = ()) -> None:
        own = list(_own(tools))
        num_listed = len(own)
        known = {(None if group is None else group.name, tool.name) for tool, group, _ in own}
        for added in _own(loaded):
            named = (None if added[1] is None else added[1].name, added[0].name)
            if named not in known:
                known.add(named)
                own.append(added)
        count = Counter(tool.name for tool, _, _ in own)
        self._called: dict[str, Called] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        functions: list[Json] = []
        self.inputs: dict[str, InputGrammar] = {}
        for tool, group, place in own:
            space = None if group is None else group.name
            name = tool.name if count[tool.name] == 1 or space is None else f"{space}__{tool.name}"
            self._called[name] = Called(tool.name, space, isinstance(tool, CustomTool))
            self._names[space, tool.name] = name
            if isinstance(tool, CustomTool) and tool.lark is not None:
                self.inputs[name] = InputGrammar(escape_lark(tool.lark), f"{place}.format.definition")
            function = {"name": name, **tool.function()}
            if group is not None and group.description:
                of_group = f"({group.name}: {group.description}) "
                function["description"] = of_group + function.get("description", "")
            functions.append({"type": "function", "function": function})
        self.functions, self.unlisted = functions[:num_listed], functions[num_listed:]

    def called(self, name: str) -> Called:
        """Return the client's tool behind a function of the prompt."""
        return self._called.get(name) or Called(name)

    def name(self, name: str, namespace: str | None) -> str:
        """Return the name of a client's tool in the prompt."""
        return self._names.get((namespace, name), name)

    def choice(self, given: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
        """Translate a `tool_choice` to functions by their names in the prompt, without hosted tools."""
        if not isinstance(given, Mapping):
            return given
        if given.get("type") == "allowed_tools" and isinstance(given.get("tools"), list):
            tools = [self.choice(tool) for tool in given["tools"] if tool.get("type") not in HOSTED]
            return {**given, "tools": tools}
        if given.get("type") in ("function", "custom") and isinstance(given.get("name"), str):
            spaces = [space for space, name in self._names if name == given["name"]]
            space = spaces[0] if spaces and None not in spaces else None
            return {"type": "function", "name": self.name(given["name"], space)}
        return given


def tools_in_response(tools: Sequence[Any]) -> list[Json]:
    """Return the tools as a response lists them, without hosted ones."""
    return [tool.plain() for tool in tools if not isinstance(tool, HostedTool)]


def _own(tools: Sequence[Any]) -> Iterator[tuple[_CallableTool, NamespaceTool | None, str]]:
    """Iterate over the client's tools, with their namespaces and their places in the body."""
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if isinstance(tool, NamespaceTool):
            yield from ((inner, tool, f"{place}.tools[{at}]") for at, inner in enumerate(tool.tools))
        elif isinstance(tool, _CallableTool):
            yield tool, None, place
