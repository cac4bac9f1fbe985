# SPDX-License-Identifier: Apache-2.0
"""CacheDiagnosis: an answer's report on its prompt, compared with an earlier one.

OpenAI's fields name a part of the request. Ours, `cache_diagnosis`, add its index, exact token counts, the
reason for the miss, the kind of text at the break, and the text itself.
"""

from __future__ import annotations

from radixkv.scheduling.request import Request
from radixkv_server.apis.common.usage import miss_json
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.comparison import Comparison, Finding
from radixkv_server.dialect import Json
from radixkv_server.generation.request import PromptFacts, Usage, token_ids

SHOWN_TOKENS = 48  # on each side of a break

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


class CacheDiagnosis:
    """Diagnosis of a single request.

    Args:
        request, facts: the prompt and the facts of its chat.
        comparison: the comparison with an earlier request.
    """

    def __init__(
        self, context: ServerContext, request: Request, facts: PromptFacts, comparison: Comparison
    ) -> None:
        self._text_of = context.text_of
        self._request, self._facts = request, facts
        self._comparison = comparison

    def finding(self, usage: Usage) -> Finding:
        """Return the finding, independent of APIs."""
        return self._comparison.finding(usage.cached_tokens)

    def openai(self, usage: Usage) -> Json:
        """Return the fields of an answer in OpenAI's form; none unless the client named a request."""
        finding = self.finding(usage)
        return {"prompt_cache_diagnostics": openai_words(finding), **self.own(finding, usage)}

    def own(self, finding: Finding, usage: Usage) -> Json:
        """Return `cache_diagnosis`, the field that all APIs have."""
        found = finding_json(self._comparison.earlier_id, finding)
        if finding.state == "compared":
            found |= {"prompt_tokens": usage.prompt_tokens, **self._break(finding, usage)}
        return {"cache_diagnosis": found}

    def _break(self, finding: Finding, usage: Usage) -> Json:
        """Describe why the match ended, with the text where the prompts differ or the match ends."""
        facts, ids = self._facts, token_ids(self._request)
        report, hint = usage.misses[0] if usage.misses else (None, None)
        at = len(ids)  # nothing broke
        if finding.difference is not None or finding.prompts_part:
            at = finding.shared_tokens
        elif finding.is_lost and report is not None:
            at = report.num_hit_tokens
        found: Json = {"cache_miss": report and miss_json(report, hint), "place": None, "around": None}
        if at >= len(ids):
            return found
        before, after = ids[max(0, at - SHOWN_TOKENS) : at].tolist(), ids[at : at + SHOWN_TOKENS].tolist()
        cached = None
        if report is not None and report.diverged_at == at and not report.cached_is_public:
            cached = self._text_of(report.cached_tokens_after[:SHOWN_TOKENS])
        return {
            **found,
            "place": facts.place_name(before, after),
            "around": {
                "position": at,
                "before": self._text_of(before),
                "prompt": self._text_of(after),
                "cached": cached,
            },
        }


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
