# SPDX-License-Identifier: Apache-2.0
"""Reports on a fleet: the state of each upstream, and the choice of one for a request. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.cluster.routing.router import Reason

#: `draining`: it answers that it takes no requests; `failed`: it can't be reached, or answers no more.
Health = Literal["healthy", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """State of an upstream now.

    Attributes:
        knows: quality of the knowledge of its blocks: `exact` from its events, `incomplete` while some are
            missing, `guess` from the requests sent there.
        blocks: number of blocks known to be there.
        queue_s: seconds until it has computed all prompts sent there.
        running: requests sent there that have not ended.
        prefill_rate: measured prompt tokens per second.
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
    """Choice of an upstream for a request, with its reason.

    Attributes:
        reason: reason for the choice; `keeps`: the upstream stores the answer that the request continues.
        units: size of the prompt in tokens, or in pieces of its text if tokens are not known.
        resident: number of these units in the upstream's cache.
        expected: number that the upstream was computing for another request.
        queue_s: queue of the upstream, in seconds, when it was chosen.
        failed: upstreams that were tried before.
    """

    reason: Reason | Literal["keeps"]
    is_exact: bool
    units: int
    resident: int
    expected: int
    queue_s: float
    failed: tuple[str, ...]
