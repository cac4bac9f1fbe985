"""Facts of a request that its user gives or is told: prefixes to pin, times, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.sampling.sampling_params import is_int, is_number, require

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """The first tokens of a prompt, to be pinned once they are computed; each hit renews the time.

    As far as the pin budget goes. A pin that is there already is made no shorter, in tokens or in time.

    Args:
        num_tokens: how many of the prompt's; at most all of them.
        ttl: seconds; None: until it is unpinned.

    Raises:
        InvalidRequestError: less than one token, or a time that is no positive number.
    """

    num_tokens: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        count, ttl = self.num_tokens, self.ttl
        require(is_int(count) and count >= 1, "pins", "need an integer of at least 1 as num_tokens", count)
        good = ttl is None or (is_number(ttl) and ttl > 0)
        require(good, "pins", "need a positive number of seconds as ttl, or None", ttl)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from a request's arrival at its engine until something happened; None: it has not.

    Attributes:
        first_scheduled: its first step was computed.
        first_token: its first token came.
        finished: it ended.
    """

    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
