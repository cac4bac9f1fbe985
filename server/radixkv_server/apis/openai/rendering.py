"""The answers of the OpenAI routes: usage, choices, chunks, and both shapes of logprobs.

Plain dictionaries: they are built once per token in a stream, and their shape is checked by tests with
the real client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.request import Logprob, TokenLogprobs

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport
    from radixkv.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its prompts and samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cache_reports: dict[int, MissReport] = field(default_factory=dict)  # by prompt

    def as_json(self) -> Json:
        """OpenAI's `usage`, with the cached tokens always given, and why the others were not found.

        `cache_miss` is one object per prompt, in order (a single one not in a list). It says nothing of what
        other requests' prompts contain.
        """
        misses = [_miss(report) for _, report in sorted(self.cache_reports.items())]
        details: Json = {"cached_tokens": self.cached_tokens}
        if misses:
            details["cache_miss"] = misses[0] if len(misses) == 1 else misses
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


def _miss(report: MissReport) -> Json:
    """The reason, the position of the first token that was not found, and what is known of an eviction."""
    miss: Json = {"reason": report.reason}
    if report.reason != "hit":
        miss["position"] = report.num_hit_tokens
    if report.age_s is not None:
        miss["age_s"] = round(report.age_s, 3)
        miss["evicted_by"] = report.evicted_by
    if report.skipped is not None:
        miss["skipped"] = report.skipped
    return miss


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of an answer have in common."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def wrap(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def dump(value: Json) -> bytes:
    """Compact JSON as UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def sse(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": ping\n\n"


class LogprobsFormat:
    """Turns TokenLogprobs into the chat and the text-completion shape."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def chat(self, entries: Sequence[TokenLogprobs] | None) -> Json | None:
        """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""
        if entries is None:
            return None
        content = [
            {**self._chat_token(entry.chosen), "top_logprobs": [self._chat_token(top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, item: Logprob) -> Json:
        raw = self.tokenizer.token_bytes(item.token_id)
        return {
            "token": item.text or raw.decode("utf-8", "replace"),
            "logprob": _finite(item.logprob),
            "bytes": list(raw),
        }

    def text(
        self, entries: Iterable[TokenLogprobs | None] | None, ids: Sequence[int], offset: int, num_top: int
    ) -> Json | None:
        """`{tokens, token_logprobs, top_logprobs, text_offset}`, offsets in characters of the choice's text.

        An entry of None is the first prompt token, which nothing precedes. The chosen token is among its
        `top_logprobs` even when it is not among the likeliest.
        """
        if entries is None:
            return None
        tokens: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry, token_id in zip(entries, ids, strict=True):
            token = self._text_token(token_id)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            chosen.append(None if entry is None else _finite(entry.chosen.logprob))
            tops.append(self._text_top(entry) if entry is not None and num_top else None)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops if num_top else None,
            "text_offset": offsets,
        }

    def _text_top(self, entry: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for item in (*entry.top, entry.chosen):
            # Two tokens can have the same text: keep the likelier one.
            text = self._text_token(item.token_id)
            best[text] = max(_finite(item.logprob), best.get(text, -9999.0))
        return best

    def _text_token(self, token_id: int) -> str:
        """The token's text; bytes that are not whole characters as `bytes:\\xe2\\x80`, as OpenAI does."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    """JSON has no infinity: a masked token gets OpenAI's -9999."""
    return max(float(logprob), -9999.0)
