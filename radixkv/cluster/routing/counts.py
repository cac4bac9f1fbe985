"""ReplicaCounts: figures of one of several replicas. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Figures of one replica, now.

    Attributes:
        is_open: it takes requests; False: it is drained, ill, or not ready yet.
        blocks: that it holds, by its events.
        queue_s: seconds until it has computed all prompts that were sent there.
        running: requests that were sent there and have not ended.
        prefill_rate: prompt tokens a second, as measured.
        requests: sent there so far.
        retries: requests that failed there before their first token and were served by others.
    """

    name: str
    is_open: bool
    blocks: int
    queue_s: float
    running: int
    prefill_rate: float
    requests: int
    retries: int
