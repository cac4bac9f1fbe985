# SPDX-License-Identifier: Apache-2.0
"""Advice about the pool, if the contexts of the last minutes need more memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from radixkv.cache.keys import TOKEN_BYTES, shared_bytes
from radixkv.observe.causes import make_breaker
from radixkv_server.activity.activity import HISTORY_S
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

#: Contexts that need more than the pool, as a multiple of it, are worth an advice.
WORTH_TELLING = 1.1


async def pool_advice(context: ServerContext) -> Json | None:
    """Return advice if the contexts of the last ten minutes need more than the pool; None: they fit.

    Counted are the prompts that the server keeps, which are at most four million tokens: greater needs are
    told as smaller than they are. O(their tokens), off the event loop.
    """
    stats = context.engine.stats()
    pool = stats.cache.total_blocks * context.engine.limits.block_size
    since = time.time() - HISTORY_S
    seen = [one for one in context.activity.latest(None, limit=1 << 30) if one.started_at >= since]
    prompts = [((one.tenant, one.salt), one.prompt.tobytes()) for one in seen if one.prompt]
    total = sum(len(prompt) for _, prompt in prompts) // TOKEN_BYTES
    if not pool or total <= pool * WORTH_TELLING:
        return None
    needed = await off_loop(lambda: distinct_tokens(prompts), tokens=total)
    times = needed / pool
    if times <= WORTH_TELLING:
        return None
    rate = context.activity.windows(None)["5m"].to_json()["token_hit_rate"]
    waiting = stats.prompts_waiting_for_turn
    held = f"now held at a hit rate of {rate:.0%}" if rate is not None else "not in use now"
    if waiting:
        held += f", with {waiting} long prompts that wait for their turn"
    breaker = make_breaker("pool_too_small", f"the contexts of your agents need {times:.1f} times the pool")
    return {
        "kind": breaker.kind,
        "needed_tokens": needed,
        "pool_tokens": pool,
        "times": round(times, 2),
        "hit_rate": rate,
        "prompts_waiting_for_turn": waiting,
        "advice": f"{breaker.detail.removesuffix('.')}; {held}.",
    }


def distinct_tokens(prompts: Iterable[tuple[Sequence[str], bytes]]) -> int:
    """Return the tokens of a tree of these prompts: each shared prefix once, inside each owner.

    Args:
        prompts: owner, and token ids of four bytes each. O(n log n) comparisons.
    """
    bytes_needed, last_owner, before = 0, None, b""
    for owner, prompt in sorted((tuple(owner), prompt) for owner, prompt in prompts):
        shared = shared_bytes(before, prompt) if last_owner == owner else 0
        bytes_needed += len(prompt) - shared // TOKEN_BYTES * TOKEN_BYTES
        last_owner, before = owner, prompt
    return bytes_needed // TOKEN_BYTES
