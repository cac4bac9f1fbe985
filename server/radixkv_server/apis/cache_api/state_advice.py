# SPDX-License-Identifier: Apache-2.0
"""Advice about states: how much was computed again for lack of one, and what to do."""

from __future__ import annotations

from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

#: Share of all prompt tokens that missed for lack of a state, from which on it is worth an advice.
WORTH_TELLING = 0.05


def state_advice(context: ServerContext) -> Json | None:
    """Return what to do where many tokens had K/V and no checkpoint near; None: few, or no checkpoints."""
    stats = context.engine.stats()
    cache = stats.cache
    missed = context.activity.missed(None).get("no_state", 0)
    kind, flag = ("window", "--window-memory") if cache.window_blocks else ("state", "--state-memory")
    if cache.window_blocks and cache.state_slots:  # each checkpoint is both
        kind = "state with its window"
        if 2 * cache.evicted_for_windows < cache.evicted_checkpoints:
            flag = "--state-memory"
    if not context.keeps_states or missed <= WORTH_TELLING * max(1, stats.prompt_tokens):
        return None
    share = missed / max(1, stats.prompt_tokens)
    found = (
        f"{missed:,} prompt tokens ({share:.0%}) were computed again since no {kind} was kept near the end "
        f"of their K/V; {cache.evicted_checkpoints:,} made room for others"
    )
    if cache.evicted_checkpoints:
        remedy = f"give them more memory ({flag}) or the server fewer conversations at once"
    else:
        remedy = f"mark the end of what prompts share (cache_control), so that a {kind} is kept there"
    return {
        "kind": "states_too_few",
        "missed_tokens": missed,
        "share": round(share, 3),
        "state_slots": cache.state_slots,
        "checkpoints": cache.checkpoints,
        "evicted_checkpoints": cache.evicted_checkpoints,
        "advice": f"{found}: {remedy}.",
    }
