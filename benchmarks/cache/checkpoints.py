# SPDX-License-Identifier: Apache-2.0
"""How much of agents' prompts need not be computed again by a model with states, with few checkpoints?

    python -m benchmarks.checkpoints [TRACE...] [--checkpoints 32] [--requests N] [--json FILE]

Sends the prompts of recorded traces, one after the other, through the real engine (scheduler, prefix cache,
checkpoints) over a runner that computes nothing; there is K/V memory for all. Beside the engine's share of
prompt tokens not computed stands that of a simulation of the same policy over the trace's blocks alone,
without a tree, and that of a model without states (any prefix is found).

Two slots more are for the request that runs. Default: the agent traces in the
folder that RADIXKV_TRACES names.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.traces import traces_folder
from radixkv import PrefixCache
from radixkv.cache.states.checkpoint import GRID
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.without_states import WithoutStates
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch

TRACES = {"agent_a64": 64, "agent_a": 512}  # tokens of a block of each
TARGETS = {"agent_a64": 0.92, "agent_a": 0.82}
_VOCABULARY = 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A prompt of a trace: its length in tokens, and the ids of its blocks of `GRID` tokens."""

    length: int
    blocks: np.ndarray[Any, np.dtype[np.int64]]

    def token_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """As many tokens as it has; the same in blocks with the same id, else others."""
        tokens = (self.blocks[:, None] * GRID + np.arange(GRID)).reshape(-1)[: self.length]
        rest = np.full(self.length - len(tokens), 2**31 - 1)
        return np.concatenate([tokens, rest]).astype(np.int32)


