# SPDX-License-Identifier: Apache-2.0
"""Tools in one order, whatever order a client lists them in, and so the keys of their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort tools in OpenAI's form by name, and the keys of their parameters at every depth.

    Tools of the same name stay in their order, and so do lists in schemas. O(n log n) in their size.
    """
    return sorted((_canonical(tool) for tool in tools), key=lambda tool: str(tool["function"]["name"]))


def _canonical(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(tool["function"])
    if "parameters" in function:
        function["parameters"] = _sorted(function["parameters"])
    return {**tool, "function": function}


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
