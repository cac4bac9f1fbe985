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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from model import ModelledCache, Run

NAMESPACES = ("", "tenant", ("tenant", "salt"))


class Fuzzer:
    """One random walk over the operations; the configuration itself is drawn from the seed."""

    def __init__(self, seed: int, policy: str | None = None) -> None:
        from radixkv.cache.eviction import POLICIES

        self.random = random.Random(seed)
        rnd = self.random
        options: dict[str, object] = {
            "policy": policy or rnd.choice(sorted(POLICIES)),
            "ghost_blocks": rnd.choice([0, 8, None]),
            "pin_budget": rnd.choice([0.0, 0.3, 0.5]),
            "partial_reuse": rnd.random() < 0.9,
        }
        if rnd.random() < 0.2:
            options["hash_function"] = _constant_hash
        num_blocks = rnd.choice([6, 12, 24, 48])
        if rnd.random() < 0.3:
            options["quotas"] = {"tenant": (num_blocks // 4, num_blocks // 2)}
        self.model = ModelledCache(num_blocks, rnd.choice([1, 2, 4, 5]), **options)
        if rnd.random() < 0.3:
            self.model.follow_events()
        self.alphabet = rnd.choice([2, 3, 8])
        self.history: list[list[int]] = []
        if rnd.random() < 0.3:
            for _ in range(2):
                prefix = self.prompt()
                self.model.cache.publish(prefix)
                self.model.public.append(
                    prefix[: len(prefix) // self.model.block_size * self.model.block_size]
                )

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

    def step(self) -> None:
        rnd, model = self.random, self.model
        kind = rnd.random()
        run = rnd.choice(model.runs) if model.runs else None
        if run is None or (kind < 0.2 and len(model.runs) < 7):
            new = model.acquire(self.prompt(), rnd.choice(NAMESPACES), rnd.random() < 0.5)
            if new is not None and rnd.random() < 0.6:
                model.commit(new, rnd.randint(1, len(new.tokens)))
        elif kind < 0.45:
            model.commit(run, rnd.randint(min(run.committed + 1, len(run.tokens)), len(run.tokens)))
        elif kind < 0.65:
            count = 1 if rnd.random() < 0.7 else rnd.randint(1, 9)
            if model.append(run, [rnd.randrange(self.alphabet) for _ in range(count)]):
                self.history.append(list(run.tokens[:40]))
                if rnd.random() < 0.7:
                    model.commit(run, len(run.tokens))
        elif kind < 0.77:
            self.release(run)
        elif kind < 0.82 and len(model.runs) < 7:
            model.fork(run)
        elif kind < 0.84:
            model.withdraw(run, rnd.randint(0, run.committed))
        elif kind < 0.88:
            model.evict(rnd.randint(0, 8))
        elif kind < 0.91:
            model.pin(self.prompt(), rnd.choice(NAMESPACES), rnd.choice([None, 1.0, 5.0, 50.0]))
        elif kind < 0.93:
            for namespace, tokens in list(model.pins):
                model.unpin(list(tokens), namespace)
                break
        elif kind < 0.96:
            model.clock.now += rnd.choice([0.1, 1.0, 10.0])
        elif kind < 0.963:
            model.reset()
        else:
            model.match(self.prompt(), rnd.choice(NAMESPACES))
            self.model.cache.explain(self.prompt(), rnd.choice(NAMESPACES), admin=rnd.random() < 0.5)

    def release(self, run: Run) -> None:
        kind = self.random.random()
        if kind < 0.7:
            self.model.release(run)
        elif kind < 0.85:
            self.model.release(run, discard=True)
        else:
            self.model.release(run, keep=self.random.randint(0, len(run.tokens)))


def _constant_hash(data: bytes) -> int:
    return 7


def fuzz(steps: int, seed: int, walk: int = 2000, policy: str | None = None) -> None:
    """Run `steps` operations in walks of `walk`, each with a configuration of its own."""
    done = 0
    while done < steps:
        fuzzer = Fuzzer(seed, policy)
        for step in range(min(walk, steps - done)):
            try:
                fuzzer.step()
                fuzzer.model.verify()
            except BaseException:
                print(
                    f"failed: seed {seed}, step {step} of its walk; {fuzzer.model.cache!r}", file=sys.stderr
                )
                raise
            done += 1
        fuzzer.model.drain()
        seed += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the prefix cache against a simple model.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default=None)
    args = parser.parse_args()
    start = time.perf_counter()
    chunk = 20_000
    for done in range(0, args.steps, chunk):
        fuzz(min(chunk, args.steps - done), args.seed + done, policy=args.policy)
        elapsed = time.perf_counter() - start
        print(f"{min(done + chunk, args.steps):>9,} of {args.steps:,} steps, {elapsed:.0f} s", flush=True)
    print("no difference found")


if __name__ == "__main__":
    main()
