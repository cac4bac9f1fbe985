"""The advisor's findings in words: where prompts of one family break, and what to move."""

from __future__ import annotations

from radixkv.cache.insight.advisor import BreakPoint
from radixkv_server.apis.cache.caller import Caller
from radixkv_server.apis.cache.texts import TokenTexts
from radixkv_server.apis.cache.wording import what_differs
from radixkv_server.dialect import Json


def advice_json(point: BreakPoint, caller: Caller, texts: TokenTexts) -> Json:
    """One place; with text if the prompts are the caller's own."""
    tenant, salt = (*point.namespace, "", "")[:2]
    share = point.count / max(1, point.family_count)
    shown: Json = {
        "position": point.position,
        "count": point.count,
        "share": round(share, 3),
        "recoverable_tokens": point.recoverable_tokens,
        "kind": None,
        "family": None,
        "example": None,
    }
    what = "Something"
    if caller.may_read(tenant, salt):
        before = texts.text(point.example_before)
        new, cached = texts.text(point.example_new), texts.text(point.example_cached)
        kind = what_differs(before, new, cached) if point.example_new else "text"
        shown |= {
            "kind": kind,
            "family": texts.text(point.family_tokens),
            "example": {"before": before, "prompt": new, "cached": cached or None},
        }
        what = kind[0].upper() + kind[1:] if kind != "text" else "Text that differs"
    shown["advice"] = _sentence(what, point, share)
    if caller.is_admin:
        shown["tenant"], shown["cache_salt"] = tenant, salt
    return shown


def _sentence(what: str, point: BreakPoint, share: float) -> str:
    text = (
        f"{what} at token {point.position} breaks {share:.0%} of this family's misses "
        f"({point.count} of {point.family_count} lately)"
    )
    if not point.recoverable_tokens:
        return text + "; nothing behind it was the same, so there is nothing to win by moving it."
    return (
        f"{text}: move it to the end of the prompt, and about {point.recoverable_tokens} tokens more "
        "would have been found."
    )
