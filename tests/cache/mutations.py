"""Do the tests notice when the cache is broken? Seeds one fault at a time and runs them.

    python tests/cache/mutations.py [NAME ...]

Each mutation replaces one piece of the source in a temporary copy; the tests of this folder must fail on it.
A mutation whose text is no longer found is an error too: update it with the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new`, once, in a file of radixkv/cache."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation("drop a decrement", "radix_tree.py", "            current.refs -= 1\n", "            pass\n"),
    Mutation(
        "skip the token check of an edge",
        "radix_tree.py",
        "                if data.startswith(key, pos, stop):",
        "                if len(key) <= stop - pos:",
    ),
    Mutation(
        "trust the hash of the first block",
        "node.py",
        "        return entry if entry.key.startswith(block) else None",
        "        return entry",
    ),
    Mutation(
        "evict a held leaf",
        "radix_tree.py",
        "                group.index.remove(current)\n            current = current.parent",
        "                pass\n            current = current.parent",
    ),
    Mutation(
        "hand out a block twice",
        "block_pool.py",
        "        self.num_free = top - count\n",
        "        self.num_free = top - max(count - 1, 0)\n",
    ),
    Mutation(
        "forget to free private blocks on release",
        "holding.py",
        "    if private:\n",
        "    if False:\n",
    ),
    Mutation(
        "copy one slot too many",
        "admission.py",
        "            slots = cached - depth\n",
        "            slots = cached - depth + 1\n",
    ),
    Mutation(
        "take over a partial block that is held",
        "admission.py",
        "        elif not source.holders and source.end == found:",
        "        elif source.end == found:",
    ),
    Mutation(
        "do not hold the source of a copy",
        "admission.py",
        "    if source is not None:\n        cache._tree.protect(source)\n",
        "",
    ),
    Mutation(
        "write into a fork's shared block",
        "lease.py",
        "                copy = self._node.holders > 1",
        "                copy = False",
    ),
    Mutation(
        "keep the duplicate after converging",
        "commit.py",
        "    cache._capacity.free_private(own, lease._space.group)\n",
        "",
    ),
    Mutation(
        "do not remap the block table after converging",
        "commit.py",
        "    lease._table[first : first + count] = target.blocks\n",
        "",
    ),
    Mutation(
        "split one block too late",
        "radix_tree.py",
        "        node.start += num_blocks * self.block_size\n",
        "        node.start += (num_blocks - 1) * self.block_size\n",
    ),
    Mutation(
        "commit one token too many",
        "commit.py",
        "    num_blocks = len(blocks)\n",
        "    num_blocks = len(blocks)\n    end = min(end + 1, lease.num_tokens, pos + num_blocks * size)\n",
    ),
    Mutation(
        "evict the most recently used first",
        "eviction/policies.py",
        "    def priority(self, node: Node) -> Any:\n        return node.last_access\n",
        "    def priority(self, node: Node) -> Any:\n        return -node.last_access\n",
    ),
    Mutation(
        "evict the head of a run",
        "radix_tree.py",
        "        taken = leaf.blocks[keep:]\n",
        "        taken = leaf.blocks[:num_blocks]\n",
    ),
    Mutation(
        "ignore the namespace",
        "keys.py",
        "    if type(namespace) is str:\n        return (namespace,)\n",
        "    if type(namespace) is str:\n        return ('',)\n",
    ),
    Mutation(
        "let pins exceed their budget",
        "retention/pins.py",
        "            count = min(wanted, budget)\n",
        "            count = wanted\n",
    ),
    Mutation(
        "let a pin live on",
        "retention/pins.py",
        "        while self._heap and self._heap[0][0] <= now:",
        "        while self._heap and self._heap[0][0] <= now - 1000:",
    ),
    Mutation(
        "push a tenant under its floor",
        "retention/capacity.py",
        "                limit = min(limit, max(1, victim_group.yields()))\n",
        "                pass\n",
    ),
    Mutation(
        "leave withdrawn tokens in the tree",
        "lease.py",
        "            detach_from(self._cache, self, cut)\n",
        "",
    ),
    Mutation(
        "share again after a reset",
        "prefix_cache.py",
        "            lease._is_unshareable = True\n        self._lagging.clear()",
        "            pass\n        self._lagging.clear()",
    ),
    Mutation(
        "ghosts ignore the prefix",
        "insight/prefix_hash.py",
        "        return _hash(data[start:end], chain)\n",
        "        return _hash(data[max(start, end - 4) : end], 0)\n",
    ),
    Mutation(
        "forget an event",
        "radix_tree.py",
        "            self.listener.removed(leaf, keep)\n",
        "            pass\n",
    ),
    Mutation(
        "discard a block too many",
        "holding.py",
        "        keep = max(0, -(-(cut - node.start) // size))\n",
        "        keep = max(0, (cut - node.start) // size)\n",
    ),
    Mutation(
        "discard what a lease needs",
        "holding.py",
        "    while node.parent is not None and not node.refs and node.is_leaf and node.end > cut:",
        "    while node.parent is not None and node.is_leaf and node.end > cut:",
    ),
    Mutation(
        "discard nothing",
        "prefix_cache.py",
        "            discard_from(self, walk.source if walk.source is not None else walk.node, keep)\n",
        "            pass\n",
    ),
    Mutation(
        "rebuild without the quotas",
        "prefix_cache.py",
        "            quotas={key: (group.floor, group.ceiling) for key, group in",
        "            quotas={key: (0, None) for key, group in",
    ),
    Mutation(
        "rebuild without a word to followers",
        "prefix_cache.py",
        "        with contextlib.suppress(Exception):  # tells followers",
        "        with contextlib.suppress(Exception):\n            raise KeyError  # tells followers",
    ),
    Mutation(
        "rebuild without the public prefixes",
        "prefix_cache.py",
        "        for prefix in self._public.prefixes:\n            fresh",
        "        for prefix in ():\n            fresh",
    ),
]


def run_tests(folder: Path) -> bool:
    """Whether the tests of the copy in `folder` pass."""
    command = [sys.executable, "-m", "pytest", "tests/cache", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    return result.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seed faults in the prefix cache; the tests must catch each."
    )
    parser.add_argument("names", nargs="*", help="only these mutations")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.names or m.name in args.names]
    survivors = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(ROOT / "radixkv", folder / "radixkv", ignore=shutil.ignore_patterns("__pycache__"))
        for tests in ("tests/cache", "tests/support"):
            shutil.copytree(ROOT / tests, folder / tests, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if not run_tests(folder):
            sys.exit("the tests fail without any mutation")
        for mutation in chosen:
            path = folder / "radixkv/cache" / mutation.file
            source = path.read_text()
            if source.count(mutation.old) != 1:
                sys.exit(
                    f"{mutation.name}: its text occurs {source.count(mutation.old)} times in {mutation.file}"
                )
            path.write_text(source.replace(mutation.old, mutation.new))
            start = time.perf_counter()
            try:
                caught = not run_tests(folder)
            except subprocess.TimeoutExpired:
                caught = True
            path.write_text(source)
            print(
                f"{'caught' if caught else 'MISSED':<8}{mutation.name} ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            if not caught:
                survivors.append(mutation.name)
    if survivors:
        sys.exit(f"{len(survivors)} of {len(chosen)} mutations were not caught: {', '.join(survivors)}")
    print(f"all {len(chosen)} mutations were caught")


if __name__ == "__main__":
    main()
