"""TierHit: what a tier below the pool gave to a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierHit:
    """What a tier below the KV cache gave to a request's prompt.

    Attributes:
        tier: its name, such as `disk`.
        num_tokens: of the cached tokens, those that were loaded from it for this request.
        seconds: that the request waited for them, or for nothing.
    """

    tier: str
    num_tokens: int
    seconds: float
