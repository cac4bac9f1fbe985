# SPDX-License-Identifier: Apache-2.0
"""An engine that frees its windows behind HTTP: hits, reasons, and what is shown."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from late_copies import LateStateWindowedModel
from live_server import live_server
from paged_language_model import LetterTokenizer, make_engine
from windowed_hash_model import WindowedHashModel

from radixkv.cache.states.window_pool import WindowSpec
from radixkv.entrypoints.async_engine import AsyncEngine

TEXT = "".join(chr(97 + i * i % 23) for i in range(200))


@pytest.mark.parametrize("num_slots", [0, 8])
def test_kept_windows_are_shown(num_slots: int) -> None:
    """Of a model without states, and of one with some."""
    spec = WindowSpec(tokens=24, num_blocks=0, step_tokens=64)
    spec = replace(spec, num_blocks=8 + 2 * spec.blocks_per_request(8))
    model: Any = WindowedHashModel(64, 8, spec)
    if num_slots:
        model = LateStateWindowedModel(64, 8, num_slots, spec=spec)
    made, _ = make_engine(model=model, num_blocks=64, max_num_seqs=2, tokenizer=LetterTokenizer())
    engine = AsyncEngine(made)
    with live_server(engine) as server, server.http() as client:

        def ask(text: str) -> dict[str, Any]:
            body = {"model": "paged-hash", "prompt": text, "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
            return details

        assert ask(TEXT)["cached_tokens"] == 0
        assert ask(TEXT)["cached_tokens"] == 192
        missed = ask(TEXT[:150] + "?" * 20)["cache_miss"]
        assert (missed["reason"], missed["position"], missed["kv_tokens"]) == ("no_state", 0, 144)
        windows = client.get("/v1/cache").json()["freed_windows"]
        nodes = client.get("/v1/cache/tree").json()["nodes"]
        metrics = client.get("/metrics").text
    asyncio.run(engine.close())
    kept = [checkpoint["tokens"] for node in nodes for checkpoint in node.get("checkpoints", ())]
    assert sorted(kept) == [128, 192]  # where the second prompt parted, and the end of the first
    assert windows["checkpoints"] == 2
    assert windows["total_blocks"] == spec.num_blocks
    free = windows["free_blocks"]
    assert f'radixkv_window_blocks{{state="free"}} {float(free)}' in metrics
    assert f'radixkv_window_blocks{{state="used"}} {float(spec.num_blocks - free)}' in metrics
    assert "radixkv_checkpoints 2.0" in metrics
    assert ("radixkv_checkpoints_evicted_for_windows_total 0.0" in metrics) == bool(num_slots)
    assert (f"radixkv_state_slots_capacity {float(num_slots)}" in metrics) == bool(num_slots)
    assert ('radixkv_state_slots{state="cached"} 2.0' in metrics) == bool(num_slots)
    assert ("radixkv_state_slots" in metrics) == bool(num_slots)
