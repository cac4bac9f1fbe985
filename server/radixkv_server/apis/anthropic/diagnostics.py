# SPDX-License-Identifier: Apache-2.0
"""`diagnostics` of the Messages API: reason for a shorter cache hit than an earlier request's.

not asked                    no field
the first turn               null
nothing differs              null
the earlier one still runs   {"cache_miss_reason": null}
else                         {"cache_miss_reason": {"type": ...}}
"""

from __future__ import annotations

from radixkv_server.apis.anthropic.schemas import MessagesRequest
from radixkv_server.apis.common.cache_diagnosis import (
    CacheDiagnosis,
    chat_fingerprint,
    for_prompt,
    text_block,
    unusual,
)
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.diagnostics.comparison import Finding
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.dialect import Json
from radixkv_server.generation.progress import Usage

_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}
_PARAMETERS = (
    "thinking",
    "tool_choice",
    "context_management",
    "output_config",
    "output_format",
    "cache_salt",
)


def fingerprint(body: MessagesRequest, model: str, prompt: ChatPrompt) -> Fingerprint:
    """Make the fingerprint by which requests are compared. O(text)."""
    system = body.system or ()
    return chat_fingerprint(
        prompt,
        api="messages",
        model=[model, unusual(body.speed, "standard")],
        system=[text_block(system)] if isinstance(system, str) else list(map(for_prompt, system)),
        messages=[for_prompt(message) for message in body.messages],
        parameters={name: for_prompt(getattr(body, name)) for name in _PARAMETERS},
    )


def answer_fields(diagnosis: CacheDiagnosis, usage: Usage) -> Json:
    """Return the fields of an answer to a request with `diagnostics`."""
    finding = diagnosis.finding(usage)
    return {"diagnostics": _words(finding), **diagnosis.own(finding, usage)}


def _words(finding: Finding) -> Json | None:
    if finding.state == "running":
        return {"cache_miss_reason": None}
    if finding.state == "not_found":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    difference = finding.difference
    if difference is not None and difference.part in _REASONS:
        kind = _REASONS[difference.part]
        return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": finding.missed_tokens}}
    if difference is not None or finding.prompts_part:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return None
