# SPDX-License-Identifier: Apache-2.0
"""Items of calls that ran at a provider, in histories that began there: calls and results of functions.

web_search_call, mcp_call, ...          a call, and its result: the fields that hold it, or its status
local_shell_call, shell_call, ...       a call; its result is the item `..._output`
tool_search_output, additional_tools    definitions of tools, which can be called from there on
compaction_trigger                      a wish of the user's for a summary, at the end of the input
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, model_validator

from radixkv.text.json_text import read_json_text
from radixkv_server.apis.common.returned_text import result_text
from radixkv_server.apis.responses.tools import AnyTool, HostedTool
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request
from radixkv_server.http.body import ParamError, StrictModel

#: Type of a call -> fields of its arguments, and of its result; None: the result is an item of its own.
_CALLS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "web_search_call": (("action",), ("results",)),
    "file_search_call": (("queries",), ("results",)),
    "code_interpreter_call": (("code",), ("outputs",)),
    "image_generation_call": (("revised_prompt", "action", "size"), ("result", "error")),
    "mcp_call": (("arguments",), ("output", "error")),
    "mcp_list_tools": (("server_label",), ("tools", "error")),
    "mcp_approval_request": (("arguments",), None),
    "local_shell_call": (("action",), None),
    "shell_call": (("action",), None),
    "apply_patch_call": (("operation",), None),
    "computer_call": (("action", "actions"), None),
    "tool_search_call": (("arguments",), None),
    "program": (("code",), None),
}
#: Type of a result -> fields of it.
_RESULTS: Mapping[str, tuple[str, ...]] = {
    "local_shell_call_output": ("output",),
    "shell_call_output": ("output",),
    "apply_patch_call_output": ("output",),
    "computer_call_output": ("output",),
    "tool_search_output": ("tools",),
    "mcp_approval_response": ("approve", "reason"),
    "program_output": ("result",),
}
#: Fields without which an item says nothing.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "web_search_call": ("action",),
    "file_search_call": ("queries",),
    "mcp_call": ("name", "server_label", "arguments"),
    "mcp_approval_request": ("name", "server_label", "arguments"),
    "mcp_list_tools": ("server_label", "tools"),
    "local_shell_call": ("action", "call_id"),
    "shell_call": ("action", "call_id"),
    "apply_patch_call": ("operation", "call_id"),
    "computer_call": ("call_id",),
    "tool_search_call": ("arguments",),
    "local_shell_call_output": ("output",),
    "shell_call_output": ("output", "call_id"),
    "apply_patch_call_output": ("call_id",),
    "computer_call_output": ("output", "call_id"),
    "tool_search_output": ("tools",),
    "mcp_approval_response": ("approve", "approval_request_id"),
    "program": ("code", "call_id"),
    "program_output": ("result", "call_id"),
    "additional_tools": ("tools",),
}
#: Asks for a summary in place of everything before it; the answer is a `compaction` item.
TRIGGER = "compaction_trigger"
_TOOLS = ("additional_tools", "tool_search_output")
_LOADED = "From now on these functions can be called:"
_WISH = "Sum up this conversation, so that you can go on without it. Write only the summary."

_AnyTools: TypeAdapter[list[Any]] = TypeAdapter(list[AnyTool])


class ProviderItem(StrictModel):
    """An item of a call that ran at a provider."""

    model_config = ConfigDict(extra="allow")
    KINDS: ClassVar = (*_CALLS, *_RESULTS, "additional_tools", TRIGGER)
    PASSED_ON: ClassVar = frozenset(
        {
            *("action", "actions", "arguments", "operation", "code", "queries", "name", "server_label"),
            *("results", "outputs", "output", "result", "error", "tools", "role", "call_id", "status"),
            *("approve", "reason", "approval_request_id", "execution", "environment", "caller", "created_by"),
            *("container_id", "fingerprint", "pending_safety_checks", "acknowledged_safety_checks"),
            *("max_output_length", "revised_prompt", "size", "quality", "background", "output_format"),
            *("svg_usage", "sources"),
        }
    )

    type: str
    id: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> ProviderItem:
        fields = self.model_extra or {}
        for name in _NEEDED.get(self.type, ()):
            if fields.get(name) is None:
                raise ParamError(
                    f"an item of type {self.type!r} needs {name}.", code="missing_required_parameter"
                )
        if self.type in _TOOLS:
            _AnyTools.validate_python(fields["tools"])
        return self

    def plain(self, item_id: str) -> Json:
        """Return the item in its stored form: all fields received, under its id."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"type": self.type, **fields, "id": item_id}


def since_compaction(items: Sequence[Json]) -> Sequence[Json]:
    """Return a conversation without the items that a compaction replaced after a trigger.

    Messages of the system stay. O(items).

    Raises:
        ApiError: 400; a trigger that no compaction follows is not the last item.
    """
    rules, first = [], 0
    for number, item in enumerate(items[:-1]):
        if item["type"] == TRIGGER:
            if items[number + 1]["type"] != "compaction":
                raise bad_request(f"a {TRIGGER} must be the last item of the input.", param="input")
            rules = [one for one in items[:number] if one.get("role") in ("system", "developer")]
            first = number + 1
    return [*rules, *items[first:]] if first else items


def is_provider_item(item: Json) -> bool:
    """Return True for the plain form of a `ProviderItem`."""
    return item["type"] in ProviderItem.KINDS


def loaded_tools(items: Iterable[Json]) -> list[Any]:
    """Return the tools that items of a conversation define."""
    found = [_AnyTools.validate_python(item["tools"]) for item in items if item["type"] in _TOOLS]
    return [tool for tools in found for tool in tools if not isinstance(tool, HostedTool)]


def call_of(item: Json) -> Json | None:
    """Return an item's call in the form of chat templates; None: it is none."""
    kind = item["type"]
    if kind not in _CALLS:
        return None
    given = {name: item[name] for name in _CALLS[kind][0] if item.get(name) is not None}
    name = kind.removesuffix("_call")
    if kind in ("mcp_call", "mcp_approval_request"):
        name, given = f"{item['server_label']}.{item['name']}", _parsed(item["arguments"])
    elif kind == "tool_search_call":
        given = _parsed(item["arguments"])
    call_id = item.get("call_id") or item["id"]
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def result_of(item: Json) -> Json | None:
    """Return the message of an item's result, or the message that it is; None: it has none of its own."""
    kind = item["type"]
    if kind == TRIGGER:
        return {"role": "user", "content": _WISH}
    if kind == "additional_tools":
        return {"role": "system", "content": f"{_LOADED}\n{result_text(item['tools'])}"}
    fields = _RESULTS[kind] if kind in _RESULTS else _CALLS[kind][1]
    if fields is None:
        return None
    if kind == "mcp_approval_response":
        said = ["approved" if item["approve"] else "denied", item.get("reason")]
    else:
        said = [item[name] for name in fields if item.get(name) not in (None, [])]
    text = "\n".join(result_text(part) for part in said if part is not None)
    call_id = item.get("call_id") or item.get("approval_request_id") or item["id"]
    return {"role": "tool", "content": text or item.get("status", "completed"), "tool_call_id": call_id}


def _parsed(arguments: Any) -> Json:
    """Arguments as an object; text that is none becomes one with a single member."""
    if isinstance(arguments, str):
        try:
            arguments = read_json_text(arguments or "{}", may_be_cut=True)
        except (ValueError, RecursionError):
            return {"arguments": arguments}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
