# SPDX-License-Identifier: Apache-2.0
"""Prompts that the Responses API made, as the scripted engine got them."""

from __future__ import annotations

from live_server import LiveServer
from scripted_engine import Asked


def last_asked(server: LiveServer) -> Asked:
    asked = server.engine.requests[-1]
    assert isinstance(asked, Asked)
    return asked


def messages_in(asked: Asked) -> list[str]:
    """What the scripted template made of each message, and the assistant's turn at the end."""
    return asked_text(asked).split("<|im_start|>")[1:]


def asked_text(asked: Asked) -> str:
    names = {256: b"<|im_start|>", 257: b"<|im_end|>"}
    return b"".join(names.get(token) or bytes([token]) for token in asked.prompt).decode()
