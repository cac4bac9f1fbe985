# SPDX-License-Identifier: Apache-2.0
"""What two prompts that a scripted engine got have in common."""

from __future__ import annotations

from live_server import LiveServer


def shared_by(one: list[int], two: list[int]) -> int:
    """How many tokens two prompts begin with."""
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


def prompts_of(server: LiveServer, number: int = 2) -> list[list[int]]:
    """The latest prompts that the engine got, oldest first."""
    return [asked.prompt for asked in server.engine.requests[-number:]]
