# SPDX-License-Identifier: Apache-2.0
"""Comparison of requests: fingerprints of bodies, and the earlier request that a client named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from radixkv_server.apis.common.cache_diagnosis import CacheDiagnosis
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.comparison import Comparison
from radixkv_server.diagnostics.fingerprint import Fingerprint, fingerprint_of
from radixkv_server.dialect import Json
from radixkv_server.generation.request import Asking, Usage
from radixkv_server.http.fields import Rule, WithoutEffect, rules_of
from radixkv_server.tenants.tenant import Tenant

# Cache controls, which are no part of any prompt.
_FOR_THE_CACHE = frozenset({"cache_control", "prompt_cache_breakpoint"})

#: Makes the answer's fields with the diagnosis; no fields if the client asked for none.
Diagnosed = Callable[[Usage], Json]


async def diagnosed(
    context: ServerContext,
    caller: Tenant,
    exchange: Asking,
    fingerprint: Callable[[ChatPrompt], Fingerprint],
    *,
    earlier_id: str | None,
    asked: bool | None = None,
    words: Callable[[CacheDiagnosis, Usage], Json] = CacheDiagnosis.openai,
) -> tuple[Asking, Diagnosed]:
    """Return a request that later ones can be compared with, and its own diagnosis.

    Args:
        fingerprint: calls `chat_fingerprint`; called off the event loop if the request is long.
        earlier_id: id of the request to compare with; None: there is none.
        asked: report the diagnosis; None: only if the client names an earlier request.
        words: renders the findings in the fields of the API.
    """
    request, facts = exchange.requests[0], exchange.facts[0]
    assert isinstance(facts, ChatPrompt)
    own = await off_loop(lambda: fingerprint(facts), tokens=len(request.prompt))
    exchange = replace(exchange, fingerprint=own)
    if not (earlier_id is not None if asked is None else asked):
        return exchange, lambda _: {}
    earlier = None if earlier_id is None else context.fingerprints.get(caller.name, earlier_id, own.api)
    comparison = Comparison(own, earlier_id, earlier)
    diagnosis = CacheDiagnosis(context, request, facts, comparison)
    return replace(exchange, comparison=comparison), partial(words, diagnosis)


def chat_fingerprint(
    prompt: ChatPrompt,
    *,
    api: str,
    model: Any,
    system: Sequence[Any] = (),
    messages: Sequence[Any],
    parameters: Mapping[str, Any],
    summaries: Sequence[Any] = (),
) -> Fingerprint:
    """Make the fingerprint of a chat, in which its client's text about itself is constant. O(text).

    The arguments after the prompt are those of `fingerprint_of`.
    """
    rule = prompt.client_rule
    if rule is not None:
        system, messages = list(system), list(messages)
        blocks = system if system else messages[0]["content"]
        text = blocks[0]["text"]
        blocks[0] = {**blocks[0], "text": rule.applied(text) or text}
    return fingerprint_of(
        np.asarray(prompt.ids, np.int32),
        api=api,
        model=model,
        tools=prompt.tools,
        system=system,
        messages=messages,
        parameters=parameters,
        summaries=summaries,
    )


def text_block(text: str) -> Json:
    """Return a text as a block."""
    return {"type": "text", "text": text}


def for_prompt(value: object) -> object:
    """Return a part of a body as JSON-like data, without fields that do not affect the prompt. O(fields).

    A text and a list of a single text give the same result.
    """
    if isinstance(value, BaseModel):
        rules = rules_of(type(value))
        return {
            name: _as_parts(for_prompt(item)) if name == "content" else for_prompt(item)
            for name, item in value
            if item is not None and name not in _FOR_THE_CACHE and not _is_idle(rules.get(name))
        }
    return [for_prompt(item) for item in value] if isinstance(value, list) else value


def _as_parts(content: object) -> object:
    return [text_block(content)] if isinstance(content, str) else content


def _is_idle(rule: Rule | None) -> bool:
    return rule is not None and isinstance(rule.marker, WithoutEffect)


def unusual(value: object, *usual: str) -> object:
    """Return a parameter's value, or None where it only names the default behaviour."""
    return None if value in usual else value
