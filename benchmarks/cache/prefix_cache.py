# SPDX-License-Identifier: Apache-2.0
"""How fast is the prefix cache, and how much memory does its tree take?

    python -m benchmarks.prefix_cache [--json FILE] [--peer DIR | --install-peer] [--quick]

Workload: 2,000 sequences, each one of 50 shared prompts of 2,048 random tokens followed by 512 tokens of its
own (numpy seed 0, ids below 32,000). For each: match, then acquire (given that match, as the scheduler does),
commit, release, which together are the insert. Then evict 1,024 tokens at a time until the cache is empty.
All figures are medians of thread CPU time.

SGLang's caches run beside it in the same process, call by call in turn, on the same tokens: its default
cache (Rust tree core), that core alone, and its older tree in Python. `benchmarks/peers/sglang_tree.py` says
how they are called. What all of them are given is made beforehand: encoded prompts (`PrefixCache.encode`) and
keys of SGLang's class, both from lists of ints, and slot tensors. `key` is what that takes; `match_array` and
`match_list` are our match when given an int32 array or a list instead. SGLang is loaded from its wheel; none
of its dependencies is needed:

    --install-peer   installs the wheel into the user's cache folder; later runs find it there
    --peer DIR       a folder that holds it: pip install --no-deps --target DIR sglang==0.5.23

The wheel must be one for this version of Python. Without either option the cache folder and sys.path are
searched, and the benchmark says so if SGLang is in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import write_figures
from benchmarks.peers import sglang_tree
from benchmarks.peers.environment import PeerUnavailable, environment_folder
from benchmarks.peers.sglang_tree import TreePeer
from radixkv import PrefixCache
from radixkv.cache.keys import EncodedTokens
from radixkv.cache.prefix_cache import Lease, Match
from radixkv.observe.advisor import Advisor

PAGE = 16
SHARED, PROMPTS, OWN = 2048, 50, 512
EVICTED = 1024  # tokens per call
COMPARED = ("key_us", "match_us", "insert_us", "evict_us")
PARTS = ("acquire", "commit", "release")  # of an insert

Sample = list[int]


def timed(samples: Sample, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function and append the thread CPU nanoseconds."""
    start = time.thread_time_ns()
    result = function(*arguments)
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


def find_peers(folder: str | None, install: bool) -> list[TreePeer]:
    """SGLang's caches, from the given folder, the user's cache folder or sys.path; empty if it is nowhere.

    Raises:
        PeerUnavailable: the folder was given (or was to be made), and has no usable SGLang.
    """
    if folder is not None:
        return sglang_tree.load(Path(folder), PAGE)
    if install:
        return sglang_tree.load(sglang_tree.install(), PAGE)
    installed = environment_folder("sglang").glob("lib/python*/site-packages")
    for place in [*installed, *map(Path, sys.path)]:
        if (place / "sglang").is_dir():
            return sglang_tree.load(place, PAGE)
    print("SGLang is not installed here: its figures are left out (see --help)", file=sys.stderr)
    return []


class Rival:
    """Peer, with its hits and times."""

    def __init__(self, peer: TreePeer) -> None:
        self.peer = peer
        self.hits = self.next_slot = 0
        self.times: dict[str, Sample] = {"key": [], "match": [], "insert": [], "evict": []}

    def serve(self, token_ids: list[int]) -> None:
        """Match and insert one sequence."""
        peer = self.peer
        key = timed(self.times["key"], peer.key, token_ids)
        slots = sglang_tree.slots(self.next_slot, len(token_ids))
        self.next_slot += len(token_ids)
        hit = timed(self.times["match"], peer.match, key)
        self.hits += hit.num_tokens
        timed(self.times["insert"], peer.insert, key, slots, hit)

    def evict(self) -> None:
        if self.peer.evictable():
            timed(self.times["evict"], self.peer.evict, EVICTED)

    def figures(self) -> dict[str, float]:
        return {f"{name}_us": micros(samples) for name, samples in self.times.items()} | {
            "hit_tokens": self.hits
        }


