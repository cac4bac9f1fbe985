# SPDX-License-Identifier: Apache-2.0
"""Text of clients about themselves in prompts, held constant as by a radixkv server."""

from __future__ import annotations

from radixkv.observe.audit.record import Block
from radixkv.text.chat_formats.client_rules import CLIENT_RULES


def held_constant(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks with a known client's text, at the head of a first system message, replaced by a
    constant. O(blocks) if there is such text.
    """
    at = next((at for at, block in enumerate(blocks) if block.kind != "tool"), None)
    if at is None or blocks[at].role != "system" or blocks[at].kind != "text":
        return blocks
    block = blocks[at]
    for rule in CLIENT_RULES:
        constant = rule.applied(block.text)
        if constant is not None:
            return (*blocks[:at], block._replace(text=constant), *blocks[at + 1 :])
    return blocks
