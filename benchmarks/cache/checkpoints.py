# SPDX-License-Identifier: Apache-2.0
"""How much of agents' prompts need not be computed again by a model with states, with few checkpoints?

    python -m benchmarks.checkpoints [TRACE...] [--checkpoints 32] [--restarts 10] [--requests N]

Sends the prompts of recorded traces, one after the other, through the real engine (scheduler, prefix cache,
checkpoints) over a runner that computes nothing; there is K/V memory for all. Beside the engine's share of
prompt tokens not computed stands that of a simulation of the same policy over the trace's blocks alone,
without a tree, and that of a model without states (any prefix is found).

With restarts, the engine ends and another one begins at equal distances in the trace: once over a disk tier
that keeps K/V and states, once with nothing kept. In both runs time is the runner's own, a tenth of a
millisecond a token, so that loads pay. Each state is checked to be of the prompt that goes on from it.

Two slots more are for the request that runs. Default: the agent traces in the
folder that RADIXKV_TRACES names.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.block_copy import BlockCopy
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.tier import TierStack

TRACES = {"agent_a64": 64, "agent_a": 512}  # tokens of a block of each
TARGETS = {"agent_a64": 0.92, "agent_a": 0.82}
_VOCABULARY = 8
_BYTES = 4  # of a block and of a state: the id of its last token
_TOKEN_S = 1e-4
_MAX_DISK_BYTES = 8 << 30


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


class NullSlots:
    """Slots that hold the id of the last token of a state."""

    bytes_per_slot = _BYTES

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_bytes = num_slots, num_slots * _BYTES
        self.tokens = np.zeros(num_slots, np.int32)

    def save(self, slots: Sequence[int]) -> BlockCopy:
        """Copy the contents of slots."""
        return _copied(self.tokens, slots)

    def load(self, slots: Sequence[int], data: Sequence[Any]) -> None:
        """Fill slots."""
        self.tokens[slots] = [np.frombuffer(row, np.int32)[0] for row in data]


class NullRunner:
    """Computes nothing: every token follows as likely as any other.

    A block and a state hold the id of their last token, which names the whole prefix in a trace.
    """

    backend_name, dtype_name, device_name, failure = "none", "none", "cpu", None
    bytes_per_block = _BYTES

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_blocks, self.block_size = num_blocks, GRID
        self._blocks = np.zeros(num_blocks, np.int32)
        self.states = NullSlots(num_slots) if num_slots else None
        self.windows = None
        self.images = None
        self.num_computed = 0

    def on_failure(self, call: object) -> None:
        """Never called."""

    def close(self) -> None:
        """Nothing belongs to it."""

    def now(self) -> float:
        """Seconds that it would have computed for."""
        return self.num_computed * _TOKEN_S

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        """Copy the contents of blocks."""
        return _copied(self._blocks, blocks)

    def load(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        """Fill blocks."""
        self._blocks[blocks] = [np.frombuffer(row, np.int32)[0] for row in data]

    def execute(self, batch: Batch) -> torch.Tensor:
        """Count the tokens of the only request.

        Raises:
            AssertionError: it goes on from K/V or from a state of other tokens.
        """
        entry, states = batch.entries[0], batch.states
        tokens = entry.request.tokens(0, entry.end)
        rows = slice(None) if batch.write_rows is None else batch.write_rows
        self._blocks[batch.write_slots // GRID] = batch.token_ids[rows]  # the last one of a block stays
        count = len(tokens) // GRID
        kept = self._blocks[batch.block_tables[0][:count]]
        assert np.array_equal(kept, tokens[GRID - 1 : count * GRID : GRID]), "K/V of other tokens"
        if states is not None:
            assert self.states is not None
            base, slot = states.base_positions[0], states.base_slots[0]
            assert not base or self.states.tokens[slot] == tokens[base - 1], "a state of other tokens"
            written = [(states.target_positions[0], states.target_slots[0])]
            written += [(position, slot) for _, position, slot in states.saves]
            for position, slot in written:
                if slot >= 0:
                    self.states.tokens[slot] = tokens[position - 1]
        self.num_computed += batch.num_tokens
        return torch.zeros((len(batch.logit_rows), _VOCABULARY))


def _copied(memory: np.ndarray[Any, Any], rows: Sequence[int]) -> BlockCopy:
    return BlockCopy(memory[rows].view(np.uint8).reshape(len(rows), _BYTES))


def serve(requests: list[TraceRequest], num_slots: int, parts: int = 1, folder: Path | None = None) -> float:
    """The share of prompt tokens that the engine does not compute; no slots: of a model without states.

    Args:
        parts: engines, one after the other, each with its part of the requests.
        folder: what these have in common: that of a disk tier; None: nothing.
    """
    blocks = len(set().union(*(set(request.blocks.tolist()) for request in requests)))
    longest = max(request.length for request in requests)
    num_blocks = blocks + 2 * len(requests) + longest // GRID
    config = EngineConfig(
        block_size=GRID,
        num_blocks=num_blocks,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        speculation="off",
    )
    num_computed = 0
    for part in range(parts):
        runner = NullRunner(num_blocks, num_slots)
        options: dict[str, Any] = {}
        if folder is not None:
            options = {"tier": _disk(folder, num_slots > 0), "clock": runner.now}
        engine = engine_on_runner(
            config,
            runner,  # type: ignore[arg-type]  # what it never does is left out
            ServedModel(tokenizer=None, max_model_len=longest + 1),
            **options,
        )
        for request in requests[len(requests) * part // parts : len(requests) * (part + 1) // parts]:
            engine.add_request(PrefixCache.encode(request.token_ids()), SamplingParams(max_tokens=1))
            while engine.has_work or engine.idle_s == 0.0:
                for output in engine.step().finished:
                    assert output.outputs[0].finish_reason == "length", output
                if engine.has_work:
                    engine.wait()
        engine.check()
        engine.close()
        num_computed += runner.num_computed
    return 1 - num_computed / sum(request.length for request in requests)


def _disk(folder: Path, has_states: bool) -> TierStack:
    kind = BlockKind("null", "", GRID, _BYTES)
    states = replace(kind, kv_format="states") if has_states else None
    return TierStack([DiskTier(folder, _MAX_DISK_BYTES, kind, states=states)])


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
    parser.add_argument("--restarts", type=int, default=0, help="of the engine, within each trace")
    parser.add_argument("--requests", type=int, help="of each trace, the first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"checkpoints": args.checkpoints}
    names = ["engine", "simulation", "any_prefix"]
    if args.restarts:
        figures["restarts"] = args.restarts
        names += ["restarts_disk", "restarts_nothing_kept"]
    columns = [name.replace("_", " ") for name in names]
    table = Table("trace", "requests", *columns, "at least", "seconds")
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
        }
        if args.restarts:
            several = requests, args.checkpoints + 2, args.restarts + 1
            with tempfile.TemporaryDirectory() as folder:
                row["restarts_disk"] = serve(*several, Path(folder))
            row["restarts_nothing_kept"] = serve(*several)
        row["cpu_s"] = time.process_time() - began
        figures[name] = row
        shown = [f"{row[key]:.4f}" for key in names]
        table.add_row(name, str(len(requests)), *shown, str(TARGETS[name]), f"{row['cpu_s']:.0f}")
    Console(width=100).print(table)
    if args.json:
        write_figures(args.json, "checkpoints", figures)


if __name__ == "__main__":
    main()
