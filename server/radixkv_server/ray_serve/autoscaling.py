# SPDX-License-Identifier: Apache-2.0
"""Number of replicas from the waiting time of prompts; a pure function that Ray Serve calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Metric of replicas: seconds until they have computed the prompts that were sent to them.
QUEUE_S = "queue_s"
#: Seconds that prompts must wait for too long before a replica is added: a short burst is over before one
#: would be ready.
UP_AFTER_S = 3.0
# Share of the target below which one replica less suffices.
_IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about the number of replicas.

    Attributes:
        high_since, low_since: time since which prompts wait too long, or hardly at all; None: they don't.
    """

    replicas: int
    high_since: float | None = None
    low_since: float | None = None


def decide(
    queues_s: Mapping[str, float],
    before: Decision,
    now: float,
    *,
    target_s: float,
    down_after_s: float,
    up_after_s: float = UP_AFTER_S,
) -> Decision:
    """Scale replicas in proportion to the wait over the target; remove them one at a time.

    Args:
        queues_s: by replica; replicas that are still starting report none.
        before: the last decision.
    """
    mean = sum(queues_s.values()) / len(queues_s) if queues_s else 0.0
    if mean > target_s:
        since = now if before.high_since is None else before.high_since
        wanted = math.ceil(len(queues_s) * mean / target_s)
        if now - since >= up_after_s and wanted > before.replicas:
            return Decision(wanted)  # these get time to take effect before more are added
        return Decision(before.replicas, high_since=since)
    if mean < _IDLE_SHARE * target_s:
        since = now if before.low_since is None else before.low_since
        if now - since >= down_after_s:
            return Decision(max(1, before.replicas - 1), low_since=now)
        return Decision(before.replicas, low_since=since)
    return Decision(before.replicas)


def queue_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy called by Ray Serve's autoscaler: from its context to a number of replicas, and the kept state.

    In its configuration, `target_ongoing_requests` is the target in seconds, and `downscale_delay_s` the time
    without waiting prompts after which a replica is removed.
    """
    means = {  # over the look-back period: one moment says little
        str(replica): sum(point.value for point in series) / len(series)
        for replica, series in context.raw_metrics.get(QUEUE_S, {}).items()
        if series
    }
    state = context.policy_state
    decision = decide(
        means,
        Decision(context.target_num_replicas, state.get("high_since"), state.get("low_since")),
        context.current_time,
        target_s=context.config.target_ongoing_requests,
        down_after_s=context.config.downscale_delay_s,
    )
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    kept = {"high_since": decision.high_since, "low_since": decision.low_since}
    return max(low, min(high, decision.replicas)), kept
