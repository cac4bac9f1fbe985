# SPDX-License-Identifier: Apache-2.0
"""Cause by which one prompt parts from another: their models, tools and messages compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.history_difference import history_breaker
from radixkv.observe.prompt_parts import PromptParts
from radixkv.observe.tools_difference import tools_breaker

Detector = Callable[[PromptParts, PromptParts], Breaker | None]


def _in_model(old: PromptParts, new: PromptParts) -> Breaker | None:
    if not old.model or not new.model or old.model == new.model:
        return None
    return replace(make_breaker("model", old=old.model, new=new.model), place="the model")


def _in_tools(old: PromptParts, new: PromptParts) -> Breaker | None:
    found = tools_breaker(old.tools, new.tools)
    if found is None:
        return None
    where = f"the tool {found.tool}" if found.tool else "the tools"
    return replace(found, place="the tools" if found.kind.startswith("tools_") else where)


def _in_messages(old: PromptParts, new: PromptParts) -> Breaker | None:
    found = history_breaker(old.messages, new.messages)
    if found is None or not new.tools:
        return found
    return replace(found, same_tools=tools_breaker(old.tools, new.tools) is None)


_TOOLS_FIRST: tuple[Detector, ...] = (_in_model, _in_tools, _in_messages)
_MESSAGES_FIRST: tuple[Detector, ...] = (_in_model, _in_messages, _in_tools)


def find_breaker(old: PromptParts, new: PromptParts, *, in_tools: bool | None = None) -> Breaker | None:
    """Find the cause that breaks the common prefix of two prompts; None: there is none.

    Args:
        old: the earlier one.
        in_tools: whether they part in the text of the tools; None: not known. Where tools and messages both
            differ it says which of them comes first; without it the tools do.

    Nothing breaks where the later prompt goes on after the earlier one, asks something else at its end, or is
    another conversation. O(size of the prompts), and a comparison of some hundred words.
    """
    detectors = _MESSAGES_FIRST if in_tools is False else _TOOLS_FIRST
    return next((found for detect in detectors if (found := detect(old, new)) is not None), None)