def load(path: Path, block: int, most: int | None) -> list[TraceRequest]:
    """The requests of a trace, the first `most` of them."""
    requests: list[TraceRequest] = []
    with gzip.open(path, "rt") as file:
        for line in file:
            if most is not None and len(requests) >= most:
                break
            entry = json.loads(line)
            ids = np.asarray(entry["hash_ids"], np.int64)
            parts = block // GRID
            ids = (ids[:, None] * parts + np.arange(parts)).reshape(-1)
            # A block that is not full is not named: what a prompt ends with is nobody else's prefix here.
            length = min(entry["input_length"], len(ids) * GRID + GRID - 1)
            requests.append(TraceRequest(length, ids[: length // GRID]))
    return requests


class NullRunner(WithoutStates):
    """Computes nothing: every token follows as likely as any other."""

    backend_name, dtype_name, device_name, failure = "none", "none", "cpu", None
    bytes_per_block = 0

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_blocks, self.block_size = num_blocks, GRID
        self._num_slots = num_slots
        self.num_computed = 0

    @property
    def num_state_slots(self) -> int:
        return self._num_slots

    def on_failure(self, call: object) -> None:
        """Never called."""

    def close(self) -> None:
        """Nothing belongs to it."""

    def execute(self, batch: Batch) -> torch.Tensor:
        """Count the tokens."""
        self.num_computed += batch.num_tokens
        return torch.zeros((len(batch.logit_rows), _VOCABULARY))


def serve(requests: list[TraceRequest], num_slots: int) -> float:
    """The share of prompt tokens that the engine does not compute; no slots: of a model without states."""
    blocks = len(set().union(*(set(request.blocks.tolist()) for request in requests)))
    longest = max(request.length for request in requests)
    num_blocks = blocks + 2 * len(requests) + longest // GRID
    runner = NullRunner(num_blocks, num_slots)
    config = EngineConfig(block_size=GRID, num_blocks=num_blocks, max_num_seqs=1, speculation="off")
    engine = engine_on_runner(
        config,
        runner,  # type: ignore[arg-type]  # what it never does is left out
        tokenizer=None,
        max_model_len=longest + 1,
        max_num_batched_tokens=longest,
    )
    for request in requests:
        engine.add_request(PrefixCache.encode(request.token_ids()), SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
    engine.check()
    total = sum(request.length for request in requests)
    return 1 - runner.num_computed / total


class _Point:
    """A checkpoint of the simulation."""

    __slots__ = ("at", "base", "heir", "hits", "priority", "superseded")

    def __init__(self, at: int, base: int) -> None:
        self.at, self.base = at, base
        self.heir: int | None = None
        self.hits, self.superseded = 0, False
        self.priority = (0.0, 0)


def simulate(requests: list[TraceRequest], most: int) -> float:
    """The same share by the policy alone: a prefix is the id of its last block, K/V is a set of ids."""
    points: dict[tuple[int, int], _Point] = {}
    heap: list[tuple[tuple[float, int], tuple[int, int]]] = []
    seen: set[int] = set()
    clock, tick, saved, total = 0.0, 0, 0, 0

    def touch(key: tuple[int, int], point: _Point) -> None:
        nonlocal tick
        tick += 1
        worth = (point.at - point.base) * (0.25 if point.superseded else 1.0)
        point.priority = (clock + worth, tick)
        heapq.heappush(heap, (point.priority, key))

    def put(key: tuple[int, int], base: int) -> None:
        nonlocal clock
        point = points.get(key)
        if point is None:
            point = points[key] = _Point(key[1], base)
        touch(key, point)
        while len(points) > most:
            priority, victim = heapq.heappop(heap)
            if victim in points and points[victim].priority == priority:
                del points[victim]
                clock = max(clock, priority[0])

    for request in requests:
        ids = request.blocks.tolist()
        end, known = len(ids), 0
        while known < end and ids[known] in seen:
            known += 1
        kv = min(known * GRID, (request.length - 1) // GRID * GRID)
        at = kv
        while at and (ids[at // GRID - 1], at) not in points:
            at -= GRID
        saved, total, base = saved + at, total + request.length, 0
        if at:
            key = (ids[at // GRID - 1], at)
            hit = points[key]
            hit.hits += 1
            heir = ids[min(end, at // GRID + 8) - 1] if end * GRID > at else None
            if heir is not None:
                hit.heir = heir if hit.heir is None else hit.heir
                if hit.heir != heir:
                    hit.superseded = False
                elif hit.hits == 1:
                    hit.superseded = True
            touch(key, hit)
            base = hit.base if hit.superseded else at
        if at < kv < end * GRID:
            put((ids[kv // GRID - 1], kv), base)
            base = kv
        if end * GRID > at:
            put((ids[-1], end * GRID), base)
        seen.update(ids)
    return saved / total


def main() -> None:
    """Measure the traces, and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"of {', '.join(TRACES)}")
    parser.add_argument("--checkpoints", type=int, default=32, help="checkpoints that may stay in the tree")
    parser.add_argument("--requests", type=int, help="of each trace, the first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"checkpoints": args.checkpoints}
    table = Table("trace", "requests", "engine", "simulation", "any prefix", "at least", "seconds")
    for name in args.traces or TRACES:
        path = traces_folder() / f"{name}.jsonl.gz"
        if name not in TRACES or not path.exists():
            parser.error(f"there is no trace {path}; name its folder by RADIXKV_TRACES")
        requests = load(path, TRACES[name], args.requests)
        began = time.process_time()
        row = {
            "requests": len(requests),
            "engine": serve(requests, args.checkpoints + 2),
            "simulation": simulate(requests, args.checkpoints),
            "any_prefix": serve(requests, 0),
            "at_least": TARGETS[name],
            "cpu_s": time.process_time() - began,
        }
        figures[name] = row
        shown = [f"{row[key]:.4f}" for key in ("engine", "simulation", "any_prefix")]
        table.add_row(name, str(len(requests)), *shown, str(TARGETS[name]), f"{row['cpu_s']:.0f}")
    Console().print(table)
    if args.json:
        write_figures(args.json, "checkpoints", figures)


if __name__ == "__main__":
    main()
