# SPDX-License-Identifier: Apache-2.0
"""Waste inside the running engine: what the benchmark measures, on few sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trace_tools import build

from benchmarks.fragmentation import compare, prompts, scaled
from radixkv.cli.replay.workload import Workload, from_distribution


def test_engine_wastes_what_the_simulation_says() -> None:
    load = from_distribution("sharegpt", num_sequences=24, max_length=512)
    result = compare(load, model="", at_once=6, block_size=16)
    engine, simulated = result["engine"], result["paged"]
    assert engine["steps"] > 100
    assert engine["peak_sequences"] > 3
    assert 0 < engine["waste"] < 0.04
    assert engine["waste"] == pytest.approx(simulated["waste"], abs=0.005)


def test_shared_blocks_count_once() -> None:
    # everybody begins with the same 64 tokens, and has 9 tokens of its own at the end
    trace = build([[0, 1, 2 + n] for n in range(12)], block_size=32)
    load = Workload("shared", np.full(12, 73), np.full(12, 30), trace)
    shared = compare(load, model="", at_once=4, block_size=16)
    apart = compare(Workload("apart", np.full(12, 73), np.full(12, 30)), model="", at_once=4, block_size=16)
    assert shared["engine"]["peak_sequences"] > apart["engine"]["peak_sequences"]
    for result, scheme in ((shared, "paged+sharing"), (apart, "paged")):
        assert result["engine"]["waste"] == pytest.approx(result[scheme]["waste"], abs=0.04)


def test_scaled_traces_keep_what_is_shared(tmp_path: Path) -> None:
    trace = build([[0, 1], [0, 2], [3]], block_size=32)
    load = scaled(Workload("t", trace.input_lengths, trace.output_lengths, trace), requests=3, scale=4)
    first, second, third = prompts(load, 50_000)
    assert [len(p) for p in (first, second, third)] == [16, 16, 8]
    assert (first[:8] == second[:8]).all()
    assert (first[8:] != second[8:]).any()
    assert (third != first[:8]).any()
