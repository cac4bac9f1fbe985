"""How fast is the prefix cache, and how much memory does its tree take?

    python benchmarks/prefix_cache.py [--json FILE] [--peer DIR]

Workload: 2,000 sequences, each one of 50 shared prompts of 2,048 random tokens followed by 512 tokens of its
own (numpy seed 0, ids below 32,000), int32 arrays. For each: match, then acquire + commit + release. Then
evict 1,024 tokens at a time until the cache is empty. All figures are medians of thread CPU time.

With `--peer DIR`, the site-packages of an environment with `pip install --no-deps sglang`, SGLang's default
tree core (Rust) runs beside it, call by call in turn, on the same tokens in the int64 arrays that it wants
(building those is not counted). Its extension module is called directly, *without* the Python that SGLang's
cache puts around each call: the figures are a lower bound of what SGLang pays. Match is match_prefix and
collecting the matched slots; insert is lock, begin_insert, end_insert, unlock; evict is its cache's loop.
Without `--peer` it is looked for on sys.path, and left out if it is not there.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from radixkv import PrefixCache

PAGE = 16
SHARED, PROMPTS, OWN = 2048, 50, 512

Sample = list[int]


def timed(samples: Sample, function: Callable[[], Any]) -> Any:
    """Run and append the thread CPU nanoseconds."""
    start = time.thread_time_ns()
    result = function()
    samples.append(time.thread_time_ns() - start)
    return result


def micros(samples: Sample) -> float:
    """Median in microseconds."""
    return statistics.median(samples) / 1000


def sequences(count: int, own: int = OWN) -> list[np.ndarray]:
    """The workload's token ids, int32."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32000, SHARED, dtype=np.int32) for _ in range(PROMPTS)]
    return [
        np.concatenate([prompts[i % PROMPTS], rng.integers(0, 32000, own, dtype=np.int32)])
        for i in range(count)
    ]


class Peer:
    """SGLang's tree core, driven as its cache drives it."""

    def __init__(self, library: Path) -> None:
        import torch

        spec = importlib.util.spec_from_file_location("mem_cache", library)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self._torch = torch
        m = self.module
        self.core = m.RustUnifiedTreeCoreBinding(
            m.TreeCoreInitParamsBinding(
                eviction_policy="lru",
                slru_protected_threshold=2,
                tlru_tail_budget=0,
                tlru_float_config=None,
                page_size=PAGE,
                is_write_back=False,
                enable_hicache=False,
                write_through_threshold=256,
                device="cpu",
                swa_sliding_window_size=None,
                swa_req_ring=False,
                enable_kv_cache_events=False,
                dynamo_kv_event_format=False,
                mamba_cache_chunk_size=None,
                mamba_max_states_per_path=None,
            ),
            [0],
        )

    def match(self, key: array[int]) -> Any:
        """The lookup, and the matched slots, which are part of its cache's answer."""
        params = self.module.MatchParamsBinding(key=key, extra_key=None, cache_salt=None)
        found = self.core.match_prefix(params)
        if found.device_prefix_len:
            self.core.collect_full_device_indices(found.last_device_node_id, 0)
        return found

    def insert(self, key: array[int], value: Any, matched: int, node: int) -> None:
        """Lock the match, insert the sequence, unlock: what acquire + commit + release do after a match."""
        lock = self.core.inc_lock_ref(node)
        self.core.begin_insert(
            self.module.InsertParamsBinding(
                key=key,
                value=value,
                extra_key=None,
                cache_salt=None,
                session_id=None,
                mamba_value=None,
                prev_prefix_len=matched,
                swa_evicted_seqlen=0,
                swa_branching_seqlen=None,
                inserted_len=0,
                priority=0,
                track_adopted_ranges=False,
                rotation_base=None,
            )
        )
        self.core.end_insert()
        self.core.dec_lock_ref(
            node,
            self.module.DecLockRefParamsBinding(
                node_id=lock.node_id,
                component_lock_uuids=lock.component_lock_uuids,
                component_host_lock_uuids=lock.component_host_lock_uuids,
                skipped_lock_components=lock.skipped_lock_components,
            ),
        )

    def slots(self, start: int, count: int) -> Any:
        return self._torch.arange(start, start + count)

    def evict(self, tokens: int) -> int:
        core = self.core
        freed = 0
        core.evict_device_start(0, tokens)
        while freed < tokens:
            step = core.evict_device_next_node(0, {0: freed})
            if step.node_id is None:
                if not step.made_progress:
                    break
                continue
            freed += core.evict_device_leaf(step.node_id).tracker.get(0, 0)
        core.evict_device_end(0)
        return freed


def find_peer(folder: str | None) -> Peer | None:
    """The peer's extension module, if it can be loaded here."""
    for place in [folder] if folder else sys.path:
        for library in Path(place or ".").glob("sglang/srt/mem_cache/rust_tree_core/mem_cache*.so"):
            try:
                return Peer(library)
            except Exception as error:
                print(f"the peer at {library} can't be loaded: {error!r}", file=sys.stderr)
    return None


