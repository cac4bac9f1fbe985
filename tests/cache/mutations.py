# SPDX-License-Identifier: Apache-2.0
"""Do the tests notice when the cache, or what loads and saves its blocks, is broken? One fault at a time.

    python tests/cache/mutations.py [NAME ...]
    python tests/cache/mutations.py --list        # only see that every mutation still has its place

Each mutation changes the syntax tree of one function in a temporary copy; the tests of its room must
fail on it. Functions are found by name wherever they live in that room, and places in them by a pattern:
source in which `_` stands for any expression, and `_a`, `_b`, ... for ones that the replacement repeats. So
layout, files and receivers may change. A mutation that no longer has exactly one place is an error: update
it with the code.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WILDCARD = re.compile(r"_[a-z]?")
_IGNORED = ("ctx", "kind", "type_comment")

# What is most likely to fail runs first, what takes longest last.
FIRST = ("tests/cache/test_state_machine.py", "tests/cache/test_sharing.py", "tests/cache/test_leases.py")
LAST = ("tests/cache/test_matching.py", "tests/cache/test_namespaces.py", "tests/cache/test_large_caches.py")
TIER_TESTS = ("loads", "saves", "load_faults", "traffic_with_a_tier")
MAX_CPU_S = 240  # the tests take 40

Captures = dict[str, ast.AST]


@dataclass(frozen=True)
class Mutation:
    """Replace what matches `old` by `new`, in one function.

    Attributes:
        where: `function` or `Class.function`.
        old: a pattern: an expression, or a simple statement.
        new: of the same kind; `pass` removes a statement.
        room: the package below radixkv that has the function.
    """

    name: str
    where: str
    old: str
    new: str
    room: str = "cache"


MUTATIONS = [
    Mutation("drop a decrement", "RadixTree.unprotect", "_.refs -= 1", "pass"),
    Mutation(
        "skip the token check of an edge",
        "RadixTree.walk",
        "data.startswith(_a, _, _b)",
        "len(_a) <= _b - pos",
    ),
    Mutation("keep the identities of what was cut off", "RadixTree.trim", "del leaf.ids[_:]", "pass"),
    Mutation("evict a held leaf", "RadixTree.protect", "_.index.remove(_)", "None"),
    Mutation(
        "hand out a block twice", "BlockPool.allocate", "_a = top - count", "_a = top - max(count - 1, 0)"
    ),
    Mutation("forget to free private blocks on release", "Lease.release", "_.free_private(_, _)", "None"),
    Mutation("copy one slot too many", "Leasing.make", "cached - depth", "cached - depth + 1"),
    Mutation(
        "take over a partial block that is held",
        "Leasing.make",
        "not _.holders and _a",
        "_a",
    ),
    Mutation("do not hold the source of a copy", "Leasing._grant", "_.protect(source)", "None"),
    Mutation("write into a fork's shared block", "Lease._must_copy_tail", "_.holders > 1", "False"),
    Mutation("keep the duplicate after deduping", "Lease._dedupe", "_.free_private(_, _)", "None"),
    Mutation(
        "do not remap the block table after deduping", "Lease._dedupe", "_.replace_blocks(_, _)", "None"
    ),
    Mutation(
        "split one block too late",
        "RadixTree.split",
        "_a.start += num_blocks * _b",
        "_a.start += (num_blocks - 1) * _b",
    ),
    Mutation(
        "commit one token too many",
        "Lease._insert",
        "bytearray(_a[_b:_])",
        "bytearray(_a[_b : (end := min(end + 1, self.num_tokens, pos + len(blocks) * size)) * 4])",
    ),
    Mutation("evict the most recently used first", "LRU.priority", "_a.last_access", "-_a.last_access"),
    Mutation("evict the head of a run", "RadixTree.trim", "_a = _b[keep:]", "_a = _b[:num_blocks]"),
    Mutation("ignore the namespace", "frame_namespace", "(namespace,)", "('',)"),
    Mutation("let pins exceed their budget", "Pins._target", "min(_a, budget)", "_a"),
    Mutation("let a pin live on", "Pins.expire", "_a[0][0] <= now", "_a[0][0] <= now - 1000"),
    Mutation("push a tenant under its floor", "Capacity._make_room", "min(_a, max(_, _))", "_a"),
    Mutation(
        "leave rolled-back tokens in the tree",
        "Lease.rollback",
        "invalidate_subtree(_, _, _)",
        "None",
    ),
    Mutation("share again after a reset", "invalidate_all", "_.shares = False", "pass"),
    Mutation("identities ignore the prefix", "BlockIdentities.chain", "before + block", "block"),
    Mutation(
        "ghosts ignore the prefix", "GhostIndex.removal", "_.identities.next(before, following)", "following"
    ),
    Mutation(
        "private text after public is public", "BlockIdentities.beyond_public", "before + seed", "before"
    ),
    Mutation("forget an event", "RadixTree.trim", "_.changes.removed(leaf, keep)", "None"),
    Mutation(
        "discard a block too many",
        "Capacity.discard_from",
        "-(-(_a - _b.start) // size)",
        "(_a - _b.start) // size",
    ),
    Mutation(
        "discard what a lease needs",
        "Capacity.discard_from",
        "_.parent is not None and not _.refs and _a and _b",
        "node.parent is not None and _a and _b",
    ),
    Mutation("discard nothing", "PrefixCache.discard", "_.discard_from(_, _)", "None"),
    Mutation("rebuild without the quotas", "PrefixCache.declared", "self._accounts.quotas", "{}"),
    Mutation("rebuild without a word to followers", "PrefixCache.rebuilt", "self.reset()", "None"),
    Mutation(
        "rebuild without the public prefixes",
        "PrefixCache.declared",
        "self._namespaces.declared()",
        "()",
    ),
    # ------------------------------------------------------------------ forks
    Mutation("do not count a fork's hold on private blocks", "Lease.fork", "_.pool.share(_)", "None"),
    Mutation("do not protect a fork's path", "Lease.fork", "_.hold(self.node)", "None"),
    Mutation("let a fork forget the copies it needs", "Lease.fork", "child.pending = _.for_fork()", "pass"),
    Mutation("leave the other forks where they are", "Lease._insert", "_._follow(self, _)", "None"),
    Mutation(
        "free a block when the first of its forks ends", "BlockPool.drop_holder", "extra is None", "True"
    ),
    # ------------------------------------------------------------------ pins
    Mutation("set pins without counting blocks", "Pins.add", "self.pinned_blocks += _a", "_a"),
    Mutation("renew no pin by use", "Pins.refresh", "_.renewed_at = now", "pass"),
    Mutation("end pins that give way for nothing", "Pins.give_way", "self.pinned_blocks += _.pin(_)", "pass"),
    Mutation("let a pin be found by other tokens", "Pins._beyond", "not data.startswith(_)", "False"),
    # ------------------------------------------------------------------ keep
    Mutation(
        "discard what is to be kept",
        "PrefixCache.discard",
        "_.discard_from(_a, keep)",
        "_.discard_from(_a, 0)",
    ),
    Mutation("give drafts back but not their blocks", "Lease.truncate", "_.free_private(_, _)", "None"),
    # ------------------------------------------------------------------ adapters and models
    Mutation(
        "share public text between adapters", "what_computes", "key[_OWNER_PARTS:]", "key[_OWNER_PARTS + 1 :]"
    ),
    Mutation(
        "identities of all adapters are the same",
        "BlockIdentities.seed",
        "framed(what_computes(_)) + _a",
        "_a",
    ),
    Mutation("join the parts of a namespace", "framed", "len(data).to_bytes(8, 'little')", "b''"),
    # ------------------------------------------------------------------ leases for loads and saves
    Mutation("load into blocks of an unprotected path", "Leasing.hold_blocks", "tree.hold(node)", "None"),
    Mutation(
        "load public text as a tenant's own", "BlockLeases.missing", "owner.public if _ else owner", "owner"
    ),
    Mutation("copy out blocks that are not cached", "BlockLeases.hold", "min(run.end, _)", "run.end"),
    Mutation("write loaded blocks after a reset", "Loads.write", "some and lease.shares", "some", "tiers"),
    Mutation("commit blocks that did not come", "Loads._end", "run.start + _ * _", "run.end", "tiers"),
    Mutation("keep the blocks of a load that has ended", "Loads._end", "lease.release()", "None", "tiers"),
    Mutation(
        "keep the blocks of a load that failed to begin", "Loads.start", "lease.release()", "None", "tiers"
    ),
    Mutation("never give up a late load", "Loads.give_up_late", "load.deadline <= now", "False", "tiers"),
    Mutation("believe what a tier gives", "rows_of", "not run.is_same_text(_, _)", "False", "tiers"),
    Mutation("take pieces with a gap", "rows_of", "kept.start == position and _", "True", "tiers"),
    Mutation("hold what has been copied out", "Saves.ended", "_.lease.release(used=False)", "None", "tiers"),
    Mutation(
        "drop the rest of a copy that was stopped",
        "Saves.ended",
        "self._pieces.appendleft(_)",
        "None",
        "tiers",
    ),
]


def _captures(pattern: ast.AST, node: ast.AST, found: Captures) -> bool:
    """Whether a node has the pattern's shape; fills in what the wildcards stand for."""
    if isinstance(pattern, ast.Name) and _WILDCARD.fullmatch(pattern.id):
        if pattern.id != "_":
            found[pattern.id] = node
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    for name, wanted in ast.iter_fields(pattern):
        if name in _IGNORED:
            continue
        actual = getattr(node, name)
        if isinstance(wanted, list):
            if len(wanted) != len(actual) or not all(map(_captures, wanted, actual, [found] * len(wanted))):
                return False
        elif isinstance(wanted, ast.AST):
            if not isinstance(actual, ast.AST) or not _captures(wanted, actual, found):
                return False
        elif wanted != actual:
            return False
    return True


