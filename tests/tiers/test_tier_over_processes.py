# SPDX-License-Identifier: Apache-2.0
"""The disk tier of engines that fail and are made anew, and of engines in other processes."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pytest
from paged_language_model import PagedHashModel, make_engine
from tier_engines import GREEDY as SAMPLING
from tier_engines import PROMPT as TOKENS
from tier_engines import assert_right
from tiny_models import save_tiny_model

from radixkv.cluster.remote.process import start_engine
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.entrypoints.engine_thread import RestartPolicy
from radixkv.entrypoints.llm import LLM
from radixkv.errors import EngineStoppedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.tiers.disk.disk_tier import DiskTier
from radixkv.tiers.record import BlockKind
from radixkv.tiers.tier import TierStack

PROMPT = [5 + 7 * i % 90 for i in range(53)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.nightly
def test_an_engine_in_another_process_leaves_its_blocks(tmp_path):
    model = str(save_tiny_model(tmp_path / "model", "llama"))
    options: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "threads": 1}
    tier = f"disk:{tmp_path / 'kv'}"

    async def life() -> list[int]:
        make = partial(AsyncEngine.from_config, EngineConfig(model=model, kv_tier=(tier,), **options))
        engine = await asyncio.to_thread(start_engine, make)
        try:
            return (await engine.generate(Request(PROMPT, GREEDY))).outputs[0].token_ids
        finally:
            await engine.close()

    tokens = asyncio.run(life())
    with LLM(model, kv_tier=tier, **options) as llm:
        (output,) = llm.generate([PROMPT], GREEDY)
    assert output.outputs[0].token_ids == tokens
    assert output.num_cached_tokens == 48


@pytest.mark.injects_faults
@pytest.mark.nightly
def test_an_engine_that_is_made_anew_opens_the_folder_again(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("radixkv"), "disabled", True)
    kind = BlockKind("paged-hash", "", 8, 24 * 8)
    num_made = 0

    def die(batch: Any) -> bool:
        if num_made == 1 and len(batch.token_ids) == 3:
            raise SystemExit("memory is broken")
        return False

    def source() -> Engine:
        nonlocal num_made
        num_made += 1
        tier = TierStack([DiskTier(tmp_path, 1 << 20, kind)])
        engine, _ = make_engine(model=PagedHashModel(64, 8, fail_if=die), tier=tier, load_deadline_s=60.0)
        return engine

    async def life() -> None:
        serving = AsyncEngine(source, restart=RestartPolicy(pause_s=0.001))
        try:
            assert_right(await serving.generate(Request(TOKENS, SAMPLING)), num_cached_tokens=0)
            with pytest.raises(EngineStoppedError):
                await serving.generate(Request([60, 61, 62], SAMPLING))
            while not serving.is_healthy:
                await asyncio.sleep(0)
            assert_right(await serving.generate(Request(TOKENS, SAMPLING)))
        finally:
            await serving.close()
        serving = AsyncEngine(source)
        try:
            assert_right(await serving.generate(Request(TOKENS, SAMPLING)), num_cached_tokens=40)
        finally:
            await serving.close()

    asyncio.run(life())
    assert num_made == 3
