# SPDX-License-Identifier: Apache-2.0
"""Fuzz of models with states: `/path/to/python tests/engine/fuzz_states.py SECONDS` runs it by itself.

Requests of several tenants over a scripted model whose answers depend on its slots and rings: pools of two
slots a request and more, forks, guesses, aborts, failing steps, resets, steps ahead, a tier that fails and
lies. Each answer is compared with the reference, and the invariants are checked every few steps.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from paged_language_model import greedy_reference, make_engine
from scripted_tier import WildTier
from stateful_hash_model import StatefulHashModel

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin
from radixkv.tiers.selection import Selection


def fuzz(seed: int, num_requests: int = 30, with_tier: bool | None = None) -> dict[str, int]:
    """Run one engine to its end; what happened, by name. Raises where something is wrong.

    Args:
        with_tier: None: every other seed has one.
    """
    r = random.Random(seed)
    most = r.choice([1, 2, 4, 8])
    num_slots = r.choice([2 * most, 2 * most + 1, 40])
    block_size = r.choice([8, 16, 32, 64])
    num_blocks = r.choice([500, 900, 4000]) // block_size
    failing = r.choice([0.0, 0.0, 0.08])
    model = StatefulHashModel(num_blocks, block_size, num_slots, fail_if=lambda batch: r.random() < failing)
    tier = WildTier(np.random.default_rng(seed)) if (seed % 2 if with_tier is None else with_tier) else None
    now = iter(range(10**9))
    if tier is not None:
        tier.selection = r.choice([None, Selection(), Selection(0)])
    engine, _ = make_engine(
        tier=tier,
        clock=None if tier is None else lambda: next(now) * 0.001,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=r.choice([24, 96, 300]),
        max_model_len=450,
        model=model,
        max_num_seqs=most,
        speculation=r.choice(["off", "auto"]),
        async_scheduling=r.random() < 0.4,
        eviction_policy=r.choice(["lru", "adaptive"]),
    )
    cache: Any = engine.cache
    if r.random() < 0.3:
        cache.set_quotas({"b": (num_blocks // 8, num_blocks * 3 // 4)})
    texts = [[r.randrange(1, 4) for _ in range(r.choice([100, 200, 300]))] for _ in range(3)]
    if r.random() < 0.3:
        cache.publish(texts[0][:130])
    sent: dict[str, tuple[list[int], int]] = {}
    counts = {"requests": 0, "compared": 0, "hits": 0, "resets": 0, "aborted": 0, "failed": 0}
    for i in range(num_requests):
        text = r.choice(texts)
        prompt = text[: r.randrange(1, len(text) + 1)] + [r.randrange(1, 4) for _ in range(r.randrange(90))]
        prompt = prompt[:380]
        if r.random() < 0.2:  # a prompt that ends on a grid point, or beside it
            prompt = (prompt + prompt)[: r.choice([63, 64, 65, 127, 128, 129, 192])]
        num = r.choice([1, 2, 20, 65, 70])
        options: dict[str, Any] = {"tenant": r.choice(["", "b"])}
        if r.random() < 0.2:
            options["keep_tokens"] = r.randrange(len(prompt) + num)
        if r.random() < 0.1 and len(prompt) > 1:
            options["pins"] = [PrefixPin(r.randrange(1, len(prompt)))]
        if r.random() < 0.2:
            options["checkpoints"] = [r.randrange(len(prompt) + 1)]
        options["namespace"] = (options.pop("tenant"),)
        samples = r.choice([1, 1, 1, 3]) if most > 2 else 1
        if samples > 1:
            params = SamplingParams(max_tokens=num, temperature=1.0, seed=seed + i, n=samples)
        else:
            params = SamplingParams(max_tokens=num, temperature=0.0)
        name = engine.add_request(prompt, params, **options)
        if samples == 1:
            sent[name] = prompt, num
        counts["requests"] += 1
        if r.random() < 0.3:
            texts[r.randrange(3)] = prompt + greedy_reference(prompt, num)[:60]
        for _ in range(r.randrange(0, 30)):
            _step(engine, model, sent, counts)
            if tier is not None:
                tier.act()
        if r.random() < 0.04:
            cache.reset()
            counts["resets"] += 1
        if r.random() < 0.1 and engine.requests:
            gone = r.choice(engine.requests).request_id
            sent.pop(gone, None)
            engine.abort(gone)
            counts["aborted"] += 1
            engine.check()
        if r.random() < 0.1:
            cache.evict(r.randrange(1, 20))
            engine.check()
    for _ in range(20_000):
        if not engine.has_work:
            break
        _step(engine, model, sent, counts)
        if tier is not None:
            tier.act()
    assert not engine.has_work, "the engine does not come to an end"
    assert not sent, f"no output came for {list(sent)}"
    cache.evict(num_blocks)
    engine.check()
    counts["slots evicted"] = cache.states.num_evicted
    for figures in engine.stats().tiers:
        for name in ("saved_states", "loaded_states", "loaded_blocks"):
            counts[name] = getattr(figures, name)
    return counts


def _step(
    engine: Engine, model: StatefulHashModel, sent: dict[str, tuple[list[int], int]], counts: dict[str, int]
) -> None:
    result = engine.step()
    counts["steps"] = counts.get("steps", 0) + 1
    if counts["steps"] % 5 == 0:
        engine.check()
        _check_contents(engine, model)
    assert not model.violations, model.violations
    assert not engine.stats().num_rebuilds, "an invariant broke"
    for output in result.finished:
        if output.request_id not in sent:
            continue
        prompt, num = sent.pop(output.request_id)
        answer = output.outputs[0]
        counts["hits"] += output.num_cached_tokens > 0
        if answer.finish_reason not in ("stop", "length"):
            counts["failed"] += 1
            continue
        expected = greedy_reference(prompt, num)
        assert answer.token_ids == expected[: len(answer.token_ids)], f"{output.request_id}: other tokens"
        counts["compared"] += 1


def _check_contents(engine: Engine, model: StatefulHashModel) -> None:
    """The slot of each checkpoint holds the tokens of its path."""
    tree = engine.cache.parts.tree
    for checkpoint in engine.cache.states or ():
        assert checkpoint.node is not None
        key = b"".join(node.key for node in tree.path(checkpoint.node))[: 4 * checkpoint.end]
        assert model.slots[checkpoint.slot].astype("<i4").tobytes() == key, f"{checkpoint!r} is another state"


if __name__ == "__main__":
    logging.getLogger("radixkv").disabled = True
    until, seed = time.monotonic() + float(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    total: dict[str, int] = {}
    while time.monotonic() < until:
        try:
            for what, count in fuzz(seed).items():
                total[what] = total.get(what, 0) + count
        except BaseException:
            print("seed", seed)
            raise
        seed += 1
    print(seed, "seeds:", total)
