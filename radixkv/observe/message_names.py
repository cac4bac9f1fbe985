# SPDX-License-Identifier: Apache-2.0
"""Names of a chat's messages: `the system prompt`, `the 2nd user message`."""

from __future__ import annotations

from collections.abc import Sequence


def message_name(roles: Sequence[str], index: int) -> str:
    """The name of one message.

    Args:
        roles: of all messages of the chat; empty for a prompt that is no chat.
    """
    role = roles[index]
    same = [at for at, other in enumerate(roles) if other == role]
    kind = {"system": "system prompt", "tool": "tool result", "": "prompt"}.get(role, f"{role} message")
    if len(same) == 1:
        return f"the {kind}"
    number = same.index(index) + 1
    return f"the last {kind}" if number == len(same) else f"the {_ordinal(number)} {kind}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
