# SPDX-License-Identifier: Apache-2.0
"""The recorded traces: exact hit counts, the optimum, and what the adaptive order must reach.

By default policies run some of the cells; `RADIXKV_ALL_CELLS=1` (`make fuzz`) runs all.
"""

from __future__ import annotations

import functools
import json
import math
import os
from typing import Any

import pytest
from nightly import by_day
from trace_tools import traces_folder

from radixkv.cli.replay.bounds import infinite_bound, offline_optimum
from radixkv.cli.replay.driver import replay
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.trace import Trace
from radixkv.cli.replay.workload import from_file

TRACES = ("agent_a", "agent_a64", "chat_bytes64", "mooncake_conversation")
ALL_CELLS = os.environ.get("RADIXKV_ALL_CELLS") == "1"
# (trace, capacity) where LRU stays below 99.5 % of the optimum, cheap ones only unless ALL_CELLS
CONTENDED = {
    "agent_a": (1000, 3000, 10000) if ALL_CELLS else (1000,),
    "agent_a64": (4000, 8000, 16000) if ALL_CELLS else (),
    "chat_bytes64": (400, 600, 1000, 1500) if ALL_CELLS else (400, 1000),
    "mooncake_conversation": (1000, 3000, 10000, 30000, 50000, 100000) if ALL_CELLS else (),
}


@functools.cache
def load(name: str) -> Trace:
    return read_trace(traces_folder() / f"{name}.jsonl.gz")


@functools.cache
def reference(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((traces_folder() / f"{name}.ref.json").read_text())["results"]
    return results


@pytest.mark.parametrize("name", by_day(TRACES, "agent_a64", "chat_bytes64"))
def test_bounds_are_exact_in_every_cell(name: str) -> None:
    trace = load(name)
    trace.check()
    for capacity, row in reference(name).items():
        if capacity == "inf":
            expected = row.get("inf", row)
            found = infinite_bound(trace)
        else:
            expected = row["opt-pin"]
            found = offline_optimum(trace, int(capacity))
        assert (found.hit_blocks, found.hit_tokens) == (expected["hit_blocks"], expected["hit_tokens"])


@pytest.mark.parametrize("name", by_day(TRACES, "agent_a64", "chat_bytes64"))
def test_lru_is_exact(name: str) -> None:
    trace = load(name)
    rows = reference(name)
    # The smallest, one between, and no limit.
    for capacity in rows if ALL_CELLS else [*list(rows)[:-1:3], "inf"]:
        row = rows[capacity]
        expected = row.get("inf", row) if capacity == "inf" else row["leaf-lru"]
        found = replay(trace, "lru", None if capacity == "inf" else int(capacity))
        assert (found.hit_blocks, found.hit_tokens) == (expected["hit_blocks"], expected["hit_tokens"])
        assert (found.blocks, found.tokens) == (expected["blocks"], expected["tokens"])


@pytest.mark.nightly
def test_adaptive_follows_the_better_order() -> None:
    shares = []
    for name, capacities in CONTENDED.items():
        trace = load(name)
        for capacity in capacities:
            row = reference(name)[str(capacity)]
            found = replay(trace, "adaptive", capacity)
            lru, optimum = row["leaf-lru"]["hit_blocks"], row["opt-pin"]["hit_blocks"]
            points_below = 100 * (lru - found.hit_blocks) / trace.num_blocks
            assert points_below <= 0.3, (name, capacity)
            assert found.hit_blocks <= optimum
            shares.append(found.hit_blocks / optimum)
            if (name, capacity) == ("agent_a", 1000):
                assert found.hit_blocks > 1.2 * lru
    assert math.exp(sum(map(math.log, shares)) / len(shares)) >= 0.77


def test_message_log_gives_the_derived_trace() -> None:
    log = read_trace(traces_folder() / "chat.jsonl.gz", ReadOptions(block_size=64))
    derived = load("chat_bytes64")
    assert log.block_ids.tolist() == derived.block_ids.tolist()
    assert log.input_lengths.tolist() == derived.input_lengths.tolist()


def test_arrivals_have_lengths() -> None:
    workload = from_file(traces_folder() / "azure_llm_2023_code.csv.gz")
    assert len(workload) == 8819
    assert workload.trace is None