def workload(peers: list[TreePeer], count: int) -> dict[str, Any]:
    """Match, insert and evict, beside the peers."""
    data = sequences(count)
    num_blocks = count * OWN // PAGE + PROMPTS * SHARED // PAGE + 1000
    cache = PrefixCache(num_blocks, observer=Advisor(PAGE))  # as an engine has it
    rivals = [Rival(peer) for peer in peers]

    def acquire(key: EncodedTokens, match: Match) -> Lease:
        return cache.acquire(key, match=match)

    t: dict[str, Sample] = {
        n: [] for n in ("key", "match", "match_array", "match_list", "insert", *PARTS, "evict")
    }
    hits = 0
    for turn, tokens in enumerate(data):
        token_ids = tokens.tolist()
        key = timed(t["key"], cache.encode, token_ids)
        match = timed(t["match"], cache.match, key)
        hits += match.num_tokens // PAGE * PAGE
        lease = timed(t["acquire"], acquire, key, match)
        timed(t["commit"], lease.commit, lease.num_tokens)
        timed(t["release"], lease.release)
        t["insert"].append(sum(t[part][-1] for part in PARTS))
        timed(t["match_array"], cache.match, tokens)
        timed(t["match_list"], cache.match, token_ids)
        for offset in range(len(rivals)):  # nobody always follows the same one
            rivals[(turn + offset) % len(rivals)].serve(token_ids)
    cache.check()
    while cache.stats.cached_blocks:
        timed(t["evict"], cache.evict, EVICTED // PAGE)
        for rival in rivals:
            rival.evict()
    figures: dict[str, Any] = {f"{name}_us": micros(samples) for name, samples in t.items()}
    figures["hit_tokens"] = hits
    figures["peers"] = {rival.peer.name: rival.figures() for rival in rivals}
    return figures


def decode(steps: int = 4000) -> dict[str, float]:
    """One token at a time, as decoding does."""
    cache = PrefixCache(1000)
    lease = cache.acquire(list(range(100)))
    lease.commit(100)
    appends: Sample = []
    commits: Sample = []
    token = np.array([7], np.int32)
    for n in range(101, 101 + steps):
        timed(appends, lease.append, token)
        timed(commits, lease.commit, n)
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
            timed(samples, cache.evict, 1)
        out[f"evict_one_us_{count}_leaves"] = micros(samples)
        cache.reset()
        gc.collect()
    return out


def reserve_memory(spare: int = 2**28) -> None:
    """Take memory from the system now, and tell the C library to keep what is freed.

    Otherwise whoever happens to need a page first pays for getting it from the system, and the C library
    hands pages back whenever a large array at the heap's end is freed: that makes SGLang's inserts, which
    copy arrays of slots, two to ten times slower than they are in a process that runs for long.
    """
    trim_threshold, mmap_threshold = -1, -3  # glibc's numbers
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**30)
        np.ones(spare, np.uint8)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(num_blocks: int) -> dict[str, float]:
    """Resident bytes per cached block of the workload's shape, the pool and ghost index excluded.

    Measured in a process of its own: memory that something else has used and given back would not count.
    """
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        return processes.apply(fill, (num_blocks,))


def fill(num_blocks: int) -> dict[str, float]:
    """Cache so many blocks and see what this process has grown by."""
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
    caches = {
        "with": PrefixCache(blocks, observer=Advisor(PAGE)),
        "without": PrefixCache(blocks, ghost_blocks=0, explain=False),
    }
    t: dict[str, Sample] = {name: [] for name in caches}
    for i, tokens in enumerate(data):
        for name in ("with", "without") if i % 2 else ("without", "with"):
            cache = caches[name]
            cache.evict(max(0, OWN // PAGE + 8 - cache.stats.free_blocks))
            lease = timed(t[name], cache.acquire, tokens)
            lease.commit(lease.num_tokens)
            lease.release()
    with_us, without_us = micros(t["with"]), micros(t["without"])
    return {
        "acquire_with_reports_us": with_us,
        "acquire_without_us": without_us,
        "reports_percent": 100 * (with_us / without_us - 1),
    }


def print_figures(figures: dict[str, Any]) -> None:
    """One line per figure; the peers stand below, with what they are compared with."""
    for name, value in figures.items():
        if isinstance(value, int | float):
            print(f"{name:<32}{value:>14,.2f}", flush=True)
    for name, peer in figures.get("peers", {}).items():
        print(f"{name} (ours as a share of it):")
        for figure, value in peer.items():
            ratio = f"{figures[figure] / value:>10.2f}" if figure in COMPARED else ""
            print(f"  {figure:<30}{value:>14,.2f}{ratio}", flush=True)
    if any(peer["hit_tokens"] != figures["hit_tokens"] for peer in figures.get("peers", {}).values()):
        raise SystemExit("the caches found different numbers of tokens: the figures can't be compared")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="also write the figures to this file")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--peer", metavar="DIR", help="a site-packages folder that holds sglang")
    peer.add_argument(
        "--install-peer", action="store_true", help="install SGLang's wheel into the user's cache folder"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    args = parser.parse_args()
    try:
        peers = find_peers(args.peer, args.install_peer)
    except PeerUnavailable as error:
        if args.peer or args.install_peer:
            raise SystemExit(f"SGLang's caches can't be used: {error}") from None
        print(f"SGLang's caches are left out: {error}", file=sys.stderr)
        peers = []
    reserve_memory()
    scale = 10 if args.quick else 1
    figures: dict[str, Any] = {}
    for part in (
        lambda: workload(peers, 2000 // scale),
        decode,
        lambda: explanation(2000 // scale),
        lambda: eviction_scaling([2000 // scale, 20_000 // scale, 200_000 // scale]),
        lambda: memory(1_000_000 // scale),
    ):
        gc.collect()
        result = part()
        figures.update(result)
        print_figures(result)
    write_figures(args.json, "prefix_cache", figures)


if __name__ == "__main__":
    main()
