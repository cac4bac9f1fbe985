"""Rate limits as headers of an answer, by the names and in the form that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Iterable

from radixkv_server.tenants.rate_limits import LimitState


def limit_headers(states: Iterable[LimitState]) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` for the limits there are."""
    headers = {}
    for state in states:
        headers[f"x-ratelimit-limit-{state.kind}"] = str(state.limit)
        headers[f"x-ratelimit-remaining-{state.kind}"] = str(state.remaining)
        headers[f"x-ratelimit-reset-{state.kind}"] = duration(state.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, rounded up to milliseconds below a second and to seconds above.

    >>> duration(0), duration(0.0171), duration(1.2), duration(360)
    ('0s', '18ms', '2s', '6m0s')
    """
    if seconds <= 0:
        return "0s"
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds - 1e-6), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
