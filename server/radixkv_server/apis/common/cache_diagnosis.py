# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a chat's cache hits: its fingerprint, and the comparison with an earlier request.

OpenAI's fields name a part of the request. Ours, `cache_diagnosis`, add its index, exact token counts, the
reason for the miss, the kind of text at the break, and the text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from radixkv.observe.explanation import SHOWN_TOKENS, MissPlace, sides_of
from radixkv_server.apis.common.explanation_json import around_json
from radixkv_server.apis.common.usage_json import miss_json
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.comparison import Comparison, Finding
from radixkv_server.diagnostics.fingerprint import Fingerprint, fingerprint_of
from radixkv_server.dialect import Json
from radixkv_server.generation.progress import Usage
from radixkv_server.http.fields import Rule, WithoutEffect, rules_of

# Cache controls, which are no part of any prompt.
_FOR_THE_CACHE = frozenset({"cache_control", "prompt_cache_breakpoint"})

_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
    "template": "input_changed",
    "text_format": "text_format_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
    "prompt_cache_key": "prompt_cache_key_changed",
    "service_tier": "service_tier_changed",
}


@dataclass(frozen=True, slots=True, eq=False)
class CacheDiagnosis:
    """Diagnosis of one chat.

    Args:
        text_of: makes the text of token ids.
        prompt: the chat's.
        fingerprint: by which later requests are compared with this one.
        comparison: comparison with an earlier request; None: the client asked for no diagnosis.
        words: makes the fields of the API's answer.
    """

    text_of: Callable[[Sequence[int]], str]
    prompt: ChatPrompt
    fingerprint: Fingerprint
    comparison: Comparison | None
    words: Callable[[CacheDiagnosis, Usage], Json]

    def fields(self, usage: Usage) -> Json:
        """Return the answer's fields with the diagnosis; empty if the client asked for none."""
        return {} if self.comparison is None else self.words(self, usage)

    def finding(self, usage: Usage) -> Finding:
        """Return the finding, independent of APIs; for a diagnosis that was asked for."""
        assert self.comparison is not None
        return self.comparison.finding(usage.cached_tokens)

    def openai(self, usage: Usage) -> Json:
        """Return the fields of an answer in OpenAI's form."""
        finding = self.finding(usage)
        return {"prompt_cache_diagnostics": openai_words(finding), **self.own(finding, usage)}

    def own(self, finding: Finding, usage: Usage) -> Json:
        """Return `cache_diagnosis`, the field that all APIs have."""
        assert self.comparison is not None
        found = finding_json(self.comparison.earlier_id, finding)
        if finding.state == "compared":
            found |= {"prompt_tokens": usage.prompt_tokens, **self._break(finding, usage)}
        return {"cache_diagnosis": found}

    def _break(self, finding: Finding, usage: Usage) -> Json:
        """Describe why the match ended, with the text where the prompts differ or the match ends."""
        ids = self.prompt.ids
        report, hint = usage.misses[0] if usage.misses else (None, None)
        at = len(ids)  # nothing broke
        if finding.difference is not None or finding.prompts_part:
            at = finding.shared_tokens
        elif finding.is_lost and report is not None:
            at = report.num_hit_tokens
        found: Json = {"cache_miss": report and miss_json(report, hint), "place": None, "around": None}
        if at >= len(ids):
            return found
        before, new = (list(map(int, ids[side])) for side in sides_of(at))
        old: list[int] = []
        if report is not None and report.diverged_at == at and not report.cached_is_public:
            old = report.cached_tokens_after[:SHOWN_TOKENS]
        place = MissPlace(
            at,
            len(ids) - at,
            part=self.prompt.place_name(before, new),
            before=self.text_of(before),
            new=self.text_of(new),
            old=self.text_of(old),
        )
        return {**found, "place": place.part, "around": around_json(place)}


async def diagnose(
    context: ServerContext,
    tenant: str,
    prompt: ChatPrompt,
    fingerprint: Callable[[ChatPrompt], Fingerprint],
    *,
    earlier_id: str | None,
    asked: bool | None = None,
    words: Callable[[CacheDiagnosis, Usage], Json] = CacheDiagnosis.openai,
) -> CacheDiagnosis:
    """Make a chat comparable with later ones, and compare it with an earlier one if its client asks.

    Args:
        fingerprint: calls `chat_fingerprint`; called off the event loop if the prompt is long.
        earlier_id: id of the request to compare with; None: there is none.
        asked: report the diagnosis; None: only if the client names an earlier request.
        words: renders the findings in the fields of the API.
    """
    own = await off_loop(lambda: fingerprint(prompt), tokens=len(prompt.ids))
    comparison = None
    if earlier_id is not None if asked is None else asked:
        earlier = None if earlier_id is None else context.fingerprints.get(tenant, earlier_id, own.api)
        comparison = Comparison(own, earlier_id, earlier)
    return CacheDiagnosis(context.text_of, prompt, own, comparison, words)


def finding_json(earlier_id: str | None, finding: Finding) -> Json:
    """Return the findings of a comparison with an earlier request."""
    found: Json = {"compared_with": earlier_id, "state": finding.state}
    if finding.state != "compared":
        return found
    difference = finding.difference
    return {
        **found,
        "changed": None if difference is None else difference.part,
        "index": None if difference is None else difference.index,
        "compared_tokens": finding.compared_tokens,
        "shared_tokens": finding.shared_tokens,
        "reused_tokens": finding.reused_tokens,
        "missed_tokens": finding.missed_tokens,
    }


def openai_words(finding: Finding) -> Json:
    """Return OpenAI's `prompt_cache_diagnostics`."""
    if finding.state == "not_found":
        return {"type": "comparison_response_not_found"}
    difference = finding.difference
    if difference is not None:
        reason = "context_compacted" if difference.compacted else _REASONS.get(difference.part)
        if reason is None:
            return {"type": "unavailable"}
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": finding.missed_tokens,
            "comparison_reusable_tokens": finding.reusable_tokens,
        }
    # An unchanged prefix that was not found has been evicted: OpenAI has no word for this case.
    is_hit = finding.state == "compared" and not finding.prompts_part and not finding.is_lost
    return {"type": "cache_hit" if is_hit else "unavailable"}


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
    """Make the fingerprint of a chat, with its client's text about itself held constant. O(text).

    `fingerprint_of` explains the arguments after the prompt.
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