def workload(peer: Peer | None, count: int) -> dict[str, float]:
    """Match, insert and evict, beside the peer."""
    data = sequences(count)
    cache = PrefixCache(count * OWN // PAGE + PROMPTS * SHARED // PAGE + 1000)
    names = (
        "match",
        "insert",
        "acquire",
        "commit",
        "release",
        "evict",
        "peer_match",
        "peer_insert",
        "peer_evict",
    )
    t: dict[str, Sample] = {name: [] for name in names}
    hits = peer_hits = slot = 0
    for tokens in data:
        match = timed(t["match"], lambda tokens=tokens: cache.match(tokens))
        hits += match.num_tokens // PAGE * PAGE
        lease = timed(t["acquire"], lambda tokens=tokens: cache.acquire(tokens))
        timed(t["commit"], lambda lease=lease: lease.commit(lease.num_tokens))
        timed(t["release"], lambda lease=lease: lease.release())
        t["insert"].append(t["acquire"][-1] + t["commit"][-1] + t["release"][-1])
        if peer is not None:
            key = array("q", tokens.tolist())
            result = timed(t["peer_match"], lambda key=key: peer.match(key))
            matched = result.device_prefix_len
            peer_hits += matched
            value = peer.slots(slot, len(key))
            slot += len(key)
            timed(
                t["peer_insert"],
                lambda key=key, v=value, r=result: peer.insert(
                    key, v, r.device_prefix_len, r.last_device_node_id
                ),
            )
    cache.check()
    while cache.stats.cached_blocks:
        timed(t["evict"], lambda: cache.evict(1024 // PAGE))
        if peer is not None and peer.core.evictable_size():
            timed(t["peer_evict"], lambda: peer.evict(1024))
    out = {f"{name}_us": micros(samples) for name, samples in t.items() if samples}
    out["hit_tokens"] = hits
    if peer is not None:
        out["peer_hit_tokens"] = peer_hits
    return out


def decode(steps: int = 4000) -> dict[str, float]:
    """One token at a time, as decoding does."""
    cache = PrefixCache(1000)
    lease = cache.acquire(list(range(100)))
    lease.commit(100)
    appends: Sample = []
    commits: Sample = []
    token = np.array([7], np.int32)
    for n in range(101, 101 + steps):
        timed(appends, lambda: lease.append(token))
        timed(commits, lambda n=n: lease.commit(n))
    return {"append_one_us": micros(appends), "commit_one_us": micros(commits)}


def eviction_scaling(leaves: list[int]) -> dict[str, float]:
    """The cost of evicting one block, by the number of leaves."""
    out = {}
    for count in leaves:
        rng = np.random.default_rng(1)
        cache = PrefixCache(count + 10)
        tokens = rng.integers(0, 32000, (count, PAGE), dtype=np.int32)
        for row in tokens:
            lease = cache.acquire(row)
            lease.commit(PAGE)
            lease.release()
        samples: Sample = []
        for _ in range(1000):
            timed(samples, lambda cache=cache: cache.evict(1))
        out[f"evict_one_us_{count}_leaves"] = micros(samples)
        cache.reset()
        gc.collect()
    return out


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(num_blocks: int) -> dict[str, float]:
    """Resident bytes per cached block of the workload's shape, the pool and ghost index excluded."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 32000, SHARED, dtype=np.int32) for _ in range(PROMPTS)]
    cache = PrefixCache(num_blocks + 1000)
    gc.collect()
    before = resident_bytes()
    i = 0
    while cache.stats.cached_blocks < num_blocks:
        own = rng.integers(0, 32000, OWN, dtype=np.int32)
        lease = cache.acquire(np.concatenate([prompts[i % PROMPTS], own]))
        lease.commit(lease.num_tokens)
        lease.release()
        i += 1
    gc.collect()
    return {"tree_bytes_per_block": (resident_bytes() - before) / cache.stats.cached_blocks}


def explanation(count: int) -> dict[str, float]:
    """What reports and the ghost index add to acquire, with a pool that evicts all the time."""
    data = sequences(count)
    blocks = PROMPTS * SHARED // PAGE + 2000
    caches = {"with": PrefixCache(blocks), "without": PrefixCache(blocks, ghost_blocks=0, explain=False)}
    t: dict[str, Sample] = {name: [] for name in caches}
    for i, tokens in enumerate(data):
        for name in ("with", "without") if i % 2 else ("without", "with"):
            cache = caches[name]
            cache.evict(max(0, OWN // PAGE + 8 - cache.stats.free_blocks))
            lease = timed(t[name], lambda cache=cache, tokens=tokens: cache.acquire(tokens))
            lease.commit(lease.num_tokens)
            lease.release()
    with_us, without_us = micros(t["with"]), micros(t["without"])
    return {
        "acquire_with_reports_us": with_us,
        "acquire_without_us": without_us,
        "reports_percent": 100 * (with_us / without_us - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Benchmark the prefix cache, beside SGLang's tree if it is there."
    )
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--peer", help="site-packages folder that holds sglang")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    args = parser.parse_args()
    peer = find_peer(args.peer)
    scale = 10 if args.quick else 1
    figures: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    figures["peer"] = peer is not None
    for part in (
        lambda: workload(peer, 2000 // scale),
        decode,
        lambda: explanation(2000 // scale),
        lambda: eviction_scaling([2000 // scale, 20_000 // scale, 200_000 // scale]),
        lambda: memory(1_000_000 // scale),
    ):
        gc.collect()
        result = part()
        figures.update(result)
        for name, value in result.items():
            print(f"{name:<32}{value:>14,.2f}", flush=True)
    if peer is not None:
        for name in ("match", "insert", "evict"):
            ratio = figures[f"{name}_us"] / figures[f"peer_{name}_us"]
            figures[f"{name}_ratio"] = ratio
            print(f"{name + ' / peer':<32}{ratio:>14.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