def _parse(text: str) -> ast.AST:
    """An expression, or else a statement."""
    statement = ast.parse(text).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Filled(ast.NodeTransformer):
    """A replacement with what the pattern's wildcards stood for."""

    def __init__(self, found: Captures) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.found.get(node.id, node))


class _Replaced(ast.NodeTransformer):
    """Replaces what matches a mutation's pattern, and counts."""

    def __init__(self, mutation: Mutation) -> None:
        self.old = _parse(mutation.old)
        self.new = _parse(mutation.new)
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        found: Captures = {}
        if _captures(self.old, node, found):
            self.count += 1
            return _Filled(found).visit(copy.deepcopy(self.new))
        return self.generic_visit(node)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module with their names, `function` or `Class.function`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def mutate(mutation: Mutation, package: Path) -> tuple[Path, str]:
    """The file that the mutation changes, and its changed source.

    Raises:
        LookupError: the function, or the pattern in it, does not occur exactly once.
    """
    results = []
    places = 0
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, function in _functions(tree):
            if name == mutation.where:
                places += 1
                replaced = _Replaced(mutation)
                function.body = [replaced.visit(statement) for statement in function.body]
                if replaced.count:
                    results.append((path, replaced.count, tree))
    if places != 1 or len(results) != 1 or results[0][1] != 1:
        count = sum(count for _, count, _ in results)
        raise LookupError(
            f"{mutation.name}: {places} functions are called {mutation.where}, "
            f"`{mutation.old}` occurs {count} times"
        )
    path, _, tree = results[0]
    return path, ast.unparse(ast.fix_missing_locations(tree))


