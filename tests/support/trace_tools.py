# SPDX-License-Identifier: Apache-2.0
"""Small traces for the tests, and models of a cache that are too simple to be wrong."""

from __future__ import annotations

import json
import os
import random
from itertools import combinations
from pathlib import Path

import pytest
import typer

from radixkv.cli.replay import replay_command, simulate_command
from radixkv.cli.replay.trace import Trace, TraceBuilder


def traces_folder() -> Path:
    """The folder of the recorded traces; skips the test when there is none."""
    folder = Path(os.environ.get("RADIXKV_TRACES", "traces"))
    if not (folder / "chat_bytes64.ref.json").exists():
        pytest.skip(f"no traces in {folder}; set RADIXKV_TRACES to the folder that holds them")
    return folder


def build(paths: list[list[int]], block_size: int = 16, name: str = "made up") -> Trace:
    """A trace of full blocks from lists of prefix ids."""
    builder = TraceBuilder(name)
    for number, path in enumerate(paths):
        builder.add(path, input_length=len(path) * block_size, arrival=float(number), output_length=8)
    return builder.build(block_size)


def random_paths(rng: random.Random, requests: int, blocks: int = 3, depth: int = 4) -> list[list[int]]:
    """Random walks from the root of a trie with `blocks` children per node."""
    ids: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(requests):
        walk = tuple(rng.randrange(blocks) for _ in range(rng.randint(1, depth)))
        paths.append([ids.setdefault(walk[: end + 1], len(ids)) for end in range(len(walk))])
    return paths


def plain_lru(paths: list[list[int]], capacity: int) -> list[int]:
    """Hits per request of a cache of blocks that drops the least recently used one, path tail first."""
    order: list[int] = []  # least recently used first; a parent always stands after its children
    hits = []
    for path in paths:
        hit = 0
        while hit < len(path) and path[hit] in order:
            hit += 1
        hits.append(hit)
        pinned = path[:capacity]
        order = [block for block in order if block not in pinned]
        order = order[max(0, len(order) + len(pinned) - capacity) :]
        order += reversed(pinned)
    return hits


def exhaustive_optimum(paths: list[list[int]], capacity: int) -> int:
    """Most hit blocks that any choice of what to keep can reach, the running request being resident."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        pinned = frozenset(path[:capacity])
        after: dict[frozenset[int], int] = {}
        for resident, hits in states.items():
            hit = 0
            while hit < len(path) and path[hit] in resident:
                hit += 1
            others = sorted(resident - pinned)
            keep = min(len(others), capacity - len(pinned))
            for kept in combinations(others, keep):
                state = pinned | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + hit)
        states = after
    return max(states.values())


def write_hash_ids(path: Path, paths: list[list[int]], gap_ms: int, output_length: int = 20) -> Path:
    """Write a trace of hash ids, 64 tokens a block, of requests so many milliseconds apart."""
    lines = [
        {"timestamp": gap_ms * n, "input_length": 64 * len(p), "output_length": output_length, "hash_ids": p}
        for n, p in enumerate(paths)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def replay_app() -> typer.Typer:
    """The commands `replay` and `simulate` alone."""
    application = typer.Typer()
    replay_command.add_commands(application)
    simulate_command.add_commands(application)
    return application
