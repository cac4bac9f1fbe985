# SPDX-License-Identifier: Apache-2.0
"""Tools that clients of this API offer, and the choice of tools that the prompt lists.

custom (or no type)                   defined by the client, with a schema
bash_, text_editor_, memory_          also run by the client; their schemas, given below, are Anthropic's
web_search_, code_execution_, ...     run by Anthropic's servers: left out here

A tool with `defer_loading` is not listed, but shown where a `tool_reference` names it, so that the prompt
before it does not change. If a server tool was to search among them, none can be found, and all are listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, model_validator

from radixkv_server.chats.breakpoints import CacheControl
from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError, StrictModel, unsupported
from radixkv_server.http.fields import Ignored, WithoutEffect

_SEARCH = "tool_search_tool_"
_ON_A_SERVER = re.compile(
    rf"(web_search|web_fetch|code_execution|advisor)_\d{{8}}|{_SEARCH}(regex|bm25)(_\d{{8}})?"
)
#: Types of tools that can't be left out in silence -> the reason, with what to send instead.
_NOT_HERE = (
    (r"computer(_\d{8}|_use.*)?", "no model here sees screenshots; leave the tool out"),
    (
        r"mcp_toolset(_\d{8})?",
        "this server connects to no MCP server; list its tools as your own, and call them in the client",
    ),
)


class _ClientTool(StrictModel):
    """Base of the tools that the client runs."""

    cache_control: CacheControl | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    eager_input_streaming: Annotated[Any, WithoutEffect("input comes as it is written anyway")] = None
    input_examples: Annotated[Any, WithoutEffect("templates show no examples")] = None

    @model_validator(mode="after")
    def _called_directly(self) -> _ClientTool:
        if self.allowed_callers and "direct" not in self.allowed_callers:
            raise unsupported("tools", "a tool without the caller 'direct'")
        return self

    def _function(self, name: str, description: str | None, schema: Mapping[str, Any]) -> Json:
        function: Json = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class AnthropicTool(_ClientTool):
    """A tool of the client's own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None

    def for_template(self) -> Json:
        """The tool in the form that chat templates expect."""
        return self._function(self.name, self.description, self.input_schema)


class KnownTool(_ClientTool):
    """A tool whose schema Anthropic's API knows, and whose work the client does."""

    type: Literal[
        "bash_20241022",
        "bash_20250124",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "memory_20250818",
    ]
    name: Literal["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    max_characters: Annotated[Any, WithoutEffect("the client keeps to it")] = None

    @model_validator(mode="after")
    def _its_own_name(self) -> KnownTool:
        family = "memory" if self.name == "memory" else "bash" if self.name == "bash" else "text_editor"
        if not self.type.startswith(family):
            raise ParamError(
                f"tools: a tool of type {self.type!r} can't have the name {self.name!r}.", "tools"
            )
        return self

    def for_template(self) -> Json:
        """The tool in the form that chat templates expect."""
        return self._function(self.name, *_KNOWN[self.name])


class ServerTool(StrictModel):
    """A tool that would run on a server; it is left out of the prompt."""

    model_config = ConfigDict(extra="allow")

    type: str
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _note_as_ignored(self, info: ValidationInfo) -> ServerTool:
        if isinstance(info.context, Ignored):
            info.context.note_part(f"tools: {self.type[:40]}")
        return self


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        known = ((KnownTool, "[known]"), (ServerTool, "[server]"))
        return next((tag for kind, tag in known if isinstance(value, kind)), "[custom]")
    kind = value.get("type")
    if not isinstance(kind, str) or kind == "custom":
        return "[custom]"
    return "[server]" if _ON_A_SERVER.fullmatch(kind) else "[known]"


def _can_be_offered(value: Any) -> Any:
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    why = next((why for pattern, why in _NOT_HERE if re.fullmatch(pattern, kind)), None)
    if why is not None:
        raise ParamError(
            f"A tool of type {kind[:40]!r} can't be offered: {why}.", code="unsupported_parameter"
        )
    return value


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("[custom]")]
    | Annotated[KnownTool, Tag("[known]")]
    | Annotated[ServerTool, Tag("[server]")],
    Discriminator(_kind),
    BeforeValidator(_can_be_offered),
]


def client_tools(tools: Sequence[Any]) -> list[AnthropicTool | KnownTool]:
    """Select the tools that can be called here."""
    return [tool for tool in tools if not isinstance(tool, ServerTool)]


def is_deferred(tool: AnthropicTool | KnownTool, tools: Sequence[Any]) -> bool:
    """True if the prompt does not list this tool of `tools`."""
    searched = any(isinstance(other, ServerTool) and other.type.startswith(_SEARCH) for other in tools)
    return bool(tool.defer_loading) and not searched


def tool_text(tool: AnthropicTool | KnownTool) -> str:
    """Return a tool as text for a message."""
    return json.dumps(tool.for_template(), ensure_ascii=False)


def _object(required: Sequence[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _file_commands(*names: str, **more: Json) -> Json:
    return _object(
        ["command"],
        command={"type": "string", "enum": list(names)},
        path=_text("Absolute path of the file or folder."),
        file_text=_text("For create: what the file holds."),
        old_str=_text("For str_replace: the text to be replaced, which occurs once."),
        new_str=_text("For str_replace: what takes its place."),
        insert_line={
            "type": "integer",
            "description": "For insert: the line to insert after, 0 for the beginning.",
        },
        insert_text=_text("For insert: the text."),
        view_range={
            "type": "array",
            "items": {"type": "integer"},
            "description": "For view: first and last line, -1 for the end.",
        },
        **more,
    )


#: Name -> description and schema of the tools that clients name by their type alone.
_KNOWN: Mapping[str, tuple[str, Json]] = {
    "bash": (
        "Run a command in a shell that stays between calls.",
        _object(
            [],
            command=_text("The command."),
            restart={"type": "boolean", "description": "Begin a new shell."},
        ),
    ),
    "str_replace_editor": (
        "View, create and edit files.",
        _file_commands("view", "create", "str_replace", "insert", "undo_edit"),
    ),
    "str_replace_based_edit_tool": (
        "View, create and edit files.",
        _file_commands("view", "create", "str_replace", "insert"),
    ),
    "memory": (
        "Keep what should be remembered in files below /memories, and look there first.",
        _file_commands(
            "view",
            "create",
            "str_replace",
            "insert",
            "delete",
            "rename",
            old_path=_text("For rename: the path now."),
            new_path=_text("For rename: the new path."),
        ),
    ),
}