def tests_of(room: str, folder: Path) -> list[str]:
    """The tests that hold a room, those that are most likely to fail first."""
    if room == "tiers":
        return [f"tests/tiers/test_{name}.py" for name in TIER_TESTS]
    paths = [str(path.relative_to(folder)) for path in sorted((folder / "tests/cache").glob("test_*.py"))]
    return sorted(paths, key=lambda path: (path not in FIRST, path in LAST))


def run_tests(room: str, folder: Path) -> bool:
    """Whether the tests of the copy in `folder` pass; those that hang end by the CPU time they took."""
    command = [sys.executable, "-m", "pytest", *tests_of(room, folder), "-x", "-q", "--timeout=0"]
    command += ["-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(folder), str(folder / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S)),
        check=False,
    )
    return result.returncode == 0


def is_caught(mutation: Mutation, folder: Path) -> bool:
    """Whether the tests fail on a mutation, or hang."""
    path, source = mutate(mutation, folder / "radixkv" / mutation.room)
    before = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    try:
        return not run_tests(mutation.room, folder)
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seed faults in the prefix cache; the tests must catch each."
    )
    parser.add_argument("names", nargs="*", help="only these mutations")
    parser.add_argument("--list", action="store_true", help="only see that each has its place")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.names or m.name in args.names]
    for mutation in chosen:
        mutate(mutation, ROOT / "radixkv" / mutation.room)
    if args.list:
        print("\n".join(f"{mutation.where:<24}{mutation.name}" for mutation in chosen))
        return
    survivors = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in (
            "radixkv",
            "kernels",
            "tests/cache",
            "tests/tiers",
            "tests/support",
        ):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for room in sorted({mutation.room for mutation in chosen}):
            if not run_tests(room, folder):
                sys.exit(f"the tests of {room} fail without any mutation")
        for mutation in chosen:
            start = time.perf_counter()
            caught = is_caught(mutation, folder)
            seconds = time.perf_counter() - start
            print(f"{'caught' if caught else 'MISSED':<8}{mutation.name} ({seconds:.0f} s)", flush=True)
            if not caught:
                survivors.append(mutation.name)
    if survivors:
        sys.exit(f"{len(survivors)} of {len(chosen)} mutations were not caught: {', '.join(survivors)}")
    print(f"all {len(chosen)} mutations were caught")


if __name__ == "__main__":
    main()
