# SPDX-License-Identifier: Apache-2.0
"""Fuzz of models with states, of those that free their windows, and of those that do both: `/path/to/python
tests/engine/fuzz_states.py SECONDS [SEED [states|windows|both]]` runs it by itself.

Requests of several tenants over a scripted model whose answers depend on its slots and rings: pools of two
slots a request and more, forks, guesses, aborts, failing steps, resets, steps ahead, a tier that fails and
lies, copies to it that end late or fail. Each answer is compared with the reference, and the invariants are
checked every few steps.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from late_copies import LateCopies, LateStatefulModel, LateStateWindowedModel, LateWindowedModel
from paged_language_model import greedy_reference, make_engine
from scripted_tier import WildTier
from stateful_hash_model import BYTES_PER_STATE, StatefulHashModel

from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin
from radixkv.tiers.checkpoint_memory import bytes_per_window
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.redis.owner_keys import OwnerKeys
from radixkv.tiers.redis.redis_tier import RedisTier
from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import TierStack

#: Of engines with a folder.
BLOCK_SIZE = 16
#: Between the seeds of an engine and the next one over its folder.
RESTART = 1_000_000
#: Tokens that layers with a window see.
_WINDOWS = (17, 1, 300, 5, 64, 100, 129)


def fuzz(
    seed: int,
    num_requests: int = 30,
    with_tier: bool | None = None,
    store: Path | str | None = None,
    *,
    kind: str = "states",
) -> dict[str, int]:
    """Run one engine to its end; what happened, by name. Raises where something is wrong.

    Args:
        with_tier: None: every other seed has one.
        store: folder of a disk tier below a host tier, or the URL of a Redis, as another run left it; runs
            whose seeds are `RESTART` apart ask the same texts.
        kind: of a model with `states`, of one that frees its `windows`, or of one that does `both`.
    """
    r = random.Random(seed)
    most = r.choice([1, 2, 4, 8])
    num_slots = r.choice([2 * most, 2 * most + 1, 40])
    block_size = r.choice([8, 16, 32, 64]) if store is None else BLOCK_SIZE
    num_blocks = r.choice([500, 900, 4000] if store is None else [500, 900]) // block_size
    failing = r.choice([0.0, 0.0, 0.08])
    budget = 0

    def fails(batch: Any) -> bool:
        return r.random() < failing

    model: Any
    if kind != "states":
        budget = r.choice([24, 96, 300])
        window = r.choice(_WINDOWS) if store is None else _WINDOWS[seed % RESTART % len(_WINDOWS)]
        spec = _window_spec(r, window, most, budget, block_size)
        if kind == "windows":
            model = LateWindowedModel(num_blocks, block_size, spec, fail_if=fails)
        else:
            model = LateStateWindowedModel(num_blocks, block_size, num_slots, spec=spec, fail_if=fails)
    else:
        model = LateStatefulModel(num_blocks, block_size, num_slots, fail_if=fails)
    now = iter(range(10**9))
    copies = LateCopies(random.Random(seed + 1))
    if r.random() < 0.7:
        model.copy_late(copies)
    act: Any = copies.act
    tiers: dict[str, Any] = {}
    if store is not None:
        size = 0 if kind == "windows" else BYTES_PER_STATE
        size += 0 if kind == "states" else bytes_per_window(model.spec, block_size)
        tiers = {"tier": _real_tiers(r, store, size), "load_deadline_s": 5.0}
    elif seed % 2 if with_tier is None else with_tier:
        wild = WildTier(np.random.default_rng(seed))
        wild.selection = r.choice([None, Selection(), Selection(0)])

        def act() -> None:
            wild.act()
            copies.act()

        tiers = {"tier": wild, "clock": lambda: next(now) * 0.001}
    engine, _ = make_engine(
        **tiers,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=budget or r.choice([24, 96, 300]),
        max_model_len=450,
        model=model,
        max_num_seqs=most,
        speculation=r.choice(["off", "auto"]),
        async_scheduling=r.random() < 0.4,
        eviction_policy=r.choice(["lru", "adaptive"]),
    )
    cache: Any = engine.cache
    if r.random() < 0.3:
        ceiling = max(num_blocks * 3 // 4, -(-368 // block_size))  # blocks of one request
        cache.set_quotas({"b": (num_blocks // 8, ceiling)})
    if store is None:
        texts = [[r.randrange(1, 4) for _ in range(r.choice([100, 200, 300]))] for _ in range(3)]
    else:
        same = random.Random(seed % RESTART)
        texts = [[same.randrange(1, 4) for _ in range(300)] for _ in range(5)]
    if r.random() < 0.3:
        cache.publish(texts[0][:130])
    sent: dict[str, tuple[list[int], int]] = {}
    counts = {"requests": 0, "compared": 0, "hits": 0, "resets": 0, "aborted": 0, "failed": 0}
    for i in range(num_requests):
        text = r.choice(texts) if store is None else texts[i % len(texts)]
        start = 1 if store is None else 2 * len(text) // 3
        prompt = text[: r.randrange(start, len(text) + 1)]
        prompt = (prompt + [r.randrange(1, 4) for _ in range(r.randrange(90))])[:360]  # a quota takes 368
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
        if r.random() < (0.3 if store is None else 0.0):
            texts[r.randrange(3)] = prompt + greedy_reference(prompt, num)[:60]
        for _ in range(r.randrange(0, 30)):
            _step(engine, model, sent, counts)
            act()
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
            if not copies.is_late:
                break
            copies.end_all()
            continue
        _step(engine, model, sent, counts)
        act()
        if store is not None and engine.has_work:
            copies.end_all()
            engine.wait()
    assert not engine.has_work, "the engine does not come to an end"
    assert not sent, f"no output came for {list(sent)}"
    cache.evict(num_blocks)
    engine.check()
    counts["slots evicted"] = cache.states.num_evicted
    counts["preemptions"] = engine.stats().num_preemptions
    for figures in engine.stats().tiers:
        for name in ("saved_states", "loaded_states", "loaded_blocks"):
            counts[name] = counts.get(name, 0) + getattr(figures, name)
    if store is not None:
        engine.close(save=r.random() < 0.5)
    return counts


def _window_spec(r: random.Random, window: int, most: int, budget: int, block_size: int) -> WindowSpec:
    """A pool that is just enough for some of the requests, or has room for checkpoints, too."""
    spec = WindowSpec(window, 0, budget, 8 * block_size)
    needed = spec.blocks_per_request(block_size) * r.choice([1, most]) - (-budget // block_size)
    return replace(spec, num_blocks=needed + r.choice([0, 3, 200]))


def _real_tiers(r: random.Random, store: Path | str, size: int) -> TierStack:
    """A host tier over a disk tier, both with room for a few texts or for all, or over a Redis.

    Args:
        size: bytes of a state or a kept window.
    """
    kind = BlockKind("paged-hash", "", BLOCK_SIZE, 24 * BLOCK_SIZE)
    states = replace(kind, kv_format="states", block_size=GRID, block_bytes=size)
    host = HostTier(r.choice([3, 60]) * (size + 24 * GRID), selection=Selection(0))
    if isinstance(store, str):
        owners = OwnerKeys(kind, b"", states=states)
        return TierStack(
            [host, RedisTier(store, kind, owners, ttl_s=900, states=states, selection=Selection(0))]
        )
    room = r.choice([8, 400]) * (size + 2 * 24 * GRID) + 2**15
    return TierStack([host, DiskTier(store, room, kind, states=states, selection=Selection(0))])


def _step(engine: Engine, model: Any, sent: dict[str, tuple[list[int], int]], counts: dict[str, int]) -> None:
    result = engine.step()
    counts["steps"] = counts.get("steps", 0) + 1
    if counts["steps"] % 5 == 0:
        engine.check()
        if isinstance(model, StatefulHashModel):
            model.check_checkpoints(engine)
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


if __name__ == "__main__":
    logging.getLogger("radixkv").disabled = True
    from redis_server import redis_server

    until, seed = time.monotonic() + float(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    total: dict[str, int] = {}
    while time.monotonic() < until:
        try:
            with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
                store = [Path(folder), redis.url][seed % 4 // 2] if seed % 2 == 0 else None
                for part in range(1 if store is None else 3):
                    options: dict[str, Any] = {"store": store, "kind": (sys.argv[3:] or ["states"])[0]}
                    for what, count in fuzz(seed + part * RESTART, **options).items():
                        total[what] = total.get(what, 0) + count
        except BaseException:
            print("seed", seed)
            raise
        seed += 1
    print(seed, "seeds:", total)
