# SPDX-License-Identifier: Apache-2.0
"""Random operations on a small cache, verified against the model after each one.

    python tests/cache/fuzz.py --steps 1000000 --seed 1

Prompts come from a tiny alphabet and share prefixes on purpose, pools are tiny so that they run out all the
time. A failure prints the seed and the step; the same seed runs the same way again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from cache_model import ModelledCache, Run

from radixkv import PrefixCache
from radixkv.cache.node import Node

NAMESPACES = ("", "tenant", ("tenant", "salt"))


class Fuzzer:
    """One random walk over the operations; the configuration itself is drawn from the seed."""

    def __init__(self, seed: int, policy: str | None = None) -> None:
        from benchmarks.classic_policies import NAMES
        from radixkv.cache.eviction.registry import POLICIES

        self.random = random.Random(seed)
        rnd = self.random
        options: dict[str, object] = {
            "policy": policy or rnd.choice([*sorted(POLICIES), *NAMES]),
            "ghost_blocks": rnd.choice([0, 8, None]),
            "pin_budget": rnd.choice([0.0, 0.3, 0.5]),
            "partial_reuse": rnd.random() < 0.9,
        }
        if rnd.random() < 0.2:
            options["hash_function"] = _constant_hash
        num_blocks = rnd.choice([6, 12, 24, 48])
        if rnd.random() < 0.3:
            floor = rnd.choice([0, num_blocks // 4])
            options["quotas"] = {"tenant": (floor, rnd.choice([num_blocks // 2, num_blocks // 3]))}
        self.model = ModelledCache(num_blocks, rnd.choice([1, 2, 4, 5]), **options)
        if rnd.random() < 0.3 and "hash_function" not in options:  # followers have nothing but the hashes
            self.model.follow_events()
        self.alphabet = rnd.choice([2, 3, 8])
        self.max_runs = rnd.choice([2, 4, 7])
        self.history: list[list[int]] = []
        if rnd.random() < 0.3:
            for _ in range(2):
                self.model.publish(self.prompt())

    def prompt(self) -> list[int]:
        rnd = self.random
        tokens: list[int] = []
        if self.history and rnd.random() < 0.8:
            base = rnd.choice(self.history)
            tokens = base[: rnd.randint(0, len(base))]
        tokens = tokens + [rnd.randrange(self.alphabet) for _ in range(rnd.randint(0, 9))]
        tokens = tokens or [0]
        self.history.append(tokens)
        del self.history[:-12]
        return tokens

    def step(self) -> str:
        """One random operation; returns its name and outcome."""
        rnd, model = self.random, self.model
        kind = rnd.random()
        run = rnd.choice(model.runs) if model.runs else None
        if run is None or (kind < 0.2 and len(model.runs) < self.max_runs):
            return self.acquire()
        if kind < 0.45:
            model.commit(run, rnd.randint(min(run.committed + 1, len(run.tokens)), len(run.tokens)))
            return "commit"
        if kind < 0.65:
            return self.append(run)
        if kind < 0.77:
            return self.release(run)
        if kind < 0.82 and len(model.runs) < self.max_runs:
            model.fork(run)
            return "fork"
        if kind < 0.84:
            model.rollback(run, rnd.randint(0, run.committed))
            return "rollback"
        return self.on_the_cache(kind)

    def acquire(self) -> str:
        rnd, model = self.random, self.model
        skip = rnd.random() < 0.15
        new = model.acquire(self.prompt(), rnd.choice(NAMESPACES), rnd.random() < 0.5, skip)
        if new is None:
            return "acquire: out of blocks"
        found = new.lease.num_cached_tokens
        if rnd.random() < 0.6:
            model.commit(new, rnd.randint(1, len(new.tokens)))
        return "acquire: hit" if found else "acquire: miss"

    def append(self, run: Run) -> str:
        rnd, model = self.random, self.model
        count = 1 if rnd.random() < 0.7 else rnd.randint(1, 9)
        if not model.append(run, [rnd.randrange(self.alphabet) for _ in range(count)]):
            return "append: out of blocks"
        self.history.append(list(run.tokens[:40]))
        if rnd.random() < 0.7:
            model.commit(run, len(run.tokens))
        elif rnd.random() < 0.4:
            model.truncate(run, rnd.randint(run.committed, len(run.tokens)))
            return "append: given back"
        return "append: done"

    def release(self, run: Run) -> str:
        kind = self.random.random()
        if kind < 0.7:
            self.model.release(run, done=kind < 0.2)
            return "release"
        if kind < 0.85:
            self.model.release(run, discard=True)
            return "release: discard"
        self.model.release(run, keep=self.random.randint(0, len(run.tokens)))
        return "release: keep some"

    def on_the_cache(self, kind: float) -> str:
        """Operations that concern no single lease; `kind` from 0.84 to 1."""
        rnd, model = self.random, self.model
        if kind < 0.88:
            before = model.cache.stats.cached_blocks
            model.evict(rnd.randint(0, 8))
            return "evict: all there was" if before and not model.cache.stats.cached_blocks else "evict"
        if kind < 0.91:
            model.pin(self.prompt(), rnd.choice(NAMESPACES), rnd.choice([None, 1.0, 5.0, 50.0]))
            return "pin"
        if kind < 0.93:
            for namespace, tokens in list(model.pins):
                model.unpin(list(tokens), namespace)
                return "unpin"
            return "unpin: no pin"
        if kind < 0.95:
            model.clock.now += rnd.choice([0.1, 1.0, 10.0])
            return "time passes"
        if kind < 0.953:
            model.reset()
            return "reset"
        if kind < 0.956:
            return self.rebuild()
        if kind < 0.975:
            tokens = rnd.choice(self.history) if self.history and rnd.random() < 0.7 else self.prompt()
            gone = model.discard(tokens, rnd.choice(NAMESPACES), rnd.choice([0, rnd.randint(0, len(tokens))]))
            return "discard: something" if gone else "discard: nothing"
        found = model.match(self.prompt(), rnd.choice(NAMESPACES))
        model.cache.explain(self.prompt(), rnd.choice(NAMESPACES), admin=rnd.random() < 0.5)
        return "match: hit" if found else "match: miss"

    def rebuild(self) -> str:
        # A broken cache can't tell its followers everything, so it is only broken where there are none.
        if self.model.residency is not None or self.random.random() < 0.3:
            self.model.rebuilt()
            return "rebuilt"
        self.model.rebuilt(self.random.choice(DAMAGES))
        return "rebuilt: was damaged"


def _any_node(cache: PrefixCache) -> Node:
    tree = cache.tree.index
    for node in tree.nodes():
        return node
    if not tree.roots:
        cache.acquire([1])  # nothing is held: all blocks are free
    return next(iter(tree.roots.values()))


def _have_a_block_twice(cache: PrefixCache) -> None:
    _any_node(cache).blocks.append(0)


def _miscount_a_reference(cache: PrefixCache) -> None:
    _any_node(cache).refs += 1


def _miscount_an_account(cache: PrefixCache) -> None:
    _any_node(cache).owner.account.blocks += 1


DAMAGES = (_have_a_block_twice, _miscount_a_reference, _miscount_an_account)


def _constant_hash(data: bytes) -> int:
    return 7


def fuzz(steps: int, seed: int, walk: int = 2000, policy: str | None = None) -> Counter[str]:
    """Run `steps` operations in walks of `walk`, each with a configuration of its own.

    The walks have the seeds `seed`, `seed + 1`, ... Every step is verified. Returns how often each operation
    had each outcome.
    """
    outcomes: Counter[str] = Counter()
    for number, start in enumerate(range(0, steps, walk)):
        fuzzer = Fuzzer(seed + number, policy)
        for step in range(min(walk, steps - start)):
            try:
                outcomes[fuzzer.step()] += 1
                fuzzer.model.verify()
            except BaseException:
                print(
                    f"failed: seed {seed + number}, step {step} of its walk; {fuzzer.model.cache!r}",
                    file=sys.stderr,
                )
                raise
        fuzzer.model.drain()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the prefix cache against a simple model.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first walk; the next ones count on")
    parser.add_argument("--walk", type=int, default=2000, help="steps with one configuration")
    parser.add_argument("--policy", default=None, help="always this one")
    args = parser.parse_args()
    start = time.perf_counter()
    outcomes: Counter[str] = Counter()
    chunk = 20 * args.walk
    for done in range(0, args.steps, chunk):
        outcomes += fuzz(min(chunk, args.steps - done), args.seed + done // args.walk, args.walk, args.policy)
        elapsed = time.perf_counter() - start
        print(f"{outcomes.total():>9,} of {args.steps:,} steps, {elapsed:.0f} s", flush=True)
    walks = -(-args.steps // args.walk)
    print(f"walks with the seeds {args.seed} to {args.seed + walks - 1}, every step verified:")
    for name, count in sorted(outcomes.items()):
        print(f"{count:>11,}  {name}")
    print(f"no difference found in {outcomes.total():,} steps, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
