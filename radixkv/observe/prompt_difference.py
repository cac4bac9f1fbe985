# SPDX-License-Identifier: Apache-2.0
"""Cause by which one prompt parts from another: their models, tools and messages compared."""

from __future__ import annotations

from dataclasses import replace

from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.history_difference import history_breaker
from radixkv.observe.prompt_parts import PromptParts
from radixkv.observe.tools_difference import tools_breaker


def find_breaker(old: PromptParts, new: PromptParts, *, in_tools: bool | None = None) -> Breaker | None:
    """Find the cause that breaks the common prefix of two prompts; None: there is none.

    Args:
        old: the earlier one.
        in_tools: whether they part in the text of the tools; None: not known. Where tools and messages both
            differ it says which of them comes first; without it the tools do.

    Nothing breaks where the later prompt goes on after the earlier one, asks something else at its end, or is
    another conversation. O(size of the prompts), and a comparison of some hundred words.
    """
    if old.model and new.model and old.model != new.model:
        return replace(make_breaker("model", old=old.model, new=new.model), place="the model")
    of_tools = tools_breaker(old.tools, new.tools)
    if of_tools is not None:
        where = f"the tool {of_tools.tool}" if of_tools.tool else "the tools"
        of_tools = replace(of_tools, place="the tools" if of_tools.kind.startswith("tools_") else where)
    of_messages = history_breaker(old.messages, new.messages)
    if of_messages is not None and of_tools is None and new.tools:
        of_messages = replace(of_messages, same_tools=True)
    first, second = (of_messages, of_tools) if in_tools is False else (of_tools, of_messages)
    return first if first is not None else second
