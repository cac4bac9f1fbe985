# SPDX-License-Identifier: Apache-2.0
"""What is told of a fleet: how each upstream is, and of a request where it went and why. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.cluster.routing.router import Reason

#: `draining`: it answers that it takes no requests; `failed`: it can't be reached, or answers no more.
Health = Literal["healthy", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """One upstream, now.

    Attributes:
        knows: what is known of its blocks: `exact` by its events, `incomplete` while some are missing,
            `guess` by what was sent there.
        blocks: that it holds, as far as is known.
        queue_s: seconds until it has computed all prompts that were sent there.
        running: requests that were sent there and have not ended.
        prefill_rate: prompt tokens a second, as measured.
    """

    address: str
    health: Health
    knows: Literal["exact", "incomplete", "guess"]
    blocks: int
    queue_s: float
    running: int
    prefill_rate: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request went, and why.

    Attributes:
        reason: what decided; `keeps`: what the request goes on from is there.
        units: of the prompt: tokens, or pieces of its text where these are not known.
        resident: of these, that the upstream holds.
        expected: that it was computing for another request.
        queue_s: of the upstream, when it was chosen.
        failed: upstreams that were tried before.
    """

    reason: Reason | Literal["keeps"]
    is_exact: bool
    units: int
    resident: int
    expected: int
    queue_s: float
    failed: tuple[str, ...]
