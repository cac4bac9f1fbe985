# SPDX-License-Identifier: Apache-2.0
"""Comparison of requests: fingerprints of bodies, and the earlier request that a client named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pydantic import BaseModel

from radixkv.text.chat_formats.canonical_tools import canonical_tools
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.apis.common.cache_diagnosis import CacheDiagnosis
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.comparison import Comparison
from radixkv_server.diagnostics.fingerprint import RequestParts, fingerprint_of
from radixkv_server.dialect import Json
from radixkv_server.generation.request import Asking, Usage, token_ids
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
    parts: Callable[[], RequestParts],
    *,
    earlier_id: str | None,
    asked: bool | None = None,
    words: Callable[[CacheDiagnosis, Usage], Json] = CacheDiagnosis.openai,
) -> tuple[Asking, Diagnosed]:
    """Return a request that later ones can be compared with, and its own diagnosis.

    Args:
        parts: makes the request's parts; called off the event loop if the request is long.
        earlier_id: id of the request to compare with; None: there is none.
        asked: report the diagnosis; None: only if the client names an earlier request.
        words: renders the findings in the fields of the API.
    """
    request, facts = exchange.requests[0], exchange.facts[0]

    def work() -> Asking:
        made = _as_templates_get_them(
            parts(), facts.client_rule, sorts_tools=context.settings.canonical_tools
        )
        return replace(exchange, fingerprint=fingerprint_of(made, token_ids(request)))

    exchange = await off_loop(work, tokens=len(request.prompt))
    own = exchange.fingerprint
    if not (earlier_id is not None if asked is None else asked) or own is None:
        return exchange, lambda _: {}
    earlier = None if earlier_id is None else context.fingerprints.get(caller.name, earlier_id, own.api)
    comparison = Comparison(own, earlier_id, earlier)
    diagnosis = CacheDiagnosis(context, request, facts, comparison)
    return replace(exchange, comparison=comparison), partial(words, diagnosis)


def _as_templates_get_them(
    parts: RequestParts, rule: ClientRule | None, *, sorts_tools: bool
) -> RequestParts:
    """Return the parts as given to the template: tools sorted, clients' text about themselves constant."""
    if sorts_tools:
        parts = replace(parts, tools=canonical_tools(parts.tools))
    if rule is None:
        return parts
    system, messages = list(parts.system), list(parts.messages)
    blocks = system if system else messages[0]["content"]
    text = blocks[0]["text"]
    blocks[0] = {**blocks[0], "text": rule.applied(text) or text}
    return replace(parts, system=system, messages=messages)


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
