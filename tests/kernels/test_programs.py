# SPDX-License-Identifier: Apache-2.0
"""How many programs a GPU's plans have: a lone decode fills the card, and partials stay bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixkv_kernels import KVSpec
from radixkv_kernels.interface import BackendConfig
from radixkv_kernels.triton import plan as triton_plan
from radixkv_kernels.triton.plan import HEADER, TritonPlan, partial_slots, work_settings
from radixkv_kernels.triton.plan_buffers import PlanBuffers
from radixkv_kernels.triton.tiles import Tiling

#: Multiprocessors of an H100.
PROCESSORS = 132


def make_plan(
    queries: list[int],
    contexts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    heads: tuple[int, int] = (32, 8),
    block_size: int = 16,
    deterministic: bool = False,
    window: int | None = None,
) -> TritonPlan:
    """The plan of an H100 for requests that share nothing, checked to fit the memory that is set aside."""
    monkeypatch.setattr(triton_plan, "_programs", lambda device: 4 * PROCESSORS)
    spec = KVSpec(1, 1, block_size, heads[1], 128, torch.bfloat16, torch.device("cpu"))
    limits = {
        "max_num_tokens": max(16, sum(queries)),
        "max_num_seqs": len(queries),
        "max_model_len": max(contexts),
    }
    config = BackendConfig(heads[0], spec, torch.bfloat16, deterministic=deterministic, **limits)
    tiling = Tiling(config)
    settings = work_settings(config, tiling)
    blocks = itertools.count()
    tables = [
        np.fromiter(itertools.islice(blocks, -(-context // block_size)), np.int32) for context in contexts
    ]
    plan = TritonPlan(
        config,
        settings,
        np.cumsum([0, *queries]),
        np.array(contexts),
        tables,
        unit=tiling.unit,
        max_partials=partial_slots(config, settings),
    )
    placed, blob = plan.packed(window)
    assert len(placed.slots) <= partial_slots(config, settings)
    assert len(blob) <= len(PlanBuffers(config, settings).host)
    assert_all_keys_once(plan, blob, contexts, queries, tiling.unit, window)
    return plan


def assert_all_keys_once(
    plan: TritonPlan, blob: np.ndarray, contexts: list[int], queries: list[int], unit: int, window: int | None
) -> None:
    """What the kernel reads covers every key that a token sees, once."""
    short, long = int(blob[0]), int(blob[1])
    items = blob[HEADER : HEADER + 8 * (short + long)].reshape(-1, 8)
    assert items.max(initial=0) >= 0
    ranges: dict[int, list[tuple[int, int]]] = {}
    for start, count, _, first, end, *_ in items.tolist():
        for token in plan.work(window).tokens[start : start + count].tolist():
            ranges.setdefault(token, []).append((first * unit, end * unit))
    owner = np.arange(len(queries)).repeat(queries)
    for token, own in ranges.items():
        own.sort()
        position = int(plan.token_positions[token])
        low = 0 if window is None else max(0, position - window + 1)
        assert own[0][0] <= low
        assert all(before[1] == after[0] for before, after in itertools.pairwise(own))
        assert own[-1][1] > position
        assert position < contexts[owner[token]]
    assert len(ranges) == sum(queries)


def programs(plan: TritonPlan, num_kv_heads: int = 8, window: int | None = None) -> int:
    work = plan.work(window)
    return (len(work.short_items) + len(work.long_items)) * num_kv_heads


@pytest.mark.parametrize("context", [2048, 2049, 2500, 8192, 32768])
def test_a_lone_decode_fills_the_card(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = programs(make_plan([1], [context], monkeypatch))
    assert PROCESSORS <= count <= 6 * PROCESSORS


@pytest.mark.parametrize("requests", [2, 5, 32, 200])
def test_so_do_several(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = programs(make_plan([1] * requests, [2048] * requests, monkeypatch))
    assert count >= PROCESSORS
    # One for each request and KV head, or about as many as keep the card busy.
    assert count <= max(8 * requests, 8 * PROCESSORS)


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (64, 1), (32, 32)])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 700])
def test_any_mixture_is_covered(
    heads: tuple[int, int], block_size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    for size in (1, 2, 9):
        queries = random.choice([1, 1, 3, 40, 300], size).tolist()
        contexts = [int(n + random.integers(0, 3000)) for n in queries]
        make_plan(queries, contexts, monkeypatch, heads=heads, block_size=block_size, window=window)


def test_a_short_context_is_not_cut_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs(make_plan([1], [20], monkeypatch)) == 8
    assert programs(make_plan([1], [500], monkeypatch)) == 64


def test_a_chunk_on_a_long_prefix_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs(make_plan([32], [1024], monkeypatch)) >= PROCESSORS // 2


def test_deterministic_mode_has_segments_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row's sums are cut must not depend on the step."""
    assert programs(make_plan([1], [2048], monkeypatch, deterministic=True)) == 4 * 8
